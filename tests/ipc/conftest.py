"""Queues in one process, and real children that are killed and reaped whatever a test does."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from launcher.clock import Deadline
from launcher.ipc import Codec, QueueReader, QueueWriter, Ring, Watched, native


class Note(msgspec.Struct):
    number: int
    text: str = ""
    payload: Any = None


CODEC = Codec({1: Note}, trusted=True)


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline.after(seconds)


class Queue:
    """A ring with its writer and all its readers in this process."""

    def __init__(self, readers: int = 1, capacity: int = 1 << 20, codec: Codec = CODEC) -> None:
        self.ring = Ring.create("test", readers, capacity)
        self.writer = QueueWriter(*self.ring.writer_handle(), codec=codec, own_fds=False)
        self.readers = [
            QueueReader(*self.ring.reader_handle(i), codec=codec, own_fds=False) for i in range(self.ring.readers)
        ]

    def send(self, obj: Any, seconds: float = 20.0) -> None:
        self.writer.enqueue(obj, deadline=soon(seconds))

    def receive(self, index: int = 0, seconds: float = 20.0) -> Any:
        return self.readers[index].dequeue(deadline=soon(seconds))

    def close(self) -> None:
        self.writer.close()
        for reader in self.readers:
            reader.close()
        self.ring.close()


def flood(step: Callable[[], object]) -> NoReturn:
    """Until it raises."""
    while True:
        step()


class Forked:
    """A forked child that runs `body`; its answer (or traceback) comes over a pipe."""

    def __init__(self, body: Callable[[], Any]) -> None:
        self._out, child_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(self._out)
                os.write(child_end, msgspec.msgpack.encode(body()))
                code = 0
            except BaseException:
                os.write(child_end, msgspec.msgpack.encode(traceback.format_exc()))
            finally:
                os._exit(code)
        os.close(child_end)
        self.pidfd = os.pidfd_open(self.pid)
        self._code: int | None = None

    def peer(self, rank: int | None = None) -> Watched:
        return Watched(self.pidfd, f"Child_{rank}", rank, self.pid)

    def kill(self) -> None:
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self.pidfd, number)

    def answer(self) -> Any:
        """Wait for its end; what `body` returned."""
        with open(self._out, "rb", closefd=False) as pipe:
            data = pipe.read()
        assert self.reap() == 0, data.decode(errors="replace")
        return msgspec.msgpack.decode(data)

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def sleeps(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"

    def reap(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def close(self) -> None:
        if self._code is None:
            self.kill()
            self.reap()
        os.close(self.pidfd)
        os.close(self._out)


_WITHOUT_QUEUES = {"test_codec", "test_extents", "test_layout", "test_bench"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What uses queues runs twice: with the hot calls in C, and in Python alone."""
    if metafunc.module.__name__.rpartition(".")[2] not in _WITHOUT_QUEUES:
        only = {"test_order": ["python"], "test_native": ["c"]}
        halves = only.get(metafunc.module.__name__.rpartition(".")[2], ["c", "python"])
        metafunc.parametrize("half", halves, indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def half(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which half of the queue's code the test is for: ``c`` or ``python``."""
    which = getattr(request, "param", "python")
    if which == "c" and native.MODULE is None:
        pytest.skip("launcher/ipc/_native.c is not built here")
    with pytest.MonkeyPatch.context() as patch:
        if which == "python":
            patch.setattr(native, "MODULE", None)
        yield which


@pytest.fixture
def queues() -> Iterator[Callable[..., Queue]]:
    made: list[Queue] = []

    def make(*args: Any, **kwargs: Any) -> Queue:
        made.append(Queue(*args, **kwargs))
        return made[-1]

    yield make
    for queue in made:
        queue.close()


@pytest.fixture
def fork() -> Iterator[Callable[[Callable[[], Any]], Forked]]:
    made: list[Forked] = []

    def start(body: Callable[[], Any]) -> Forked:
        made.append(Forked(body))
        return made[-1]

    yield start
    for child in made:
        child.close()


Queues = Callable[..., Queue]
Fork = Callable[[Callable[[], Any]], Forked]
