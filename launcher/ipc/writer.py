"""The writing end of a ring: serialises once, writes once, wakes whoever sleeps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from launcher.clock import Deadline
from launcher.errors import ClosedError, DeadlineError, InternalError, PeerDiedError, UsageError, XserveError
from launcher.ipc import segment
from launcher.ipc.arena import ArenaWriter
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
    IN_FLIGHT_BYTES,
    LAP_WORD,
    LEFT,
    RECORD_HEADER,
    SKIP,
    TAG_SHIFT,
    VIEW_BYTES,
    VIEW_RESERVE,
    WANTED_WORD,
    WRITTEN_WORD,
    body_plan,
    hot_bytes,
    pack_word,
    reader_word,
)
from launcher.ipc.native import make_writer
from launcher.ipc.waiting import WARN_SECONDS, Outcome, Parking, wait

log = logging.getLogger(__name__)


class QueueWriter(Endpoint):
    """One per ring and for the ring's whole life. One thread at a time; only `shutdown` may come from another."""

    def __init__(self, handle: RingHandle, fds: Sequence[int], *, codec: Codec, own_fds: bool = True) -> None:
        super().__init__(handle, fds, "writer", own_fds)
        self.warn_after: float | None = WARN_SECONDS
        """A blocked `enqueue` says who is missing after so many seconds; None: never."""
        self._codec = codec
        self._capacity = handle.capacity
        self._inline_max = handle.capacity // 4
        self._slowest = 0
        """Never ahead of the slowest live reader: looked up again only when the ring seems full."""
        self._set_live(list(range(handle.readers)))
        self._watched: dict[int, Watched] = {}
        self._asleep_words = tuple(range(ASLEEP_AT // 8, (ASLEEP_AT + handle.readers + 7) // 8))
        self._arena = ArenaWriter(handle.name, self._arena_fd, self._bytes)
        self._need = 0
        self._next = self._words[CURSOR_WORD]
        """The cursor behind the record that is being written."""
        self._turn = min(hot_bytes(0), handle.capacity)
        """Where in the data to look next whether we may go back to its start."""
        self._next_lap = self._words[LAP_WORD]
        """A reader whose cursor is before it holds nothing, and counts as standing there."""
        self._native = make_writer(self._map, handle, self._readers_event, self._inline_max)
        """The usual case of `enqueue` in C; None: there is no C."""

    # --- peers -------------------------------------------------------------------------------------------------

    def watch(self, index: int, peer: Watched) -> None:
        """Name reader `index`, and let its death end a blocked `enqueue`. The descriptor stays yours."""
        self._watched[index] = peer
        self._parking = None

    def declare_dead(self, index: int) -> None:
        """Reader `index` holds nothing up any more, neither the ring nor an arena region.

        Its process must be gone: one that lived on would later release regions that are no longer its own.
        """
        self._watched.pop(index, None)
        self._parking = None
        self._set_live([live for live in self._live if live != index])
        self._arena.dead.add(index)
        self._arena.reclaim()

    def admit(self, index: int) -> int:
        """A new reader `index` takes the place of one that was declared dead or has closed its end.

        It gets all records from now on: returns the sequence number of the first. Only then may it attach. Raises
        `UsageError` while the old one counts, or has arrays that lie in the queue's memory.
        """
        self._strike_leavers()
        if index in self._live:
            raise UsageError(f"queue {self.name!r}: reader {index} is still there; declare it dead, or let it close")
        if index in self._arena.dead:
            self._arena.forgive(index)
            self._arena.dead.discard(index)
        elif held := self._arena.held_by(index):
            raise UsageError(f"queue {self.name!r}: the reader {index} that left still holds {held} messages")
        word = reader_word(index)
        self._words[word + 1] = self._words[WRITTEN_WORD]
        self._words[word] = self._words[CURSOR_WORD]
        self._set_live([*self._live, index])
        return self._words[WRITTEN_WORD]

    def _strike_leavers(self) -> None:
        """Those that closed their ends. What they have read they give back themselves, what they have not, never."""
        words = self._words
        for index in [i for i in self._live if words[reader_word(i)] == LEFT]:
            self._fences.consume()
            self._arena.forgive(index, words[reader_word(index) + 1])
            self._set_live([live for live in self._live if live != index])

    def _set_live(self, live: list[int]) -> None:
        self._live = sorted(live)
        self._live_words = [reader_word(index) for index in self._live]

    # --- writing -----------------------------------------------------------------------------------------------

    def enqueue(self, obj: Any, *, deadline: Deadline) -> None:
        """Send `obj` to every live reader; its memory may be reused at once.

        Blocks while the ring is full. Raises `DeadlineError` naming the slowest readers, `PeerDiedError` when a watched
        reader died meanwhile, `ClosedError` after `shutdown`, `HostError` when memory is short for a large message,
        `UsageError` when the codec cannot carry `obj`. After an error nothing was sent.
        """
        tag, head, buffers = self._codec.encode(obj)
        if not buffers and self._native is not None and self._native.push(tag, head):
            return
        if self._words[CLOSED_WORD]:
            raise ClosedError(f"queue {self.name!r} is closed")
        if buffers:
            self._enqueue_parts(tag, head, buffers, deadline)
            return
        length = len(head)
        if length > self._inline_max:
            self._enqueue_large(tag, 0, length, [(0, memoryview(head))], deadline)
            return
        # `_reserve` for the usual case, in line: there is room ahead, and no reason to look at the readers.
        cursor = self._words[CURSOR_WORD]
        at = cursor % self._capacity
        size = (RECORD_HEADER + length + ALIGN - 1) & ~(ALIGN - 1)
        end = cursor + size
        if at + size <= self._turn and end - self._slowest <= self._capacity:
            self._next, body = end, DATA_AT + RECORD_HEADER + at
        else:
            body = self._reserve(length, deadline)
        self._bytes[body : body + length] = head
        self._publish(body, length | tag << TAG_SHIFT)

    def _enqueue_parts(
        self, tag: int, head: bytes | memoryview, buffers: Sequence[memoryview], deadline: Deadline
    ) -> None:
        table, offsets, length = body_plan(len(head), [buffer.nbytes for buffer in buffers])
        parts = [(0, memoryview(table)), (offsets[0], memoryview(head)), *zip(offsets[1:], buffers, strict=True)]
        if length > self._inline_max or length >= VIEW_BYTES:
            self._enqueue_large(tag, F_BUFFERS, length, parts, deadline)
            return
        body = self._reserve(length, deadline)
        for at, part in parts:
            self._bytes[body + at : body + at + part.nbytes] = part
        self._publish(body, pack_word(length, tag, F_BUFFERS))

    def _enqueue_large(
        self, tag: int, flags: int, length: int, parts: list[tuple[int, memoryview]], deadline: Deadline
    ) -> None:
        """The body goes to the arena, its place to the ring."""
        self._await_arena(length, deadline)
        body = self._reserve(ARENA_PLACE.size, deadline)
        if flags & F_BUFFERS and self._arena.spare_slots > VIEW_RESERVE:
            flags |= F_VIEW
        try:
            region = self._arena.lend(length, self._live, self._next, self._words[WRITTEN_WORD])
            self._arena.fill(region, parts)
        except BaseException:
            self._next_lap = self._words[LAP_WORD]  # what was reserved is not used
            raise
        ARENA_PLACE.pack_into(self._bytes, body, region.slot, region.offset, length)
        self._publish(body, pack_word(ARENA_PLACE.size, tag, flags | F_ARENA))

    def _await_arena(self, length: int, deadline: Deadline) -> None:
        """Back-pressure: wait while too much is under way, or no slot is spare. Views that are kept do not count."""
        arena = self._arena
        self._strike_leavers()
        arena.reclaim()
        while True:
            self._slowest = slowest = self._find_slowest()
            first = arena.first_end(slowest)
            enough = arena.spare_slots > 0 and arena.unread(slowest) + length <= IN_FLIGHT_BYTES
            if enough or (first is None and arena.spare_slots > 0):
                return
            if first is None:
                # Views never take the last VIEW_RESERVE slots, and copies are released before the cursor moves on.
                raise InternalError(f"queue {self.name!r}: every arena slot is held though all was read")
            self._await_readers(first, deadline)
            self._strike_leavers()
            arena.reclaim()

    def _reserve(self, length: int, deadline: Deadline) -> int:
        """Wait until a record with a body of `length` bytes fits; where its body goes. Nothing is visible yet."""
        cursor = self._words[CURSOR_WORD]
        at = cursor % self._capacity
        size = (RECORD_HEADER + length + ALIGN - 1) & ~(ALIGN - 1)
        end = cursor + size
        lap = new_lap = self._words[LAP_WORD]
        back = at + size > self._turn and self._turns_back(at, size)
        if back:
            end += self._capacity - at
            if self._slowest == cursor:
                new_lap = end - size  # nobody has anything to read: no mark, and no wait
        if new_lap == lap and end - self._slowest > self._capacity:
            self._await_readers(end - self._capacity, deadline)
        if back and new_lap == lap:
            self._words[(DATA_AT + at) >> 3] = SKIP
        self._next, self._next_lap = end, new_lap
        return DATA_AT + RECORD_HEADER + (0 if back else at)

    def _turns_back(self, at: int, size: int) -> bool:
        """Shall a record of `size` bytes go to the start of the data instead of to `at`?"""
        self._slowest = self._find_slowest()
        end, hot = at + size, hot_bytes(size)
        back = end > self._capacity or (end > hot and size <= at and self._slowest == self._words[CURSOR_WORD])
        self._turn = min(hot_bytes(0) if back else hot if end <= hot else end + hot_bytes(0), self._capacity)
        return back

    def _publish(self, body: int, word: int) -> None:
        """Header, fence, cursor, fence, then wake the sleepers (see `launcher.ipc.layout`)."""
        words = self._words
        start = (body - RECORD_HEADER) >> 3
        fences = self._fences
        words[start + 1] = written = words[WRITTEN_WORD]
        words[start] = word
        if self._next_lap != words[LAP_WORD]:
            words[LAP_WORD] = self._next_lap
        fences.publish()
        words[CURSOR_WORD] = self._next
        words[WRITTEN_WORD] = written + 1
        fences.full()
        for index in self._asleep_words:
            if words[index]:
                self._wake_sleepers()
                break
        if self._native is not None:
            self._native.turn, self._native.slowest = self._turn, self._slowest

    def _wake_sleepers(self) -> None:
        # The wake-up follows the clearing, so who says late that it sleeps is woken for nothing, and never not at all.
        for index in self._asleep_words:
            self._words[index] = 0
        segment.wake(self._readers_event)

    # --- waiting for readers -------------------------------------------------------------------------------------

    def _find_slowest(self) -> int:
        """The least read cursor; our own when nobody is left to wait for."""
        words = self._words
        slowest = min([words[word] for word in self._live_words], default=LEFT)
        # A reader that closed its end says LEFT, which is beyond any cursor.
        return min(max(slowest, words[LAP_WORD]), words[CURSOR_WORD])

    def _await_readers(self, position: int, deadline: Deadline) -> None:
        """Until every live reader's cursor is at `position` or beyond."""
        self._need = position
        while not self.is_ready():
            outcome, woken = wait(self, self._park, self.spin, deadline, self.warn_after)
            if outcome is not Outcome.READY and not (outcome is Outcome.DIED and self._only_leavers(woken.dead)):
                raise self._failure(outcome, woken.dead, deadline)

    def _park(self) -> Parking:
        if self._parking is None:
            peers = [peer for index, peer in self._watched.items() if index in self._live]
            self._parking = Parking([self._writer_event], peers)
        return self._parking

    def _failure(self, outcome: Outcome, dead: Sequence[Watched], deadline: Deadline) -> XserveError:
        record = f"record {self._words[WRITTEN_WORD]}"
        if outcome is Outcome.CLOSED:
            return ClosedError(f"queue {self.name!r} was shut down while {record} waited for room")
        if outcome is Outcome.DIED:
            peer = dead[0]
            index = next(index for index, other in self._watched.items() if other == peer)
            return PeerDiedError(
                f"queue {self.name!r}: {describe_peer(peer, '')} died while {record} waited for room; "
                f"it had read {self._words[reader_word(index) + 1]}",
                title=peer.title,
                rank=peer.rank,
                pid=peer.pid,
            )
        return DeadlineError(
            f"queue {self.name!r}: no room for {record} within {deadline.seconds:g} s; waiting for {self._laggards()}"
        )

    def _only_leavers(self, dead: Sequence[Watched]) -> bool:
        """True: all of them had closed their ends before they died, which is no failure; they are struck off."""
        indexes = [i for i, peer in self._watched.items() if peer in dead]
        if any(self._words[reader_word(i)] != LEFT for i in indexes):
            return False
        for index in indexes:
            self.declare_dead(index)
        return True

    def _laggards(self) -> str:
        """Who has not reached the position that is waited for, with the last record each has read."""
        words = self._words
        return ", ".join(
            f"{describe_peer(self._watched.get(i), f'reader {i}')} at record {words[reader_word(i) + 1]}"
            for i in self._live
            if words[reader_word(i)] < self._need
        )

    def is_ready(self) -> bool:
        self._slowest = self._find_slowest()
        return self._slowest >= self._need

    def is_closed(self) -> bool:
        return bool(self._words[CLOSED_WORD])

    @property
    def event(self) -> int:
        """For who waits for room in a poll of its own: after an `enqueue` that found none `arm` has this descriptor
        written to when there is. Nobody reads it: edge-triggered."""
        return self._writer_event

    def arm(self) -> bool:
        self._words[WANTED_WORD] = self._need
        self._fences.full()
        return self.is_ready() or self.is_closed()

    def disarm(self) -> None:
        self._words[WANTED_WORD] = 0

    def late(self, seconds: float) -> None:
        log.warning("queue %r: no room for %.0f s; missing: %s", self.name, seconds, self._laggards())

    # --- the end -------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Close the ring for both sides and wake every waiter; from any thread. Readers get what was written first."""
        if self._map is None:
            return
        self._words[CLOSED_WORD] = 1
        for event in (self._writer_event, self._readers_event):
            segment.wake(event)

    def close(self) -> None:
        """Detach. Readers are not told: that is what `shutdown` is for. Idempotent."""
        if self._map is None:
            return
        self._parking = self._native = None
        self._arena.close()
        self._detach()
