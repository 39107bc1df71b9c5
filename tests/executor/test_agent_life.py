"""Every cell of the follower agent's table."""

from __future__ import annotations

import pytest

from launcher.executor.agent_life import TABLE, Action, Event, State, next_cell

J, ST, SV, P, O = State  # noqa: E741
EXPECTED = {
    J: {
        Event.GROUP_STARTED: (ST, Action.CONNECT),
        Event.WORKERS_READY: (J, Action.NOTHING),
        Event.ENDED: (O, Action.LEAVE),
        Event.BROKEN: (O, Action.FAIL),
        Event.DRAIN: (O, Action.QUIT),
        Event.STOP: (O, Action.QUIT),
    },
    ST: {
        Event.GROUP_STARTED: (ST, Action.NOTHING),
        Event.WORKERS_READY: (SV, Action.ANNOUNCE),
        Event.ENDED: (O, Action.LEAVE),
        Event.BROKEN: (O, Action.FAIL),
        Event.DRAIN: (O, Action.QUIT),
        Event.STOP: (O, Action.QUIT),
    },
    SV: {
        Event.GROUP_STARTED: (SV, Action.NOTHING),
        Event.WORKERS_READY: (SV, Action.NOTHING),
        Event.ENDED: (O, Action.LEAVE),
        Event.BROKEN: (O, Action.FAIL),
        Event.DRAIN: (P, Action.PART),
        Event.STOP: (O, Action.QUIT),
    },
    P: {
        Event.GROUP_STARTED: (P, Action.NOTHING),
        Event.WORKERS_READY: (P, Action.NOTHING),
        Event.ENDED: (O, Action.NOTHING),
        Event.BROKEN: (O, Action.NOTHING),
        Event.DRAIN: (P, Action.NOTHING),
        Event.STOP: (O, Action.NOTHING),
    },
    O: dict.fromkeys(Event, (O, Action.NOTHING)),
}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_cell(state: State, event: Event) -> None:
    assert next_cell(state, event) == EXPECTED[state][event]


def test_nothing_begins_once_it_is_over() -> None:
    assert all(cell == (State.OVER, Action.NOTHING) for cell in TABLE[State.OVER].values())


def test_a_failure_is_never_taken_for_an_orderly_end_and_the_other_way_round() -> None:
    for state in (State.JOINING, State.STARTING, State.SERVING):
        assert next_cell(state, Event.ENDED).action is Action.LEAVE
        assert next_cell(state, Event.BROKEN).action is Action.FAIL
