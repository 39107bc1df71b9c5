"""Messages too large for the ring: a region of the arena each, lent to all readers, given back by the last.

The arena is one memfd that every endpoint holds from the start and that only grows, so no descriptor has to
reach a reader later. Streaming such messages in chunks through the ring was the alternative: it needs no second
memfd, but every reader must copy (32 MiB to a reader: about 18 ms against 0.01 ms for a private mapping; most of a copy
is page faults), and it fills the ring before everybody's small messages.

- *Warm zone* (the first 64 MiB): pages stay once touched, and the writer keeps it mapped: 2 ms to copy 32 MiB into it.
- *Cold zone* behind it: written by pwrite, which is twice as fast as a mapping for new pages (16 against 32 ms); its
  pages go back to the kernel when the last reader leaves.

**Slots.** Each region has a slot: one state byte per reader. The writer sets HELD for those who shall read it, before
it publishes the record. A reader that is done sets LEAVING, passes a fence, and looks at all the others: if nobody
still holds the region, it punches the hole; only then it sets RELEASED. Of two that leave together at least one sees
the other leaving; if both do, both punch, which is harmless, because the writer takes the region back only when
*all* are RELEASED. A reader that was declared dead is not waited for: the writer punches in its stead.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from launcher.errors import HostError
from launcher.ipc import native, segment
from launcher.ipc.extents import Extents
from launcher.ipc.fences import Fences
from launcher.ipc.layout import HELD, LEAVING, PAGE, RELEASED, SLOTS, WARM_BYTES, round_up, slot_at

_COLD_BYTES = 1 << 44


class Region(NamedTuple):
    slot: int
    offset: int
    length: int
    """Bytes, whole pages."""
    holders: tuple[int, ...]
    end: int
    """Cursor behind the record that names it: a reader beyond it has received the message."""
    sequence: int
    """Number of that record."""


class ArenaWriter:
    """The writer's side. Knows every region that is out; all other state is in the slots."""

    def __init__(self, name: str, fd: int, header: memoryview) -> None:
        self._name = name
        self._fd = fd
        self._header = header
        self._warm = Extents(0, WARM_BYTES)
        self._cold = Extents(WARM_BYTES, _COLD_BYTES)
        self._size = os.fstat(fd).st_size
        self._touched = 0
        self._map: mmap.mmap | None = None
        self._spare = list(range(SLOTS))
        self.regions: dict[int, Region] = {}
        self.dead: set[int] = set()

    @property
    def spare_slots(self) -> int:
        return len(self._spare)

    def unread(self, slowest: int) -> int:
        """Bytes sent that a reader at cursor `slowest` has not received."""
        return sum(region.length for region in self.regions.values() if region.end > slowest)

    def first_end(self, slowest: int) -> int | None:
        """The cursor at which the oldest unread region will have been received."""
        return min((region.end for region in self.regions.values() if region.end > slowest), default=None)

    def lend(self, length: int, holders: Sequence[int], end: int, sequence: int) -> Region:
        """Set `length` bytes apart for record `sequence`, which ends at `end`. Raises `HostError` when memory is short.

        There must be a spare slot.
        """
        size = round_up(max(length, 1), PAGE)
        offset = self._warm.take(size)
        zone = self._warm
        if offset is None:
            zone = self._cold
            offset = zone.take(size)
            assert offset is not None  # 16 TiB
        try:
            fresh = size if zone is self._cold else max(0, offset + size - self._touched)
            segment.require_headroom(fresh, f"a message of {length / 2**20:.0f} MiB in queue {self._name!r}")
            self._grow(WARM_BYTES if zone is self._warm else offset + size)
        except BaseException:
            zone.give(offset, size)
            raise
        region = Region(self._spare.pop(), offset, size, tuple(holders), end, sequence)
        line = slot_at(region.slot)
        for reader in holders:
            self._header[line + reader] = HELD
        self.regions[region.slot] = region
        return region

    def fill(self, region: Region, parts: Iterable[tuple[int, memoryview]]) -> None:
        """Copy each part to its offset within the region, or take it back. Then the sender may overwrite its own."""
        try:
            self._fill(region, parts)
        except BaseException:
            self.take_back(region)
            raise

    def _fill(self, region: Region, parts: Iterable[tuple[int, memoryview]]) -> None:
        end = region.offset + region.length
        if end <= self._touched:
            if self._map is None:
                self._map = segment.map_shared(self._fd, WARM_BYTES)
            for at, part in parts:
                place = region.offset + at
                if native.MODULE is not None:
                    native.MODULE.copy(self._map, place, part)
                else:
                    self._map[place : place + part.nbytes] = part
            return
        for at, part in parts:
            segment.write_at(self._fd, part, region.offset + at)
        if end <= WARM_BYTES:
            self._touched = max(self._touched, end)

    def take_back(self, region: Region) -> None:
        """A region that was never published."""
        line = slot_at(region.slot)
        for reader in region.holders:
            self._header[line + reader] = RELEASED
        self._reuse(region)

    def reclaim(self) -> None:
        """Take back what every living reader has released."""
        for region in list(self.regions.values()):
            line = slot_at(region.slot)
            late = [r for r in region.holders if self._header[line + r] != RELEASED]
            if all(reader in self.dead for reader in late):
                for reader in late:
                    self._header[line + reader] = RELEASED
                self._reuse(region)

    def forgive(self, reader: int, read: int = 0) -> None:
        """Count as released what was lent to `reader`, from record `read` on."""
        for slot, region in self.regions.items():
            if reader in region.holders and region.sequence >= read:
                self._header[slot_at(slot) + reader] = RELEASED

    def held_by(self, reader: int) -> int:
        """How many regions `reader` has not released."""
        held = [slot for slot, region in self.regions.items() if reader in region.holders]
        return sum(self._header[slot_at(slot) + reader] != RELEASED for slot in held)

    def _reuse(self, region: Region) -> None:
        del self.regions[region.slot]
        self._spare.append(region.slot)
        if region.offset < WARM_BYTES:
            self._warm.give(region.offset, region.length)
        else:
            # The last reader has done so, unless it was killed; on a hole it costs nothing.
            segment.punch_hole(self._fd, region.offset, region.length)
            self._cold.give(region.offset, region.length)

    def _grow(self, size: int) -> None:
        if size > self._size:
            try:
                os.ftruncate(self._fd, size)
            except OSError as error:
                raise HostError(f"queue {self._name!r} cannot grow to {size} bytes: {error.strerror}") from error
            self._size = size

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None


class ArenaReader:
    """One reader's side: maps regions, and releases each when nothing on it is alive any more."""

    def __init__(self, fd: int, header: memoryview, readers: int, index: int) -> None:
        """`fd` and `header` become ours: views that outlive the reader need them."""
        self._fd = fd
        self._header = header
        self._readers = readers
        self._index = index
        self._pid = os.getpid()
        self._closed = False
        self._lent: set[int] = set()
        """Slots of regions that something here still points to."""

    def open(self, slot: int, offset: int, length: int) -> memoryview:
        """The message's bytes, private and writable, released with the last object that points to them."""
        size = round_up(max(length, 1), PAGE)
        view = segment.map_private(self._fd, offset, size, lambda: self._release(slot, offset, size))
        self._lent.add(slot)
        return view[:length]

    def _release(self, slot: int, offset: int, size: int) -> None:
        # A forked child has inherited the mapping, not the loan.
        if os.getpid() != self._pid:
            return
        line = slot_at(slot)
        mine = line + self._index
        self._header[mine] = LEAVING
        Fences().full()  # its own: this runs in whichever thread drops the last reference
        last = HELD not in self._header[line : line + self._readers].tolist()
        if last and offset >= WARM_BYTES:
            segment.punch_hole(self._fd, offset, size)
        Fences().publish()
        self._header[mine] = RELEASED
        self._lent.discard(slot)
        self._free()

    def close(self) -> None:
        """Views that are still alive stay valid; they release their regions when they die."""
        self._closed = True
        self._free()

    def _free(self) -> None:
        if self._closed and not self._lent and self._fd >= 0:
            self._header.release()
            os.close(self._fd)
            self._fd = -1
