"""Whether the kernel's out-of-memory killer has struck: a SIGKILL nobody sent is otherwise a riddle."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

_SAME = 0.5
"""Seconds: whoever is found dead so soon after the counter was seen to rise may have died of that."""


class OomWatch:
    """Tells a death with an OOM kill from one that comes later. One for all who judge deaths in a process: each rise
    of the counter explains the deaths of one moment only."""

    def __init__(self, count: Callable[[], int] | None = None) -> None:
        self._count = count or oom_kills
        self._known = self._count()
        self._rose_at = -math.inf

    def struck(self, now: float) -> bool:
        """Whether a process that was found dead now, of a SIGKILL, may have been killed for its memory."""
        if (count := self._count()) > self._known:
            self._known, self._rose_at = count, now
        return now - self._rose_at < _SAME


def oom_kills(root: Path = Path("/")) -> int:
    """OOM kills so far in this process's memory cgroup (v2 memory.events, v1 memory.oom_control), else machine-wide."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "" and path:
            files = [root / "sys/fs/cgroup" / path.lstrip("/") / "memory.events"]
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            files = [base / path.lstrip("/") / "memory.oom_control", base / "memory.oom_control"]
        else:
            continue
        for file in files:
            if (count := _count(file)) is not None:
                return count
    return _count(root / "proc/vmstat") or 0


def _count(file: Path) -> int | None:
    for line in _lines(file):
        key, _, value = line.partition(" ")
        if key == "oom_kill":
            return int(value)
    return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
