"""Free space of an arena zone: first fit, lowest offset first, neighbours merged. Pure."""

from __future__ import annotations

from bisect import insort


class Extents:
    """`size` bytes from `start`; all multiples of the caller's page."""

    def __init__(self, start: int, size: int) -> None:
        self._free: list[tuple[int, int]] = [(start, size)]

    def take(self, size: int) -> int | None:
        """Offset of `size` bytes, or None when no gap is large enough."""
        for i, (start, length) in enumerate(self._free):
            if length >= size:
                if length == size:
                    del self._free[i]
                else:
                    self._free[i] = (start + size, length - size)
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Give back what `take` returned."""
        insort(self._free, (start, size))
        i = self._free.index((start, size))
        if i + 1 < len(self._free) and start + size == self._free[i + 1][0]:
            size += self._free.pop(i + 1)[1]
            self._free[i] = (start, size)
        if i and sum(self._free[i - 1]) == start:
            before = self._free[i - 1]
            self._free[i - 1 : i + 1] = [(before[0], before[1] + size)]

    @property
    def free(self) -> list[tuple[int, int]]:
        """(start, length) of each gap, in order."""
        return list(self._free)
