"""The few Linux calls that Python does not offer: prctl(2)."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int | bytes) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def set_parent_death_signal(number: signal.Signals | int) -> None:
    """Have the kernel send `number` to this process when the *thread* that created it ends; 0 disarms.

    It comes even while a C call holds the interpreter lock, which no watching thread can (QUEUE.md: 1 ms against
    890 ms). It does not come if the parent died before this call: compare getppid() afterwards.
    """
    _prctl(_PR_SET_PDEATHSIG, int(number))


def become_subreaper() -> None:
    """Orphaned descendants become this process's children instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_comm(name: str) -> None:
    """Set the kernel's name of the calling thread, shown by ps -o comm and GPU tools; cut at 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode()[:15])
