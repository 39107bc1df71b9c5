"""The life of a follower's agent as a table: state x event → (next state, action). No I/O; `node_agent` runs it.

JOINING    the workers wait; node 0 is being asked, and has not said that a group begins
STARTING   the group has begun: the workers load
SERVING    calls are relayed
PARTING    our operator stops this node: node 0 was told, and what runs may be finished until it ends the group
OVER       nothing is relayed any more; the workers are ended

One life of an agent is in one group at most. What was said about another group never becomes an event.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class State(StrEnum):
    JOINING = "joining"
    STARTING = "starting"
    SERVING = "serving"
    PARTING = "parting"
    OVER = "over"


class Event(StrEnum):
    GROUP_STARTED = "group started"
    """Node 0: all nodes are here."""
    WORKERS_READY = "workers ready"
    """Those of this node."""
    ENDED = "ended"
    """Node 0 ended the group, or the launch, in order."""
    BROKEN = "broken"
    """The group is over because of a failure somewhere: ours, another node's, or the way there."""
    DRAIN = "drain"
    """Our supervisor was asked to stop, and there is time."""
    STOP = "stop"
    """Our supervisor ends us now."""


class Action(StrEnum):
    NOTHING = "nothing"
    CONNECT = "connect"
    """To the engine core; give the workers their place."""
    ANNOUNCE = "announce"
    """READY."""
    LEAVE = "leave"
    """Tell our supervisor that the launch was ended: it stops this node too, with exit 0."""
    FAIL = "fail"
    """End with the error."""
    PART = "part"
    """Tell node 0 that this node is being stopped."""
    QUIT = "quit"
    """Tell node 0, unless it knows, and end."""


class Cell(NamedTuple):
    state: State
    action: Action


_S, _E, _A = State, Event, Action
_OVER = dict.fromkeys(_E, Cell(_S.OVER, _A.NOTHING))
TABLE: dict[State, dict[Event, Cell]] = {
    _S.JOINING: {
        _E.GROUP_STARTED: Cell(_S.STARTING, _A.CONNECT),
        _E.WORKERS_READY: Cell(_S.JOINING, _A.NOTHING),
        _E.ENDED: Cell(_S.OVER, _A.LEAVE),
        _E.BROKEN: Cell(_S.OVER, _A.FAIL),
        # There is nothing to finish.
        _E.DRAIN: Cell(_S.OVER, _A.QUIT),
        _E.STOP: Cell(_S.OVER, _A.QUIT),
    },
    _S.STARTING: {
        _E.GROUP_STARTED: Cell(_S.STARTING, _A.NOTHING),
        _E.WORKERS_READY: Cell(_S.SERVING, _A.ANNOUNCE),
        _E.ENDED: Cell(_S.OVER, _A.LEAVE),
        _E.BROKEN: Cell(_S.OVER, _A.FAIL),
        _E.DRAIN: Cell(_S.OVER, _A.QUIT),
        _E.STOP: Cell(_S.OVER, _A.QUIT),
    },
    _S.SERVING: {
        _E.GROUP_STARTED: Cell(_S.SERVING, _A.NOTHING),
        _E.WORKERS_READY: Cell(_S.SERVING, _A.NOTHING),
        _E.ENDED: Cell(_S.OVER, _A.LEAVE),
        _E.BROKEN: Cell(_S.OVER, _A.FAIL),
        # A batch system stops all nodes at the same time: node 0 drains, and needs us until it has.
        _E.DRAIN: Cell(_S.PARTING, _A.PART),
        _E.STOP: Cell(_S.OVER, _A.QUIT),
    },
    _S.PARTING: {
        _E.GROUP_STARTED: Cell(_S.PARTING, _A.NOTHING),
        _E.WORKERS_READY: Cell(_S.PARTING, _A.NOTHING),
        # However it ended: our own stop was under way.
        _E.ENDED: Cell(_S.OVER, _A.NOTHING),
        _E.BROKEN: Cell(_S.OVER, _A.NOTHING),
        _E.DRAIN: Cell(_S.PARTING, _A.NOTHING),
        _E.STOP: Cell(_S.OVER, _A.NOTHING),
    },
    _S.OVER: _OVER,
}


def next_cell(state: State, event: Event) -> Cell:
    """Total: every state has a cell for every event."""
    return TABLE[state][event]
