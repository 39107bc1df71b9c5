"""Which rank keeps a call from ending. The ranks' marks tell; no rank is asked. No I/O but the clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from launcher import clock
from launcher.errors import Failure
from launcher.worker.marks import Place


class Late(NamedTuple):
    """The rank that is to blame."""

    rank: int
    call_id: int
    taken: bool
    """It is in that call; else it has not even taken it."""
    others: int
    """How many more are late."""

    def failure(self, limit: float, title: str, *, pid: int | None = None, node: int = 0, host: str = "") -> Failure:
        what = f"in call {self.call_id}" if self.taken else f"has not taken call {self.call_id}"
        more = f"; {self.others} more ranks are late" if self.others else ""
        return Failure(
            title=title,
            role="worker",
            kind="timeout",
            headline=f"{what} for {limit:g} s (--watchdog-timeout {limit:g}){more}",
            step="serving",
            rank=self.rank,
            node=node,
            host=host,
            pid=pid,
            at=clock.now(),
        )


class HangWatch:
    """To be asked a few times within the limit."""

    def __init__(self) -> None:
        self._behind: dict[int, tuple[Place | None, float]] = {}
        """Rank that is not idle → where it was seen, and since when it has been there."""

    def late(self, places: Sequence[Place], last: int, limit: float) -> Late | None:
        """`places` in rank order; `last`: number of the last call that was sent; `limit` in seconds.

        Of several that are late the culprit is, in this order: one that has not even taken its call, one that does not
        wait for other ranks, the one furthest behind.
        """
        now = clock.now()
        late = []
        for rank, place in enumerate(places):
            if is_idle(place, last):
                self._behind.pop(rank, None)  # idle, with nothing to do
                continue
            seen, since = self._behind.get(rank, (None, now))
            if seen != place:
                since = now
            self._behind[rank] = place, since
            if now - since >= limit:
                late.append((place.busy_since != 0, place.waiting, place.call_id, rank))
        if not late:
            return None
        taken, _, call_id, rank = min(late)
        return Late(rank, call_id if taken else last, taken, len(late) - 1)


def is_idle(place: Place, last: int) -> bool:
    """It has carried out all calls up to number `last`."""
    return place.busy_since == 0 and place.call_id >= last
