"""Signals as bytes on a pipe: a handler decides nothing, the loop that polls the pipe does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from types import FrameType

_RESET = [s for s in signal.Signals if s not in (signal.SIGKILL, signal.SIGSTOP)]


def reset_in_child() -> None:
    """Undo what a forked child inherits: handlers to their defaults, nothing blocked, no wake-up descriptor.

    SIGPIPE stays ignored (writes to a dead peer are an EPIPE that we handle), SIGINT is ignored: a Ctrl-C belongs to
    the process at the terminal, which then stops its children in order. An ignored SIGHUP stays ignored (nohup).
    """
    signal.set_wakeup_fd(-1)
    for number in _RESET:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            continue  # a real-time signal that the C library keeps for itself
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


class SignalPipe:
    """Turns the given signals into readable bytes on `fileno()`. One per process, main thread only.

    Every signal writes its number (set_wakeup_fd); the Python-level handler does nothing. The pipe is non-blocking on
    both sides: if it is full the wake-up is already due.
    """

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, _ignore) for number in numbers}

    def fileno(self) -> int:
        return self._read

    def read(self) -> list[signal.Signals]:
        """Signals since the last call, oldest first."""
        try:
            data = os.read(self._read, 4096)
        except BlockingIOError:
            return []
        # Other handled signals of the process land here too; only ours count.
        return [signal.Signals(n) for n in data if n in self._old]

    def close(self) -> None:
        """Restore what was there before."""
        if self._read < 0:
            return
        for number, handler in self._old.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._read)
        os.close(self._write)
        self._read = self._write = -1


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """The byte is already in the pipe."""
