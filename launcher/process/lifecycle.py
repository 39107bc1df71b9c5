"""The life of the tree as a table: state x event → (next state, action). No I/O, no clock; `supervisor` runs it.

Wanted, actual and ready are three things: this table is what is *wanted*; `tree` holds what is *actual*; READY is an
event that the actual one causes.

STARTING   processes are being started; the HTTP socket answers 503
READY      serving
RECOVERING serving what it can, while a unit that died is being started again (`restart`)
DRAINING   a stop was asked: nothing is admitted, what runs is finished
STOPPING   processes are being stopped, within what is left of the budget
GONE       nothing is left
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"
    DRAINING = "draining"
    STOPPING = "stopping"
    GONE = "gone"


class Event(StrEnum):
    ALL_READY = "all ready"
    """Every direct child is READY."""
    STOP_ASKED = "stop asked"
    """SIGTERM, SIGINT, SIGHUP or a stop over the control socket; the second one too."""
    UNIT_FAILED = "unit failed"
    """A process failed, its cause has been collected, and its unit is to be started again."""
    FAILED = "failed"
    """The same, and it is not to be started again."""
    DRAINED = "drained"
    """No request is left, or the drain's share of the budget is used up."""
    ALL_GONE = "all gone"
    """Every child is reaped and no process of the launch is left."""


class Action(StrEnum):
    NOTHING = "nothing"
    ANNOUNCE = "announce"
    """Tell the world that the tree is ready."""
    RECOVER = "recover"
    """End what is left of the failed units; they start again after their delay."""
    RESUME = "resume"
    """Say that the tree is whole again."""
    INTERRUPT = "interrupt"
    """Stop a start: there is nothing to finish."""
    DRAIN = "drain"
    CUT = "cut"
    """Drain without time: what waits for a process that is away can't be finished any more."""
    STOP = "stop"
    """Stop every process in order within the rest of the budget."""
    FAIL = "fail"
    """Stop every process fast: what they serve is broken already."""
    FORCE = "force"
    """Kill every process now."""
    LEAVE = "leave"


class Cell(NamedTuple):
    state: State
    action: Action


_S, _E, _A = State, Event, Action
TABLE: dict[State, dict[Event, Cell]] = {
    _S.STARTING: {
        _E.ALL_READY: Cell(_S.READY, _A.ANNOUNCE),
        _E.STOP_ASKED: Cell(_S.STOPPING, _A.INTERRUPT),
        _E.UNIT_FAILED: Cell(_S.STARTING, _A.RECOVER),
        _E.FAILED: Cell(_S.STOPPING, _A.FAIL),
        _E.DRAINED: Cell(_S.STARTING, _A.NOTHING),
        _E.ALL_GONE: Cell(_S.GONE, _A.LEAVE),
    },
    _S.READY: {
        _E.ALL_READY: Cell(_S.READY, _A.NOTHING),
        _E.STOP_ASKED: Cell(_S.DRAINING, _A.DRAIN),
        _E.UNIT_FAILED: Cell(_S.RECOVERING, _A.RECOVER),
        _E.FAILED: Cell(_S.STOPPING, _A.FAIL),
        _E.DRAINED: Cell(_S.READY, _A.NOTHING),
        _E.ALL_GONE: Cell(_S.GONE, _A.LEAVE),
    },
    _S.RECOVERING: {
        _E.ALL_READY: Cell(_S.READY, _A.RESUME),
        _E.STOP_ASKED: Cell(_S.DRAINING, _A.CUT),
        _E.UNIT_FAILED: Cell(_S.RECOVERING, _A.RECOVER),
        _E.FAILED: Cell(_S.STOPPING, _A.FAIL),
        _E.DRAINED: Cell(_S.RECOVERING, _A.NOTHING),
        _E.ALL_GONE: Cell(_S.GONE, _A.LEAVE),
    },
    _S.DRAINING: {
        _E.ALL_READY: Cell(_S.DRAINING, _A.NOTHING),
        _E.STOP_ASKED: Cell(_S.STOPPING, _A.FORCE),
        # Nothing comes back after a stop was asked for; and what runs can't be finished without it.
        _E.UNIT_FAILED: Cell(_S.STOPPING, _A.FAIL),
        _E.FAILED: Cell(_S.STOPPING, _A.FAIL),
        _E.DRAINED: Cell(_S.STOPPING, _A.STOP),
        _E.ALL_GONE: Cell(_S.GONE, _A.LEAVE),
    },
    _S.STOPPING: {
        _E.ALL_READY: Cell(_S.STOPPING, _A.NOTHING),
        _E.STOP_ASKED: Cell(_S.STOPPING, _A.FORCE),
        _E.UNIT_FAILED: Cell(_S.STOPPING, _A.NOTHING),
        _E.FAILED: Cell(_S.STOPPING, _A.NOTHING),
        _E.DRAINED: Cell(_S.STOPPING, _A.NOTHING),
        _E.ALL_GONE: Cell(_S.GONE, _A.LEAVE),
    },
    _S.GONE: dict.fromkeys(_E, Cell(_S.GONE, _A.NOTHING)),
}


def next_cell(state: State, event: Event) -> Cell:
    """Total: every state has a cell for every event."""
    return TABLE[state][event]
