"""The table of calls and answers, cell by cell, and what follows from it."""

from __future__ import annotations

import pytest

from launcher.clock import Deadline
from launcher.errors import ClosedError, DeadlineError, InternalError
from launcher.executor.replies import TABLE, Action, Event, PendingCall, Replies, State

NEVER = Deadline.after(None)
NAMES = ["rank 0", "rank 1", "rank 2"]
OTHER = Exception("other")


class Boom(Exception):
    pass


BOOM = Boom()


def book() -> Replies:
    return Replies(NAMES)


def call(
    replies: Replies, number: int = 1, wanted: tuple[int, ...] = (0, 1, 2), deadline: Deadline = NEVER
) -> PendingCall:
    return replies.sent(number, f"m{number}", wanted, single=len(wanted) == 1, deadline=deadline)


def in_state(state: State) -> tuple[Replies, PendingCall]:
    """A call that ranks 0 and 1 are to answer, brought into `state`."""
    replies = book()
    pending = call(replies, wanted=(0, 1))
    if state is State.ANSWERED:
        replies.answer(0, 1, "a0")
        replies.answer(1, 1, "a1")
    elif state is State.FAILED:
        replies.error(1, BOOM)
    assert pending.state is state
    return replies, pending


def bring_about(replies: Replies, pending: PendingCall, event: Event) -> None:
    if event is Event.PART:
        replies.answer(0, 1, "new")
    elif event is Event.LAST:
        if pending.state is State.WAITING:
            replies.answer(0, 1, "new")
        replies.answer(1, 1, "new")
    elif event is Event.STRANGE:
        replies.answer(2, 1, "new")
    elif event is Event.ERROR:
        replies.error(1, OTHER)
    elif event is Event.DEADLINE:
        pending.deadline = Deadline.after(0)
        replies.expire()
    else:
        replies.end(OTHER)


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("event", list(Event))
def test_cell(state: State, event: Event) -> None:
    after, action = TABLE[state, event]
    replies, pending = in_state(state)
    values, error = dict(pending.values), pending.error
    if action == "bug":
        with pytest.raises(InternalError):
            bring_about(replies, pending, event)
        return
    bring_about(replies, pending, event)
    assert pending.state is after
    checks: dict[Action, bool] = {
        "keep": "new" in pending.values.values(),
        "blame": pending.error is OTHER or isinstance(pending.error, DeadlineError),
        "hold": replies.held is OTHER and pending.error is error,
        "drop": pending.values == values and pending.error is error and replies.held is None,
    }
    assert checks[action], action


def test_the_table_is_whole() -> None:
    assert set(TABLE) == {(state, event) for state in State for event in Event}


def test_answers_come_in_rank_order() -> None:
    replies = book()
    pending = call(replies)
    for rank in (2, 0, 1):
        replies.answer(rank, 1, f"r{rank}")
    assert pending.outcome() == ["r0", "r1", "r2"]


def test_a_unique_answer_stands_alone() -> None:
    replies = book()
    pending = call(replies, wanted=(1,))
    replies.answer(1, 1, "one")
    assert pending.outcome() == "one"


def test_futures_settle_in_the_order_of_sending() -> None:
    replies = book()
    first, second = call(replies, 1, (2,)), call(replies, 2, (0,))
    replies.answer(0, 2, "two")
    assert second.state is State.ANSWERED
    assert not replies.is_settled(second)
    replies.answer(2, 1, "one")
    assert replies.is_settled(first)
    assert replies.is_settled(second)


def test_the_first_error_wins() -> None:
    replies = book()
    pending = call(replies)
    replies.answer(0, 1, "fine")
    replies.error(1, BOOM)
    replies.error(1, OTHER)
    with pytest.raises(Boom):
        pending.outcome()
    assert replies.held is None


def test_late_answers_and_errors_of_a_timed_out_call_are_dropped() -> None:
    replies = book()
    old = call(replies, 1, deadline=Deadline.after(0))
    replies.expire()
    new = call(replies, 2)
    for rank in range(3):
        replies.answer(rank, 1, "stale")
    replies.error(1, BOOM)
    for rank in range(3):
        replies.answer(rank, 2, "fresh")
    assert new.outcome() == ["fresh"] * 3
    with pytest.raises(DeadlineError, match="m1: no answer within 0 s from rank 0, rank 1, rank 2"):
        old.outcome()


def test_an_error_of_a_rank_that_is_not_to_answer_fails_the_call() -> None:
    replies = book()
    pending = call(replies, wanted=(0,))
    replies.error(1, BOOM)
    replies.answer(0, 1, "late")
    with pytest.raises(Boom):
        pending.outcome()


def test_an_error_after_the_answer_fails_the_oldest_waiting_call() -> None:
    replies = book()
    first, second, third = (call(replies, n, (0,)) for n in (1, 2, 3))
    replies.answer(0, 1, "fine")
    replies.error(1, BOOM)
    assert first.outcome() == "fine"
    assert second.error is BOOM
    assert third.state is State.WAITING


def test_an_error_after_the_answer_is_held_once_for_the_next_call() -> None:
    replies = book()
    call(replies, 1, (0,))
    replies.answer(0, 1, "fine")
    replies.error(1, BOOM)
    replies.error(1, OTHER)
    assert replies.take_held() is BOOM
    assert replies.take_held() is None


def test_silence_names_who_is_behind_and_what_comes_before() -> None:
    replies = book()
    call(replies, 1, (2,))
    second = call(replies, 2, (0, 1))
    replies.answer(0, 2, "x")
    text = str(replies.silence(second, 1.5))
    assert text == "m2: no answer within 1.5 s from rank 1; before it, m1 (call 1) still waits for rank 2"
    replies.answer(1, 2, "x")
    assert "answered, but not its turn" in str(replies.silence(second, 1.5))


def test_the_earliest_deadline() -> None:
    replies = book()
    soon, later = Deadline.after(1), Deadline.after(50)
    call(replies, 1, deadline=later)
    assert replies.earliest(NEVER) is later
    assert replies.earliest(soon) is soon
    call(replies, 2, deadline=soon)
    assert replies.earliest(NEVER) is soon


def test_the_end_fails_all() -> None:
    replies = book()
    calls = [call(replies, n) for n in (1, 2)]
    replies.end(ClosedError("closed"))
    assert all(isinstance(c.error, ClosedError) and replies.is_settled(c) for c in calls)
