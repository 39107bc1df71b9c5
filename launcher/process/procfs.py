"""Facts about processes from /proc. A pid alone names nobody: it is used again. A pid with its start time does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")


class ProcStat(NamedTuple):
    """Some fields of /proc/<pid>/stat (proc(5))."""

    pid: int
    comm: str
    state: str
    """R, S, D, T (stopped), Z (zombie) …"""
    ppid: int
    session: int
    start_time: int
    """Clock ticks since boot."""


def read_stat(pid: int) -> ProcStat | None:
    """None when there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # comm may hold spaces and brackets: it ends at the last one.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return ProcStat(
        pid=pid,
        comm=head.partition("(")[2],
        state=fields[0],
        ppid=int(fields[1]),
        session=int(fields[3]),
        start_time=int(fields[19]),
    )


def start_time(pid: int) -> int:
    """Ticks since boot; 0 when the process is gone (matches no live one)."""
    stat = read_stat(pid)
    return stat.start_time if stat else 0


def all_processes() -> Iterator[ProcStat]:
    """Every process that can be seen, zombies included."""
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (stat := read_stat(int(entry.name))):
            yield stat


def has_in_environment(pid: int, text: str) -> bool:
    """Whether the environment the process was exec'ed with holds `text`. False where it cannot be read."""
    try:
        return text.encode() in (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False


def command_line(pid: int) -> str:
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def thread_names(pid: int | str = "self") -> list[str]:
    """The kernel's name of each thread of a process."""
    names = []
    for task in (_PROC / str(pid) / "task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:
            continue  # ended while we looked
    return names
