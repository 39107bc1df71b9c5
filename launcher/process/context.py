"""What a role's target is given: its spec, its descriptors, and its line to the parent."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import setproctitle

from launcher import clock
from launcher.clock import Deadline
from launcher.errors import ClosedError, DeadlineError, Failure, XserveError
from launcher.process import channel as channels
from launcher.process import kernel, signals
from launcher.process.reports import (
    Drain,
    Handover,
    Hang,
    Ping,
    Pong,
    ReadyReport,
    Step,
    StepReport,
    Stop,
    TreeState,
    UpMessage,
)
from launcher.process.spec import ProcessSpec

_PROGRESS_GAP = 0.2
"""Seconds between two progress reports of one step: enough for an eye and for a limit counted in seconds."""


class ChildContext:
    """What a role's target is given: its spec, its descriptors, and its line to the parent."""

    def __init__(self, spec: ProcessSpec, up: channels.ChildChannel, status: channels.ChildChannel | None) -> None:
        self.spec = spec
        self.descriptors: dict[str, int] = {}
        """From the birth message, by name; owned by the target."""
        self.parent_pid = 0
        """Who started us. It may be gone by now: compare with getppid()."""
        self.step = Step.SPAWNED
        self.notes: Callable[[], Sequence[str]] = tuple
        """What this process did last, asked for when it fails; for the crash bundle."""
        self._up = up
        self._status = status
        self._handovers: deque[tuple[Handover, list[int]]] = deque()
        self._inbox: deque[TreeState | Drain | Stop] = deque()
        self._stop = False
        self._last_progress = 0.0
        self._watcher: threading.Thread | None = None
        self._signals: signals.SignalPipe | None = None
        self._wake = select.epoll()
        self._wake.register(up.fileno(), select.EPOLLIN)

    @property
    def channel(self) -> channels.ChildChannel:
        """The raw line to the parent, for roles that speak their own protocol over it (the helper)."""
        return self._up

    # --- up

    def send(self, message: UpMessage) -> None:
        """Report to the parent and, where there is a second line, to the supervisor. A dead listener is no error:
        the watch on the parent deals with that."""
        for line in (self._up, self._status):
            if line is not None:
                with contextlib.suppress(OSError, XserveError):
                    line.send(message)

    def enter(self, step: Step, detail: str = "") -> None:
        """Report a step of the life."""
        self.step = step
        self._last_progress = 0.0
        self.send(StepReport(step=step, detail=detail))

    def progress(self, done: float, total: float = 0, unit: str = "", detail: str = "") -> None:
        """Report progress within the step; cheap enough to call often."""
        now = clock.now()
        if now - self._last_progress >= _PROGRESS_GAP or (total and done >= total):
            self._last_progress = now
            self.send(StepReport(step=self.step, detail=detail, done=done, total=total, unit=unit))

    def ready(self, info: dict[str, Any] | None = None) -> None:
        """READY. From here on SIGTERM asks for an orderly end; before, it simply ends the process."""
        self.heed_sigterm()
        self.step = Step.READY
        self.send(ReadyReport(info=info or {}))

    def heed_sigterm(self) -> None:
        """From here on SIGTERM asks for an orderly end, though this process is not READY: it looks, and soon."""
        if self._signals is None:
            self._signals = signals.SignalPipe([signal.SIGTERM])
            self._wake.register(self._signals.fileno(), select.EPOLLIN)

    def report_hang(self, failure: Failure) -> None:
        """A child of ours is hung: the supervisor shows the stacks of all and then decides."""
        self.send(Hang(failure=failure, notes=tuple(self.notes())))

    # --- down

    def fileno(self) -> int:
        """Readable when `poll_messages` has something new or `stop_requested` may have changed."""
        return self._wake.fileno()

    @property
    def stop_requested(self) -> bool:
        """After `Stop` or SIGTERM. Looks at what has come in."""
        self._pump()
        return self._stop

    def poll_messages(self) -> list[TreeState | Drain | Stop]:
        """What the parent said since the last call, without blocking. A dead parent reads as `Stop`."""
        self._pump()
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def news(self) -> tuple[list[TreeState | Drain | Stop], bool]:
        """`poll_messages` and `stop_requested` in one look. Asked one after the other, each would take from `fileno`
        what the other has not given out: nothing would wake the caller for it again."""
        messages = self.poll_messages()
        return messages, self._stop

    def wait_handover(self, name: str, deadline: Deadline) -> tuple[bytes, list[int]]:
        """Payload and descriptors that the parent hands over for `name`.

        Raises DeadlineError, and ClosedError when told to stop.
        """
        while True:
            self._pump()
            for entry in self._handovers:
                if entry[0].name == name:
                    self._handovers.remove(entry)
                    return entry[0].payload, entry[1]
            if self._stop:
                raise ClosedError(f"told to stop while waiting for {name}")
            if deadline.expired:
                raise DeadlineError(f"the parent has not handed over {name} within {deadline.seconds:.0f} s")
            select.select([self._wake.fileno()], [], [], min(deadline.remaining(), 3600))

    def _pump(self) -> None:
        if self._signals is not None and self._signals.read():
            self._stop = True
        while True:
            try:
                got = self._up.recv_nowait()
            except EOFError:
                if not self._stop:
                    self._stop = True
                    self._inbox.append(Stop(budget=0))
                with contextlib.suppress(OSError, ValueError):
                    self._wake.unregister(self._up.fileno())  # or it would stay readable for ever
                return
            if got is None:
                return
            message, fds = got
            if isinstance(message, Ping):
                self.send(Pong(number=message.number))  # we are here because the target's own loop looked
            elif isinstance(message, Handover):
                self._handovers.append((message, fds))
            elif isinstance(message, TreeState | Drain | Stop):
                self._stop = self._stop or isinstance(message, Stop)
                self._inbox.append(message)

    # --- name and parent

    def set_title(self, title: str) -> None:
        """``xserve::<title>`` for ps and GPU tools; the kernel's short name is the spec's own."""
        setproctitle.setproctitle(f"xserve::{title}")
        if self.spec.comm:
            kernel.set_comm(self.spec.comm)

    def watch_parent(self) -> None:
        """Start the thread that ends this process when the parent's end of the channel closes.

        The parent-death signal covers a parent that died; this covers one that let go of us, and starters whose
        thread may end. Not before this process has forked its own children: a fork wants one thread.
        """
        if self._watcher is None:
            self._watcher = threading.Thread(target=_exit_on_hangup, args=(self._up.fileno(),), daemon=True)
            self._watcher.name = "parent-watch"
            self._watcher.start()


def _exit_on_hangup(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, 0)  # no events asked for: only POLLHUP and POLLERR are told
    poll.poll()
    # An orderly end closes the channel from our own side first; what is left is a parent that is gone.
    time.sleep(0.2)  # room for a target that is already ending by itself
    os._exit(1)
