"""The owner's side of a ring: makes the memory and the eventfds, hands out its ends, and owns them until closed."""

from __future__ import annotations

import os
import struct

from launcher.config import RING_BYTES
from launcher.errors import UsageError
from launcher.ipc import segment
from launcher.ipc.handle import RingHandle
from launcher.ipc.layout import CLOSED_AT, MAGIC, MAX_READERS, MIN_CAPACITY, PAGE, round_up


class Ring:
    """Neither writes nor reads: attach a `QueueWriter` or `QueueReader` for that, here or in another process."""

    def __init__(self, name: str, readers: int, capacity: int, fds: list[int]) -> None:
        self.name = name
        self.readers = readers
        self.capacity = capacity
        self._fds = fds

    @classmethod
    def create(cls, name: str, readers: int, capacity: int = RING_BYTES) -> Ring:
        """A ring for `readers` (1 … 64) and `capacity` bytes, rounded up to pages.

        Every reader counts from the first record on, attached or not: what is written before it attaches waits for it.
        Places for readers that may come later are declared dead until `QueueWriter.admit`.
        Raises `UsageError` for numbers out of range, `HostError` when memory is short.
        """
        if not 1 <= readers <= MAX_READERS:
            raise UsageError(f"ring {name!r}: {readers} readers; a ring has 1 to {MAX_READERS}")
        if not MIN_CAPACITY <= capacity < 1 << 32:
            raise UsageError(f"ring {name!r}: {capacity} bytes; give {MIN_CAPACITY} to {(1 << 32) - 1} (--ring-bytes)")
        capacity = round_up(capacity, PAGE)
        fds: list[int] = []
        try:
            fds.append(segment.create_ring_memory(name, capacity))
            fds.append(segment.create_arena_memory(name))
            fds += [segment.create_eventfd(), segment.create_eventfd()]
            os.pwrite(fds[0], struct.pack("<QQQ", MAGIC, capacity, readers), 0)
        except BaseException:
            segment.close_all(fds)
            raise
        return cls(name, readers, capacity, fds)

    def writer_handle(self) -> tuple[RingHandle, list[int]]:
        """The writing end and its descriptors, borrowed: send duplicates (SCM_RIGHTS makes them) before `close`."""
        handle = RingHandle(name=self.name, capacity=self.capacity, readers=self.readers, role="writer")
        return handle, list(self._fds)

    def reader_handle(self, index: int) -> tuple[RingHandle, list[int]]:
        """Reader `index`'s end and its descriptors, borrowed."""
        if not 0 <= index < self.readers:
            raise UsageError(f"ring {self.name!r} has readers 0 to {self.readers - 1}, not {index}")
        handle = RingHandle(name=self.name, capacity=self.capacity, readers=self.readers, role="reader", index=index)
        return handle, list(self._fds)

    def shutdown(self) -> None:
        """Close the ring for both sides and wake everyone who waits on it."""
        os.pwrite(self._fds[0], struct.pack("<Q", 1), CLOSED_AT)
        for fd in self._fds[2:]:
            segment.wake(fd)

    def close(self) -> None:
        """Close our descriptors; ends that are attached live on. Idempotent."""
        fds, self._fds = self._fds, []
        segment.close_all(fds)
