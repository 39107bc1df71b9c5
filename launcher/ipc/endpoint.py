"""What writer and reader have in common: the mapped header, the descriptors, the fences, the place to sleep."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Sequence

from launcher.errors import InternalError
from launcher.ipc import segment
from launcher.ipc.fences import Fences
from launcher.ipc.handle import DESCRIPTORS, RingHandle
from launcher.ipc.layout import CAPACITY_WORD, CLOSED_WORD, DATA_AT, MAGIC, MAGIC_WORD, READERS_WORD
from launcher.ipc.waiting import Parking, Spin

_GONE = memoryview(struct.pack("<" + "Q" * (CLOSED_WORD + 1), *[0] * CLOSED_WORD, 1)).cast("Q")
"""The header that a detached end sees: nothing was ever written, and it is closed. Spares the hot paths a check."""


class Endpoint:
    """An attached end. One thread uses it at a time, but for `shutdown`.

    Takes the descriptors over (also when it raises); with ``own_fds=False`` it duplicates them instead.
    """

    def __init__(self, handle: RingHandle, fds: Sequence[int], role: str, own_fds: bool) -> None:
        self.handle = handle
        self.name = handle.name
        self._pid = os.getpid()
        fds = list(fds) if own_fds else [os.dup(fd) for fd in fds]
        self._owned = list(fds)
        try:
            if handle.role != role or len(fds) != DESCRIPTORS:
                raise InternalError(
                    f"queue {handle.name!r}: a {role} cannot attach with a {handle.role}'s handle "
                    f"and {len(fds)} descriptors"
                )
            self._map: mmap.mmap | None = segment.map_shared(fds[0], DATA_AT + handle.capacity)
        except BaseException:
            self._close_fds()
            raise
        # The mapping keeps a descriptor of its own.
        os.close(self._owned.pop(0))
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("Q")
        self._arena_fd = fds[1]
        self._writer_event, self._readers_event = fds[2:]
        self._fences = Fences()
        self.spin = Spin()
        self._parking: Parking | None = None
        found = (self._words[MAGIC_WORD], self._words[CAPACITY_WORD], self._words[READERS_WORD])
        wanted = (MAGIC, handle.capacity, handle.readers)
        if found != wanted:
            self._detach()
            raise InternalError(f"queue {handle.name!r}: its memory says (magic, bytes, readers) {found}, not {wanted}")

    @property
    def closed(self) -> bool:
        """True after `close` here, or `shutdown` by anyone."""
        return bool(self._words[CLOSED_WORD])

    def _detach(self) -> None:
        self._words.release()
        self._bytes.release()
        self._words = _GONE
        mapping, self._map = self._map, None
        if mapping is not None:
            # Arrays taken as views still need it to release their regions; then it goes with the last of them.
            with contextlib.suppress(BufferError):
                mapping.close()
        self._close_fds()

    def _close_fds(self) -> None:
        owned, self._owned = self._owned, []
        segment.close_all(owned)
