"""Facts about this machine, read once and frozen. Reading is all that happens here; deciding is `plan/`'s.

Everything comes from /proc, /sys and /dev below `root`, so that a test can show a made-up machine. A fact that cannot
be read is a fact too: limits that are not there are no limits, and no reader here raises because of one.
"""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from launcher import envs

_NO_LIMIT = 1 << 60
"""Version 1 control groups write a number just below 2**63 for "no limit"."""
_ROOT = Path("/")


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is made from. Bytes and counts; None: no such limit, or it cannot be read."""

    hostname: str
    uid: int
    cpus: int
    """CPUs in the affinity mask given from outside."""
    cpu_quota: float | None = None
    """CPUs' worth of time that the control groups allow, e.g. 2.5."""
    memory_free: int
    memory_origin: str = "MemAvailable"
    """What limits `memory_free`: the machine's MemAvailable, or a control group by its path."""
    gpus: int = 0
    """GPUs that a process started now would see."""
    gpus_present: int = 0
    """GPUs of the machine, before CUDA_VISIBLE_DEVICES."""
    gpu_note: str = ""
    """One line when CUDA_VISIBLE_DEVICES hides or spoils something."""
    torch_cuda: str | None = None
    """The CUDA version that the installed torch was built for; None: a CPU build, or no torch."""
    omp_num_threads: int | None = None
    """OMP_NUM_THREADS, when the user set it."""
    processes_free: int | None = None
    """Processes and threads that may still be started (pids controller and RLIMIT_NPROC)."""
    nofile_soft: int = 1024
    nofile_hard: int = 1024
    pidfd: bool = True
    memfd: bool = True


class Headroom(NamedTuple):
    bytes: int
    origin: str


class _Group(NamedTuple):
    """One control group directory that holds this process, with the name that its version gives to things."""

    path: Path
    version: int
    shown: str


def read_host(root: Path = _ROOT) -> HostFacts:
    """All facts. A few milliseconds; nothing is imported for it and no device is touched."""
    headroom = memory_headroom_of(root)
    present = gpus_present(root)
    gpus, note = visible_gpus(envs.cuda_visible_devices(), present)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return HostFacts(
        hostname=_text(root / "proc/sys/kernel/hostname") or socket.gethostname(),
        uid=os.getuid(),
        cpus=len(os.sched_getaffinity(0)),
        cpu_quota=cpu_quota(root),
        memory_free=headroom.bytes,
        memory_origin=headroom.origin,
        gpus=gpus,
        gpus_present=present,
        gpu_note=note,
        torch_cuda=torch_cuda(),
        omp_num_threads=envs.omp_num_threads(),
        processes_free=processes_free(root),
        nofile_soft=soft,
        nofile_hard=hard,
        pidfd=_has_pidfd(),
        memfd=_has_memfd(),
    )


def memory_headroom(root: Path = _ROOT) -> int:
    """Bytes that can still be had: the least of MemAvailable and what every control group above us has left."""
    return memory_headroom_of(root).bytes


def memory_headroom_of(root: Path = _ROOT) -> Headroom:
    """The headroom, and what limits it. Page cache that a group can drop at once (inactive files) counts as free."""
    best = Headroom(_meminfo_available(root), "MemAvailable")
    for group in _groups(root, "memory"):
        if group.version == 2:
            limits = [_number(group.path / "memory.max"), _number(group.path / "memory.high")]
            used, cache_key = _number(group.path / "memory.current"), "inactive_file"
        else:
            limits = [_number(group.path / "memory.limit_in_bytes")]
            used, cache_key = _number(group.path / "memory.usage_in_bytes"), "total_inactive_file"
        limit = min((n for n in limits if n is not None and n < _NO_LIMIT), default=None)
        if limit is None or used is None:
            continue
        cache = _fields(group.path / "memory.stat").get(cache_key, 0)
        free = max(0, limit - max(0, used - cache))
        if free < best.bytes:
            best = Headroom(free, f"control group {group.shown}")
    return best


def cpu_quota(root: Path = _ROOT) -> float | None:
    """The smallest quota of the control groups above us, in CPUs; None: none has one."""
    quotas = []
    for group in _groups(root, "cpu"):
        if group.version == 2:
            quota, _, period = _text(group.path / "cpu.max").partition(" ")
        else:
            quota, period = _text(group.path / "cpu.cfs_quota_us"), _text(group.path / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def processes_free(root: Path = _ROOT) -> int | None:
    """Processes and threads still allowed. RLIMIT_NPROC counts all of the user's, so it is a bound, not a promise."""
    left = []
    for group in _groups(root, "pids"):
        limit, used = _number(group.path / "pids.max"), _number(group.path / "pids.current")
        if limit is not None and used is not None:
            left.append(max(0, limit - used))
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.getuid() != 0:
        left.append(soft)
    return min(left, default=None)


def gpus_present(root: Path = _ROOT) -> int:
    """NVIDIA GPUs of this machine, or of this container: those that have a device node.

    The driver's own list in /proc is the whole machine's, also in a container that was given none; so it counts only
    where the nodes are yet to be made (a machine freshly booted), which takes the setuid program named here.
    """
    nodes = [p for p in _entries(root / "dev") if p.name.startswith("nvidia") and p.name[6:].isdigit()]
    if nodes or not (root / "usr/bin/nvidia-modprobe").exists():
        return len(nodes)
    return len(_entries(root / "proc/driver/nvidia/gpus"))


def visible_gpus(value: str | None, present: int) -> tuple[int, str]:
    """How many of `present` GPUs CUDA_VISIBLE_DEVICES leaves, and one line about what it does, if that may surprise.

    The driver reads the list up to the first entry that is no device; an entry given twice makes it see none.
    """
    if value is None or present == 0:
        return present, ""
    shown = f"CUDA_VISIBLE_DEVICES={value!r}"
    entries = [entry.strip() for entry in value.split(",")]
    if not value.strip():
        return 0, f"{shown} hides all {present} GPUs: unset it to use them"
    if entries[0] == "-1":
        return 0, f"{shown} hides all {present} GPUs: unset it to use them"
    good: list[str] = []
    for entry in entries:
        if not (entry.startswith(("GPU-", "MIG-")) or (entry.isascii() and entry.isdigit() and int(entry) < present)):
            return len(
                good
            ), f"{shown}: {entry!r} is none of the {present} GPUs here; CUDA stops there and sees {len(good)}"
        if entry in good:
            return 0, f"{shown} names {entry} twice: CUDA then sees no GPU; name each one once"
        good.append(entry)
    return len(good), ""


def torch_cuda() -> str | None:
    """From the text of torch's version file: importing it would cost a second and more than this process may hold."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)", _text(Path(spec.origin).with_name("version.py")), re.MULTILINE)
    return found.group(1) if found else None


# --- control groups ----------------------------------------------------------------------------------------------


def _groups(root: Path, controller: str) -> Iterator[_Group]:
    """Every control group above this process that `controller` may limit, innermost first, versions 1 and 2."""
    paths = dict(_memberships(root))
    for mount_root, mount_point, kind, options in _cgroup_mounts(root):
        if kind == "cgroup2":
            inside, version = paths.get(""), 2
        elif controller in options:
            inside, version = paths.get(controller), 1
        else:
            continue
        if inside is None:
            continue
        # Without a cgroup namespace of its own, a container sees its group's path from the machine's root, while
        # only that group is mounted: then the mount's root is what the path starts with.
        if mount_root != "/" and (inside + "/").startswith(mount_root + "/"):
            inside = inside[len(mount_root) :]
        # "/../x": this group lies outside our namespace's root; only the mount itself can be read.
        parts = [] if ".." in inside.split("/") else [part for part in inside.split("/") if part]
        base = root / mount_point.lstrip("/")
        for depth in range(len(parts), -1, -1):
            yield _Group(base.joinpath(*parts[:depth]), version, "/" + "/".join(parts[:depth]))


def _memberships(root: Path) -> Iterator[tuple[str, str]]:
    """(controller, path): one for each version 1 controller; ``""`` for version 2."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            yield controller, path


def _cgroup_mounts(root: Path) -> Iterator[tuple[str, str, str, list[str]]]:
    """(root within the hierarchy, mount point, file system, superblock options)."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, types = before.split(" "), after.split(" ")
        if len(fields) >= 5 and len(types) >= 3 and types[0] in ("cgroup", "cgroup2"):
            yield _unescape(fields[3]), _unescape(fields[4]), types[0], types[2].split(",")


def _unescape(text: str) -> str:
    """mountinfo writes blanks as octal escapes."""
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


# --- small readers -----------------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """A file with one number; None for ``max``, a missing file and anything else."""
    text = _text(path)
    return int(text) if text.isascii() and text.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    """``name number`` lines."""
    pairs = (line.split() for line in _text(path).splitlines())
    return {p[0]: int(p[1]) for p in pairs if len(p) == 2 and p[1].isdigit()}


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _meminfo_available(root: Path) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _has_memfd() -> bool:
    try:
        os.close(os.memfd_create("xserve-probe"))
    except OSError:
        return False
    return True
