"""When this server takes requests: a table over what the tree is and what was asked of us. No I/O.

::

    starting ──ready──▶ ready ──recovering──▶ recovering    an engine is coming back: what comes in waits for it
        any ──drain──▶ draining ──stop──▶ stopping          these two never go back: the process is on its way out
        any ──failed──▶ failed ──starting──▶ starting
"""

from __future__ import annotations

from typing import Literal, get_args

GateState = Literal["starting", "ready", "recovering", "draining", "stopping", "failed"]
GateEvent = Literal[
    "tree:starting",
    "tree:ready",
    "tree:recovering",
    "tree:draining",
    "tree:stopping",
    "tree:failed",
    "drain",
    "stop",
]

STATES: tuple[GateState, ...] = get_args(GateState)
EVENTS: tuple[GateEvent, ...] = get_args(GateEvent)

_OPEN: dict[GateEvent, GateState] = {
    "tree:starting": "starting",
    "tree:ready": "ready",
    "tree:recovering": "recovering",
    "tree:draining": "draining",
    "tree:stopping": "stopping",
    "tree:failed": "failed",
    "drain": "draining",
    "stop": "stopping",
}

TABLE: dict[GateState, dict[GateEvent, GateState]] = {
    "starting": _OPEN,
    "ready": _OPEN,
    "recovering": _OPEN,
    "failed": _OPEN,
    "draining": {
        "tree:starting": "draining",
        "tree:ready": "draining",
        "tree:recovering": "draining",
        "tree:draining": "draining",
        "tree:stopping": "stopping",
        "tree:failed": "draining",
        "drain": "draining",
        "stop": "stopping",
    },
    "stopping": dict.fromkeys(EVENTS, "stopping"),
}


WITHOUT_RETURN = frozenset({"stopping", "failed"})
"""States of the tree in which an engine that is gone does not come back: who waits for it waits in vain."""
_BY_NAME: dict[str, GateEvent] = {event: event for event in EVENTS}


class Gate:
    """The state, the tree's phase for people, and whether the tree was ever ready (`/startupz`)."""

    def __init__(self) -> None:
        self.state: GateState = "starting"
        self.phase = ""
        self.was_ready = False

    @property
    def admits(self) -> bool:
        return self.state == "ready"

    @property
    def queues(self) -> bool:
        """New requests may wait for an engine that is coming back."""
        return self.state in ("ready", "recovering")

    def feed(self, event: GateEvent, phase: str = "") -> GateState:
        self.state = TABLE[self.state][event]
        self.phase = phase
        self.was_ready = self.was_ready or self.state == "ready"
        return self.state

    def feed_tree(self, state: str, phase: str = "") -> GateState:
        """A `TreeState` message. A state that this version does not know closes the gate as a failed one does."""
        return self.feed(_BY_NAME.get(f"tree:{state}", "tree:failed"), phase or state)
