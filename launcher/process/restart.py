"""When a dead process is started again. A table and a budget; no I/O, time is passed in.

A *unit* is what dies and comes back together (OTP's words for how):

=============  ============  ==========================================================================
unit           strategy      what goes with it
=============  ============  ==========================================================================
API server     one_for_one   itself
engine core    one_for_all   its workers: a worker is never restarted alone, nor outlives its core
node agent     one_for_all   its workers; on node 0 it has none, and dies and comes back alone
=============  ============  ==========================================================================

Whether: `TABLE`, by the policy and by what failed (`kind_of`). How soon: at once, then after 1, 2, 4 … 30 s
(`longest_delay`), and at once again after 60 s of service. How often: at most `max_restarts` within `window` seconds,
then the tree ends (exit 125). The loss of another node is not counted, and what was serving then is started again at
once: its new life waits for that node, and ends the tree (exit 69) when it does not come in time. A stop that the
operator asked for is a stop: the supervisor forgets every restart that is still to come.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

Policy = Literal["never", "on-failure", "always"]
STRATEGY = {
    "api_server": "one_for_one",
    "engine_core": "one_for_all",
    "coordinator": "one_for_one",
    "node_agent": "one_for_all",
}

_FIRST_DELAY = 1.0
_HEALTHY = 60.0
"""Seconds of service after which a failure counts as a first one."""


class Kind(StrEnum):
    """What failed."""

    PERMANENT = "permanent"
    """The same start would fail again in the same way: a wrong setting, a missing model."""
    FIRST_START = "first start"
    """The tree had not been ready yet."""
    SERVICE = "service"
    """After that, restarts included."""
    PEER_MISSING = "peer missing"
    """Another node was lost at the first start, or did not come (back) within the join timeout."""
    PEER_LOST = "peer lost"
    """Another node was lost once the tree had been ready."""


def kind_of(*, permanent: bool, node_lost: bool, been_ready: bool, joining: bool) -> Kind:
    """`joining`: the unit that failed was waiting for the other nodes."""
    if permanent:
        return Kind.PERMANENT
    if node_lost:
        return Kind.PEER_LOST if been_ready and not joining else Kind.PEER_MISSING
    return Kind.SERVICE if been_ready else Kind.FIRST_START


class Verb(StrEnum):
    RESTART = "restart"
    END = "end"
    """Stop the tree with the failure's own exit code."""


_E, _R = Verb.END, Verb.RESTART
TABLE: dict[Policy, dict[Kind, Verb]] = {
    "never": dict.fromkeys(Kind, _E),
    "on-failure": {
        Kind.PERMANENT: _E,
        Kind.FIRST_START: _E,
        Kind.SERVICE: _R,
        Kind.PEER_MISSING: _E,
        Kind.PEER_LOST: _R,
    },
    "always": {
        Kind.PERMANENT: _E,
        Kind.FIRST_START: _R,
        Kind.SERVICE: _R,
        Kind.PEER_MISSING: _R,
        Kind.PEER_LOST: _R,
    },
}
NOT_COUNTED = frozenset({Kind.PEER_MISSING, Kind.PEER_LOST})
"""It is not this tree that fails."""


@dataclass(frozen=True, kw_only=True)
class RestartSettings:
    policy: Policy = "never"
    max_restarts: int = 5
    """Within `window`; 0 is the policy ``never``."""
    window: float = 600.0
    """Seconds."""
    longest_delay: float = 30.0
    """Seconds that the back-off grows to; 0: always at once."""


@dataclass(frozen=True)
class Decision:
    """What to do about a failure of one unit."""

    restart: bool
    delay: float = 0.0
    """Seconds until the new start."""
    spent: bool = False
    """There is to be no restart because there were too many."""
    number: int = 0
    """Of restarts within the window, this one included; 0: it is not counted."""


@dataclass
class Budget:
    """Of one unit."""

    settings: RestartSettings
    _times: deque[float] = field(default_factory=deque)
    _delay: float = 0.0
    _ready_since: float | None = None

    def ready(self, now: float) -> None:
        """The unit serves."""
        self._ready_since = now

    def failed(self, now: float, kind: Kind) -> Decision:
        """Decide, and count."""
        settings = self.settings
        policy: Policy = settings.policy if settings.max_restarts > 0 else "never"
        served = now - self._ready_since if self._ready_since is not None else 0.0
        self._ready_since = None
        if TABLE[policy][kind] is Verb.END:
            return Decision(restart=False)
        if kind in NOT_COUNTED and served > 0:
            return Decision(restart=True)
        while self._times and now - self._times[0] >= settings.window:
            self._times.popleft()
        counted = kind not in NOT_COUNTED
        if counted and len(self._times) >= settings.max_restarts:
            return Decision(restart=False, spent=True, number=len(self._times))
        if served >= _HEALTHY:
            self._delay = 0.0
        delay = self._delay
        self._delay = min(max(self._delay * 2, _FIRST_DELAY), settings.longest_delay)
        if not counted:  # one life after the other that did not get to serve: not as fast as they can
            return Decision(restart=True, delay=delay)
        self._times.append(now)
        return Decision(restart=True, delay=delay, number=len(self._times))
