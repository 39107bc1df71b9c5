"""A slow start in words: every 10 s one line with where each rank is, for how long, and since when it has been silent.

    still starting after 20 s: rank 2 device for 19 s, silent for 19 s; ranks 0,1,3 queues for 18 s; …

Pure but for the clocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from launcher import clock
from launcher.process.tree import Record, describe_progress

EVERY = 10.0
"""Seconds."""
_SILENT = 2.0
"""Seconds without a report that are worth a word; progress comes each 0.2 s where there is any."""


class StartLines:
    """Ask `due` about once a second while something is starting; call `reset` when nothing is."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._next = 0.0

    def reset(self) -> None:
        self._began = None

    def due(self, records: Iterable[Record]) -> str | None:
        """The line, when it is time for one. `records`: every process of those units that are not ready."""
        now = clock.now()
        if self._began is None:
            self._began, self._next = now, now + EVERY
        if now < self._next:
            return None
        passed = self._next - self._began
        self._next += EVERY
        return f"still starting after {passed:.0f} s: {describe(records, now, time.time())}"


def describe(records: Iterable[Record], now: float, wall: float) -> str:
    """All that are on their way, those of one state together, workers first, the furthest behind first."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.ready or record.gone:
            continue
        kind = "" if record.spec.rank is not None else record.title
        groups.setdefault((kind, _state(record, now, wall)), []).append(record)
    parts = [f"{_who(members)} {state}" for (_, state), members in sorted(groups.items())]
    ready = [record for record in records if record.ready and record.spec.rank is not None]
    if ready:
        parts.append(f"{_who(ready)} ready")
    return "; ".join(parts) or "nobody is behind"


def _state(record: Record, now: float, wall: float) -> str:
    if not record.pid:
        return "not started yet"
    text = f"{record.step}{describe_progress(record.progress)} for {max(0.0, wall - record.since):.0f} s"
    silent = now - record.last_progress
    return f"{text}, silent for {silent:.0f} s" if silent > _SILENT else text


def _who(members: list[Record]) -> str:
    ranks = [record.spec.rank for record in members if record.spec.rank is not None]
    if not ranks:
        return ", ".join(record.title for record in members)
    return f"rank{'s' if len(ranks) > 1 else ''} {','.join(map(str, sorted(ranks)))}"
