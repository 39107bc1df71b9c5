"""A core loop in a thread of the test's process, with strict workers behind it and a real socket before it."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.clock import Deadline
from launcher.engine.core_loop import CoreLoop
from launcher.engine.front import Front
from launcher.process.reports import Drain, Stop, TreeState
from tests.engine.strict import StrictWorker, make_core


class Parent:
    """The loop's line to its parent: an eventfd and a list."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._inbox: list[TreeState | Drain | Stop] = []
        self.stop_requested = False

    def fileno(self) -> int:
        return self._fd

    def news(self) -> tuple[list[TreeState | Drain | Stop], bool]:
        if select.select([self._fd], [], [], 0)[0]:
            os.eventfd_read(self._fd)
        got, self._inbox = self._inbox, []
        return got, self.stop_requested

    def say(self, message: TreeState | Drain | Stop) -> None:
        self._inbox.append(message)
        os.eventfd_write(self._fd, 1)

    def terminate(self) -> None:
        """As SIGTERM does: a flag and a wake-up."""
        self.stop_requested = True
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        os.close(self._fd)


class CoreThread:
    """`CoreLoop.run` in a thread. `left` is what it returned, `error` what it raised."""

    def __init__(self, address: str, **core: Any) -> None:
        self.address = address
        self.parent = Parent()
        self.core, self.executor = make_core(address=address, **core)
        self.loop: CoreLoop | None = None
        self.left: Deadline | None = None
        self.error: BaseException | None = None
        self._info = self.core.initialize()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def worker(self) -> StrictWorker:
        return self.executor.workers[0]

    def _run(self) -> None:
        try:
            with Front(self.address, self._info.generation) as front:
                self.loop = CoreLoop(self.core, front, self._info, self.parent)
                self.left = self.loop.run()
        except BaseException as error:
            self.error = error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def join(self, timeout: float = 10.0) -> None:
        self._thread.join(timeout)
        assert self.is_over, "the loop does not end"

    def close(self) -> None:
        if not self.is_over:
            self.executor.hangs = False
            self.parent.say(Stop(budget=1))
        self.join()
        self.executor.shutdown(1)
        self.parent.close()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/core"


@pytest.fixture
def start_core(address: str) -> Iterator[Callable[..., CoreThread]]:
    """``start_core(**make_core's)`` starts one at `address`; all are ended after the test."""
    started: list[CoreThread] = []

    def start(**core: Any) -> CoreThread:
        thread = CoreThread(address, **core)
        started.append(thread)
        return thread

    yield start
    for thread in started:
        thread.close()
