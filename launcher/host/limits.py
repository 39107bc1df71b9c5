"""What this process may still take: memory, CPU time, processes; and what the kernel offers."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import NamedTuple

from launcher.host.control_groups import groups
from launcher.host.files import ROOT, read_fields, read_number, read_text

_NO_LIMIT = 1 << 60
"""Version 1 control groups write a number just below 2**63 for "no limit"."""


class Headroom(NamedTuple):
    bytes: int
    origin: str


def memory_headroom(root: Path = ROOT) -> int:
    """Bytes that can still be had: the least of MemAvailable and what every control group above us has left."""
    return memory_headroom_of(root).bytes


def memory_headroom_of(root: Path = ROOT) -> Headroom:
    """The headroom, and what limits it. Page cache that a group can drop at once (inactive files) counts as free."""
    best = Headroom(_meminfo_available(root), "MemAvailable")
    for group in groups(root, "memory"):
        if group.version == 2:
            limits = [read_number(group.path / "memory.max"), read_number(group.path / "memory.high")]
            used, cache_key = read_number(group.path / "memory.current"), "inactive_file"
        else:
            limits = [read_number(group.path / "memory.limit_in_bytes")]
            used, cache_key = read_number(group.path / "memory.usage_in_bytes"), "total_inactive_file"
        limit = min((n for n in limits if n is not None and n < _NO_LIMIT), default=None)
        if limit is None or used is None:
            continue
        cache = read_fields(group.path / "memory.stat").get(cache_key, 0)
        free = max(0, limit - max(0, used - cache))
        if free < best.bytes:
            best = Headroom(free, f"control group {group.shown}")
    return best


def cpu_quota(root: Path = ROOT) -> float | None:
    """The smallest quota of the control groups above us, in CPUs; None: none has one."""
    quotas = []
    for group in groups(root, "cpu"):
        if group.version == 2:
            quota, _, period = read_text(group.path / "cpu.max").partition(" ")
        else:
            quota, period = read_text(group.path / "cpu.cfs_quota_us"), read_text(group.path / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def processes_free(root: Path = ROOT) -> int | None:
    """Processes and threads still allowed. RLIMIT_NPROC counts all of the user's, so it is a bound, not a promise."""
    left = []
    for group in groups(root, "pids"):
        limit, used = read_number(group.path / "pids.max"), read_number(group.path / "pids.current")
        if limit is not None and used is not None:
            left.append(max(0, limit - used))
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.getuid() != 0:
        left.append(soft)
    return min(left, default=None)


def _meminfo_available(root: Path) -> int:
    for line in read_text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def has_memfd() -> bool:
    try:
        os.close(os.memfd_create("xserve-probe"))
    except OSError:
        return False
    return True
