"""Answers of a node's ranks to one call, put together: each message between nodes costs both ends more than the answer.

An answer is held back only while another to the same call can still come from this node, and for `HOLD` at most. Each
rank's answers stay in order. No I/O.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import msgspec

from launcher import clock
from launcher.ipc.codec import Message
from launcher.worker.rpc import ALL_RANKS, REPLIES, ErrorReply

HOLD = 0.002
"""Seconds: no caller of a step of the usual length notices them."""
SMALL = 4 << 10
"""Bytes of the largest answer that is held: with more the message itself is what costs."""
_ERROR = next(tag for tag, kind in REPLIES.items() if kind is ErrorReply)

Answers = Sequence[tuple[int, Message]]


class _Number(msgspec.Struct, array_like=True):
    """What each reply begins with."""

    call_id: int


_number = msgspec.msgpack.Decoder(_Number)


class Gather:
    """`expect` each call, `add` each answer; `flush` when it is `due`."""

    def __init__(self, ranks: Iterable[int], send: Callable[[Answers], None]) -> None:
        """`send` gets one answer, or small ones without arrays, each of another rank."""
        self._ranks = frozenset(ranks)
        self._send = send
        self._owed: dict[int, set[int]] = {}
        """Call → ranks that are to answer it yet; in the order of the calls."""
        self._held: dict[int, Message] = {}
        self._call = 0
        """Whose answers are held."""
        self._due = math.inf
        self._patient_until = 0.0

    def expect(self, call_id: int, reply_rank: int) -> None:
        """The ranks here are given this call."""
        ranks = set(self._ranks) if reply_rank == ALL_RANKS else self._ranks & {reply_rank}
        if ranks:
            self._owed[call_id] = set(ranks)
            now = clock.now()
            if now >= self._patient_until:
                self._patient_until = now + HOLD

    def add(self, rank: int, message: Message) -> None:
        tag, head, buffers = message
        call_id = _call_of(head)
        owed = self._owed.get(call_id, set())
        is_awaited = rank in owed
        owed.discard(rank)
        if is_awaited and not owed:
            del self._owed[call_id]
        if not is_awaited or tag == _ERROR or buffers or len(head) > SMALL:
            self.flush()
            self._send([(rank, message)])
            return
        if self._held and self._call != call_id:
            self.flush()
        if not self._held:
            self._call, self._due = call_id, clock.now() + HOLD
        self._held[rank] = message
        if not owed:
            self.flush()

    def flush(self) -> None:
        held, self._held, self._due = self._held, {}, math.inf
        if held:
            self._send(list(held.items()))

    @property
    def due(self) -> float:
        """When what is held is to go; ``inf``: nothing is."""
        return self._due

    def only(self, now: float) -> tuple[int, float] | None:
        """A rank that is likely to be the last to answer a call, and until when no other's answer is worth waking up
        for; None: each is."""
        until = self._due if self._held else self._patient_until
        if not self._owed or now >= until:
            return None
        owed = self._owed.get(self._call) if self._held else next(iter(self._owed.values()))
        return None if owed is None else (max(owed), until)


def _call_of(head: bytes | memoryview) -> int:
    """0: it has none, which is the core's to judge."""
    try:
        return _number.decode(head).call_id
    except msgspec.DecodeError:
        return 0
