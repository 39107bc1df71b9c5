"""Who does not answer any more. Rules only: time is passed in, pings and verdicts are the caller's to carry out.

The supervisor pings each of its children that is READY; the answer comes from the child's own main loop, also while a
step is under way, so a busy child answers and a hung or stopped one does not. A ping goes out every quarter of the
limit; a child counts as hung when none has been answered for the whole limit. A supervisor that was itself stopped
(SIGSTOP, a suspended machine) must not blame the others when it wakes: an interval much longer than planned starts the
count anew.

Hung *workers* are the engine core's to find (`Executor.hung`): it reports them with `Hang`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_PER_LIMIT = 4


class Turn(NamedTuple):
    """What is to be done now."""

    ping: list[str]
    late: list[tuple[str, float]]
    """(title, seconds since its last answer)"""


class Watchdog:
    """`limit` in seconds; 0: off."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.interval = limit / _PER_LIMIT
        self.number = 0
        """Of the last ping."""
        self._heard: dict[str, float] = {}
        self._pids: dict[str, int] = {}
        """Whose answers `_heard` tells of: a process that took a dead one's place has a time of its own."""
        self._last_turn: float | None = None

    def heard(self, title: str, now: float) -> None:
        """It answered."""
        if title in self._heard:
            self._heard[title] = now

    def until_turn(self, now: float) -> float:
        """Seconds; ``inf`` when off."""
        if not self.limit:
            return float("inf")
        if self._last_turn is None:
            return 0.0
        return max(0.0, self._last_turn + self.interval - now)

    def turn(self, now: float, watched: Mapping[str, int]) -> Turn | None:
        """A turn, when one is due. `watched`: titles that should answer, with their pids; others are forgotten."""
        if self.until_turn(now) > 0:
            return None
        overslept = self._last_turn is not None and now - self._last_turn > 2 * self.interval + 1
        self._last_turn = now
        known = {} if overslept else {t: at for t, at in self._heard.items() if self._pids[t] == watched.get(t)}
        self._heard = {title: known.get(title, now) for title in watched}
        self._pids = dict(watched)
        self.number += 1
        late = [(title, now - heard) for title, heard in self._heard.items() if now - heard >= self.limit]
        return Turn(list(watched), late)
