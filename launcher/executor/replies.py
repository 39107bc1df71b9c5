"""Which answer belongs to which call: a table, and the book that is kept by it. No I/O, no clock.

A call is *waiting* until every rank that is to answer has done so (*answered*), or until the first error, its deadline
or a death (*failed*). What arrives is an event; `TABLE` says, for every state and event, the next state and what to do:

    keep   store the answer of that rank
    blame  this error is the call's outcome: the first one wins
    hold   an error of a rank that was not to answer, of a call that already has its answer: it must not be lost, so it
           fails the oldest waiting call, or else the next one
    drop   too late: the caller has had another outcome. It can never be read by a later call, whose number differs

Futures resolve in the order of sending: a call counts as settled only when all sent before it are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Any, Literal

from launcher.clock import Deadline
from launcher.errors import DeadlineError, InternalError


class State(Enum):
    __hash__ = object.__hash__  # Enum's own is written in Python, and the table is read for every answer

    WAITING = "waiting"
    ANSWERED = "answered"
    FAILED = "failed"


class Event(Enum):
    __hash__ = object.__hash__

    PART = "an answer; others are missing"
    LAST = "the last answer that was missing"
    STRANGE = "an answer of a rank that was not asked, or its second one"
    ERROR = "an error of any rank"
    DEADLINE = "the call's time has passed"
    DEATH = "a worker is gone, or the executor was closed"


Action = Literal["keep", "blame", "hold", "drop", "bug"]

_W, _A, _F = State.WAITING, State.ANSWERED, State.FAILED
TABLE: dict[tuple[State, Event], tuple[State, Action]] = {
    (_W, Event.PART): (_W, "keep"),
    (_W, Event.LAST): (_A, "keep"),
    (_W, Event.STRANGE): (_W, "bug"),
    (_W, Event.ERROR): (_F, "blame"),
    (_W, Event.DEADLINE): (_F, "blame"),
    (_W, Event.DEATH): (_F, "blame"),
    # Nothing is missing any more: PART and LAST cannot come, any answer is strange.
    (_A, Event.PART): (_A, "bug"),
    (_A, Event.LAST): (_A, "bug"),
    (_A, Event.STRANGE): (_A, "bug"),
    (_A, Event.ERROR): (_A, "hold"),
    (_A, Event.DEADLINE): (_A, "drop"),
    (_A, Event.DEATH): (_A, "drop"),
    (_F, Event.PART): (_F, "drop"),
    (_F, Event.LAST): (_F, "drop"),
    (_F, Event.STRANGE): (_F, "drop"),
    (_F, Event.ERROR): (_F, "drop"),
    (_F, Event.DEADLINE): (_F, "drop"),
    (_F, Event.DEATH): (_F, "drop"),
}


class PendingCall:
    """One call: who is to answer, what has come, how it ended."""

    __slots__ = ("call_id", "deadline", "error", "label", "missing", "single", "state", "values", "wanted")

    def __init__(self, call_id: int, label: str, wanted: Sequence[int], single: bool, deadline: Deadline) -> None:
        self.call_id = call_id
        self.label = label
        """For messages: the method's name."""
        self.wanted = tuple(wanted)
        self.single = single
        """The outcome is the one rank's answer, not a list."""
        self.deadline = deadline
        self.state = State.WAITING
        self.values: dict[int, Any] = {}
        self.missing = set(wanted)
        self.error: BaseException | None = None

    def outcome(self) -> Any:
        """The answer, or the answers in rank order; raises the call's error. Only for a call that is not waiting."""
        if self.error is not None:
            raise self.error
        if self.single:
            return self.values[self.wanted[0]]
        return [self.values[rank] for rank in self.wanted]


class Replies:
    """The book of all calls that are under way. `names`: rank → how to call it in a message."""

    _REMEMBERED = 1000
    """Failed calls whose late errors are still told from errors that must not be lost."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._waiting: dict[int, PendingCall] = {}
        """In the order of sending."""
        self._failed: deque[int] = deque(maxlen=self._REMEMBERED)
        self.held: BaseException | None = None

    def sent(self, call_id: int, label: str, wanted: Sequence[int], *, single: bool, deadline: Deadline) -> PendingCall:
        """A call has been sent; numbers ascend."""
        call = PendingCall(call_id, label, wanted, single, deadline)
        self._waiting[call_id] = call
        return call

    def is_settled(self, call: PendingCall) -> bool:
        """It has its outcome, and so have all sent before it."""
        if call.state is State.WAITING:
            return False
        first = next(iter(self._waiting), None)
        return first is None or first > call.call_id

    def answer(self, rank: int, call_id: int, value: Any) -> None:
        """A rank has answered. `InternalError` when nobody had asked it."""
        call = self._waiting.get(call_id)
        event = Event.STRANGE
        if call is not None and rank in call.missing:
            event = Event.LAST if len(call.missing) == 1 else Event.PART
        if self._happen(call_id, event) == "keep" and call is not None:
            call.values[rank] = value
            call.missing.discard(rank)

    def error(self, call_id: int, error: BaseException) -> None:
        """A rank has failed in a call, whether it was to answer or not."""
        if self._happen(call_id, Event.ERROR, error) == "hold":
            oldest = next(iter(self._waiting), None)
            if oldest is not None:
                self._happen(oldest, Event.ERROR, error)
            elif self.held is None:
                self.held = error

    def expire(self) -> None:
        """Fail every call whose deadline has passed; first take in what has arrived."""
        for call in [c for c in self._waiting.values() if c.deadline.expired]:
            self._happen(call.call_id, Event.DEADLINE, self.silence(call, call.deadline.seconds))

    def end(self, error: BaseException) -> None:
        """No answer will come any more: fail every waiting call."""
        for call_id in list(self._waiting):
            self._happen(call_id, Event.DEATH, error)

    def next_rank(self, call: PendingCall) -> int:
        """A rank whose answer `call` waits for; for one that only waits for its turn, one of those before it.

        The last one: when it has answered, so have most of the others.
        """
        for waiting in self._waiting.values():
            if waiting.missing:
                return max(waiting.missing)
        return call.wanted[-1]

    def earliest(self, deadline: Deadline) -> Deadline:
        """The first of `deadline` and those of the calls under way."""
        for call in self._waiting.values():
            if call.deadline.at < deadline.at:
                deadline = call.deadline
        return deadline

    def take_held(self) -> BaseException | None:
        """The error that was held for the next call, once."""
        error, self.held = self.held, None
        return error

    def silence(self, call: PendingCall, seconds: float) -> DeadlineError:
        """Names the ranks that a call still waits for."""
        behind = next((c for c in self._waiting.values() if c.call_id < call.call_id), None)
        who = ", ".join(self._names[rank] for rank in sorted(call.missing))
        text = f"{call.label}: no answer within {seconds:g} s from {who}"
        if not call.missing:
            text = f"{call.label}: answered, but not its turn within {seconds:g} s"
        if behind is not None:
            others = ", ".join(self._names[rank] for rank in sorted(behind.missing))
            text += f"; before it, {behind.label} (call {behind.call_id}) still waits for {others}"
        return DeadlineError(text)

    def _past(self, call_id: int) -> State:
        return State.FAILED if call_id in self._failed else State.ANSWERED

    def _happen(self, call_id: int, event: Event, error: BaseException | None = None) -> Action:
        """Move the call by the table. Calls that have their outcome are no longer in the book; their state is known."""
        call = self._waiting.get(call_id)
        state = self._past(call_id) if call is None else call.state
        after, action = TABLE[state, event]
        if action == "bug":
            raise InternalError(f"call {call_id} ({state.value}): {event.value}")
        if call is not None:
            call.state = after
            if action == "blame":
                call.error = error
                self._failed.append(call_id)
            if after is not State.WAITING:
                del self._waiting[call_id]
        return action
