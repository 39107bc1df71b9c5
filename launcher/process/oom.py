"""Whether the kernel's out-of-memory killer has struck: a SIGKILL nobody sent is otherwise a riddle."""

from __future__ import annotations

from pathlib import Path


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
