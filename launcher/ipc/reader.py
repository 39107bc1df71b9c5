"""The reading end of a ring, and waiting on many of them at once."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

from launcher.clock import Deadline
from launcher.errors import ClosedError, DeadlineError, InternalError, PeerDiedError
from launcher.ipc import segment
from launcher.ipc.arena import ArenaReader
from launcher.ipc.codec import Codec
from launcher.ipc.endpoint import Endpoint
from launcher.ipc.handle import RingHandle, Watched, describe_peer
from launcher.ipc.layout import (
    ALIGN,
    ARENA_PLACE,
    ASLEEP_AT,
    CLOSED_WORD,
    CURSOR_WORD,
    DATA_AT,
    F_ARENA,
    F_BUFFERS,
    F_VIEW,
    LAP_WORD,
    LEFT,
    LENGTH_MASK,
    RECORD_HEADER,
    SKIP,
    TAG_SHIFT,
    WANTED_WORD,
    body_parts,
    reader_word,
)
from launcher.ipc.native import make_reader
from launcher.ipc.waiting import Outcome, Parking, Spin, park, sleep_ms

log = logging.getLogger(__name__)


class Empty(Enum):
    EMPTY = "nothing to read"


EMPTY: Final = Empty.EMPTY
"""What `QueueReader.try_dequeue` returns when there is nothing."""


class QueueReader(Endpoint):
    """Reader `handle.index`. One thread at a time."""

    def __init__(self, handle: RingHandle, fds: Sequence[int], *, codec: Codec, own_fds: bool = True) -> None:
        super().__init__(handle, fds, "reader", own_fds)
        self.warn_after: float | None = None
        """`dequeue` says who is missing after so many seconds; None: never (to wait idly is a worker's life)."""
        self.index = handle.index
        self.event = self._readers_event
        self._codec = codec
        self._capacity = handle.capacity
        self._mine = reader_word(handle.index)
        """Our cursor, and behind it the number of the next record: kept there and nowhere else."""
        if self._words[self._mine] == LEFT:
            self._detach()
            raise InternalError(
                f"queue {handle.name!r}: reader {handle.index} has left; the writer must admit it again"
            )
        self._watched: list[Watched] = []
        self._record = _Record(self)
        self._arena = ArenaReader(self._owned.pop(0), memoryview(self._bytes), handle.readers, handle.index)
        self.native = make_reader(self._map, handle, self._writer_event, codec, EMPTY)
        """The usual case of the calls below, in C; None: there is no C."""

    def watch(self, peer: Watched) -> None:
        """Let the writer's death end a wait, once all that it wrote is read. The descriptor stays yours."""
        self._watched.append(peer)
        self._parking = None

    @property
    def sequence(self) -> int:
        """Number of the record that comes next; the ring's first is 0."""
        return self._words[self._mine + 1] if self._map is not None else 0

    @property
    def watched(self) -> Sequence[Watched]:
        return self._watched

    # --- reading -------------------------------------------------------------------------------------------------

    def dequeue(self, *, deadline: Deadline) -> Any:
        """The next message. What was written comes before any error.

        Raises `DeadlineError`, `PeerDiedError` when a watched writer died, `ClosedError` after a shutdown.
        """
        if (native := self.native) is not None:
            parking = self._parking if self.warn_after is None else None
            got = native.take(self.spin, -1 if parking is None else parking.fd, sleep_ms(deadline))
            if got is not NotImplemented:
                return got
        words, cursor, spin = self._words, self._words[self._mine], self.spin
        if words[CURSOR_WORD] == cursor and (native or not spin.until_moved(words, CURSOR_WORD, cursor)):
            self._wait(deadline)
        return self._take()

    def try_dequeue(self) -> Any:
        """The next message, or `EMPTY`; never blocks. Raises `ClosedError` when empty after a shutdown."""
        if self.native is not None and (got := self.native.take(None, -1, 0)) is not NotImplemented:
            return got
        words = self._words
        if words[CURSOR_WORD] != words[self._mine]:
            return self._take()
        if words[CLOSED_WORD]:
            raise ClosedError(f"queue {self.name!r} is closed")
        return EMPTY

    def is_ready(self) -> bool:
        """A `dequeue` would return, or raise `ClosedError`, at once."""
        words = self._words
        return words[CURSOR_WORD] != words[self._mine] or bool(words[CLOSED_WORD])

    def comes_within(self, spin: Spin) -> bool:
        """Yield as long as `spin` says; whether there is a record then."""
        return spin.until_moved(self._words, CURSOR_WORD, self._words[self._mine])

    def _take(self) -> Any:
        words, mine, fences = self._words, self._mine, self._fences
        fences.consume()
        cursor, read = words[mine], words[mine + 1]
        if cursor < words[LAP_WORD]:
            cursor = words[LAP_WORD]
        at = cursor % self._capacity
        word = words[(DATA_AT + at) >> 3]
        if word == SKIP:
            cursor += self._capacity - at
            at = 0
            word = words[DATA_AT >> 3]
        start = DATA_AT + at
        if words[(start >> 3) + 1] != read:
            raise InternalError(f"queue {self.name!r}: found record {words[(start >> 3) + 1]} where {read} should be")
        length, kind = word & LENGTH_MASK, word >> TAG_SHIFT
        body = self._bytes[start + RECORD_HEADER : start + RECORD_HEADER + length]
        if kind >= F_ARENA << 8:
            self._require_headroom(kind, body)
        try:
            # A kind without flags is a tag.
            return self._codec.decode(kind, body, ()) if kind <= 0xFF else self._decode(kind, body)
        except Exception as error:
            raise InternalError(
                f"queue {self.name!r}: record {read} cannot be decoded: {type(error).__name__}: {error}"
            ) from error
        finally:
            # Give the record's bytes back, and wake a writer that waits for them. Also after an error: a message that
            # cannot be decoded must not stop the queue.
            fences.publish()
            words[mine] = cursor = cursor + (RECORD_HEADER + length + ALIGN - 1 & -ALIGN)
            words[mine + 1] = read + 1
            fences.full()
            wanted = words[WANTED_WORD]
            if wanted and cursor >= wanted:
                segment.wake(self._writer_event)

    def _require_headroom(self, kind: int, place: memoryview) -> None:
        """Before a large message is copied, while it is not taken yet: the caller can free memory and try again."""
        flags = kind >> 8
        if flags & F_ARENA and not flags & F_VIEW:
            segment.require_headroom(ARENA_PLACE.unpack(place)[2], f"record {self.sequence} of queue {self.name!r}")

    def _decode(self, kind: int, body: memoryview) -> Any:
        tag, flags = kind & 0xFF, kind >> 8
        keep = False
        if flags & F_ARENA:
            slot, offset, length = ARENA_PLACE.unpack(body)
            body = self._arena.open(slot, offset, length)
            keep = bool(flags & F_VIEW)
        if not flags & F_BUFFERS:
            return self._codec.decode(tag, body, ())
        (head_at, head_size), *rest = body_parts(body)
        head = body[head_at : head_at + head_size]
        views = [body[at : at + size] for at, size in rest]
        return self._codec.decode(tag, head, views if keep else [bytearray(view) for view in views])

    # --- waiting -------------------------------------------------------------------------------------------------

    def _wait(self, deadline: Deadline) -> None:
        """Sleep until there is a record."""
        if self._words[CLOSED_WORD] and not self._record.is_ready():
            raise ClosedError(f"queue {self.name!r} was shut down after record {self.sequence}")
        outcome, woken = park(self._record, self._parking or self._park(), self.spin, deadline, self.warn_after)
        if outcome is Outcome.READY:
            return
        match outcome:
            case Outcome.CLOSED:
                raise ClosedError(f"queue {self.name!r} was shut down after record {self.sequence}")
            case Outcome.DIED:
                dead = woken.dead[0]
                raise PeerDiedError(
                    f"queue {self.name!r}: {describe_peer(dead, '')} died; it had written {self.sequence} records",
                    title=dead.title,
                    rank=dead.rank,
                    pid=dead.pid,
                )
            case _:
                raise DeadlineError(
                    f"queue {self.name!r}: no record {self.sequence} within {deadline.seconds:g} s "
                    f"from {self.writer_name()}"
                )

    def _park(self) -> Parking:
        self._parking = Parking([self.event], self._watched)
        return self._parking

    def writer_name(self) -> str:
        return describe_peer(self._watched[0] if self._watched else None, "its writer")

    def arm(self) -> None:
        """Say that we sleep. The caller passes a full fence."""
        self._bytes[ASLEEP_AT + self.index] = 1

    def disarm(self) -> None:
        self._bytes[ASLEEP_AT + self.index] = 0

    def fence(self) -> None:
        self._fences.full()

    def close(self) -> None:
        """Detach; the writer no longer waits for this reader. Arrays taken as views stay valid. Idempotent."""
        if self._map is None:
            return
        if os.getpid() == self._pid:
            self._fences.publish()
            self._words[self._mine] = LEFT
            segment.wake(self._writer_event)
        self._parking = self.native = None
        self._arena.close()
        self._mine = CURSOR_WORD  # a detached end has nothing to read
        self._detach()


class _Record:
    """Waiting for one reader's next record."""

    __slots__ = ("_asleep", "_reader")

    def __init__(self, reader: QueueReader) -> None:
        self._reader = reader
        self._asleep = ASLEEP_AT + reader.index

    def is_ready(self) -> bool:
        reader = self._reader
        words = reader._words
        return words[CURSOR_WORD] != words[reader._mine]

    def is_closed(self) -> bool:
        return bool(self._reader._words[CLOSED_WORD])

    def arm(self) -> bool:
        reader = self._reader
        reader._bytes[self._asleep] = 1
        reader._fences.full()
        words = reader._words
        return words[CURSOR_WORD] != words[reader._mine] or bool(words[CLOSED_WORD])

    def disarm(self) -> None:
        self._reader._bytes[self._asleep] = 0

    def late(self, seconds: float) -> None:
        log.warning("queue %r: nothing for %.0f s from %s", self._reader.name, seconds, self._reader.writer_name())
