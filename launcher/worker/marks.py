"""Where each rank is, in shared memory: written by the ranks, read by the engine core, needing nobody's help.

One page of a memfd, 64 bytes a rank (a cache line of its own)::

    0   u64   busy since, monotonic nanoseconds; 0: idle
    8   u64   number of the call it is in, or was in last
    16  u64   steps carried out
    24  u64   1 while it waits for other ranks (a collective), else 0

Every field is written by its rank alone, with aligned 8-byte stores, and read at any time: a reader may see two fields
of different moments, which is good enough for a question asked in seconds. A hung rank can't answer questions; this it
has answered before.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import NamedTuple

_LINE = 64
_BUSY, _CALL, _STEPS, _WAITING = 0, 1, 2, 3


class Place(NamedTuple):
    """One rank, at a moment."""

    busy_since: float
    """Monotonic seconds; 0: idle."""
    call_id: int
    steps: int
    waiting: bool
    """It waits for other ranks."""


class MarkPage:
    """The owner's side (engine core). `fd` is borrowed: to be sent to every rank."""

    def __init__(self, ranks: int) -> None:
        self.fd = os.memfd_create("marks", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, ranks * _LINE)
        self._map = mmap.mmap(self.fd, ranks * _LINE)
        self._words = memoryview(self._map).cast("Q")

    def place(self, rank: int) -> Place:
        at = rank * _LINE // 8
        busy, call, steps, waiting = self._words[at : at + 4]
        return Place(busy / 1e9, call, steps, bool(waiting))

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self.fd)


class Mark:
    """A rank's side. Takes `fd` over; without one it writes into memory of its own (tests, `uni`)."""

    def __init__(self, fd: int = -1, rank: int = 0) -> None:
        size = (rank + 1) * _LINE
        self._map = mmap.mmap(fd, size) if fd >= 0 else mmap.mmap(-1, size)
        if fd >= 0:
            os.close(fd)
        self._words = memoryview(self._map).cast("Q")
        self._at = rank * _LINE // 8

    def begin(self, call_id: int) -> None:
        self._words[self._at + _CALL] = call_id
        self._words[self._at + _BUSY] = time.monotonic_ns()

    def end(self, *, step: bool) -> None:
        if step:
            self._words[self._at + _STEPS] += 1
        self._words[self._at + _BUSY] = 0

    def waits(self, waiting: bool) -> None:
        """Around a wait for other ranks: whoever does not wait is the one the others wait for."""
        self._words[self._at + _WAITING] = waiting

    @property
    def call_id(self) -> int:
        return self._words[self._at + _CALL]

    @property
    def steps(self) -> int:
        return self._words[self._at + _STEPS]

    @property
    def busy(self) -> bool:
        return self._words[self._at + _BUSY] != 0

    def close(self) -> None:
        self._words.release()
        self._map.close()
