"""When a dead process is started again. A table and a budget; no I/O, time is passed in.

A *unit* is what dies and comes back together (OTP's words for how):

=============  ============  ==========================================================================
unit           strategy      what goes with it
=============  ============  ==========================================================================
API server     one_for_one   itself
engine core    one_for_all   its workers: a worker is never restarted alone, nor outlives its core
=============  ============  ==========================================================================

Whether: `TABLE`, by the policy and by what failed. How soon: at once, then after 1, 2, 4 … 30 s (`longest_delay`), and
at once again after 60 s of service. How often: at most `max_restarts` within `window` seconds, then the tree ends (exit
125). A stop that the operator asked for is a stop: the supervisor forgets every restart that is still to come.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

Policy = Literal["never", "on-failure", "always"]
STRATEGY = {"api_server": "one_for_one", "engine_core": "one_for_all", "coordinator": "one_for_one"}

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


class Verb(StrEnum):
    RESTART = "restart"
    END = "end"
    """Stop the tree with the failure's own exit code."""


TABLE: dict[Policy, dict[Kind, Verb]] = {
    "never": {Kind.PERMANENT: Verb.END, Kind.FIRST_START: Verb.END, Kind.SERVICE: Verb.END},
    "on-failure": {Kind.PERMANENT: Verb.END, Kind.FIRST_START: Verb.END, Kind.SERVICE: Verb.RESTART},
    "always": {Kind.PERMANENT: Verb.END, Kind.FIRST_START: Verb.RESTART, Kind.SERVICE: Verb.RESTART},
}


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
    """Of restarts within the window, this one included."""


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
        while self._times and now - self._times[0] >= settings.window:
            self._times.popleft()
        if len(self._times) >= settings.max_restarts:
            return Decision(restart=False, spent=True, number=len(self._times))
        if served >= _HEALTHY:
            self._delay = 0.0
        delay = self._delay
        self._delay = min(max(self._delay * 2, _FIRST_DELAY), settings.longest_delay)
        self._times.append(now)
        return Decision(restart=True, delay=delay, number=len(self._times))
