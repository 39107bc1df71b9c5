"""What `xserve doctor` looks at: each check is one function, facts in, verdicts out. Nothing is changed or started.

``fail``  a launch will not work
``warn``  it will, but slower, or not for long
``pass``  as it should be
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from launcher import envs
from launcher.control import places, run_dir
from launcher.errors import XserveError
from launcher.host import HostFacts
from launcher.host.files import read_text, shown_list
from launcher.host.visible import DIALECTS, read_visible
from launcher.plan.budget import size
from launcher.process import numa, procfs

_MEMORY, _FILES, _PROCESSES, _SHM, _DISK = 2 << 30, 4096, 512, 128 << 20, 16 << 20
"""Below these a warning: bytes, descriptors, processes and threads, bytes, bytes."""
_SMI_SECONDS = 20
_SHM_DIRECTORY = "/dev/shm"  # noqa: S108 looked at only


class Check(msgspec.Struct, frozen=True):
    """One verdict. `mend`: the command or setting that puts it right; empty: nothing to do."""

    name: str
    verdict: Literal["pass", "warn", "fail"]
    text: str
    mend: str = ""


def host_checks(facts: HostFacts) -> Iterator[Check]:
    """Every check of the machine. One that breaks is itself a verdict."""
    for check in _CHECKS:
        try:
            yield from check(facts)
        except XserveError as error:
            yield Check(check.__name__.strip("_").replace("_", " "), "fail", str(error))


def _kernel(facts: HostFacts) -> Iterator[Check]:
    for name, there, version in (
        ("pidfd", facts.pidfd, "5.3"),
        ("memfd", facts.memfd, "3.17"),
        ("futex", _futex(), "2.6"),
    ):
        mend = "" if there else f"run on Linux {version} or later, or let the sandbox allow it"
        yield Check(f"kernel: {name}", "pass" if there else "fail", "works" if there else "is refused", mend)
    scope = read_text(Path("/proc/sys/kernel/yama/ptrace_scope")) or "0"
    yield Check(
        "kernel: ptrace", "pass", f"yama scope {scope}; xserve shows stacks without it, py-spy and gdb need 0 or root"
    )


def _futex() -> bool:
    """FUTEX_WAKE with nobody waiting wakes nobody."""
    number = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(os.uname().machine)
    word = ctypes.c_int(0)
    return number is None or ctypes.CDLL(None).syscall(number, ctypes.byref(word), 1, 1, None, None, 0) == 0


def _memory(facts: HostFacts) -> Iterator[Check]:
    low = facts.memory_free < _MEMORY
    mend = "free some, or raise the limit (memory.max, docker run --memory, MemoryMax=)" if low else ""
    yield Check("memory", "warn" if low else "pass", f"{size(facts.memory_free)} free ({facts.memory_origin})", mend)
    shm = _space(_SHM_DIRECTORY)
    if shm is not None:
        small = shm < _SHM
        mend = "docker run --shm-size=1g or --ipc=host: NCCL needs it, xserve does not" if small else ""
        yield Check(_SHM_DIRECTORY, "warn" if small else "pass", f"{size(shm)} free", mend)


def _open_files(facts: HostFacts) -> Iterator[Check]:
    low = facts.nofile_hard < _FILES
    text = f"hard limit {facts.nofile_hard}, soft limit {facts.nofile_soft} (raised to the hard one at start)"
    mend = "ulimit -Hn 65536, docker run --ulimit nofile=65536, or LimitNOFILE=65536 in the unit" if low else ""
    yield Check("open files", "warn" if low else "pass", text, mend)


def _cpus(facts: HostFacts) -> Iterator[Check]:
    yield Check("CPU affinity", "pass", f"{facts.cpus} CPUs: {shown_list(facts.cpu_ids)}")
    if facts.cpu_quota is not None:
        low = facts.cpu_quota < 1
        mend = "raise it (cpu.max, docker run --cpus, CPUQuota=)" if low else ""
        text = f"{facts.cpu_quota:g} CPUs' worth of time; threads are planned for it"
        yield Check("CPU quota", "warn" if low else "pass", text, mend)


def _processes(facts: HostFacts) -> Iterator[Check]:
    free = facts.processes_free
    low = free is not None and free < _PROCESSES
    mend = "raise it (docker run --pids-limit, TasksMax=, ulimit -u)" if low else ""
    text = "not limited" if free is None else f"{free} more may be started"
    yield Check("processes and threads", "warn" if low else "pass", text, mend)


def _numa(facts: HostFacts) -> Iterator[Check]:
    nodes = ", ".join(f"node {n.id}: CPUs {shown_list(n.cpus) or 'none'}, {size(n.memory)}" for n in facts.numa_nodes)
    denied = numa.denied()
    if denied:
        mend = "only needed for --numa-bind: docker run --cap-add SYS_NICE, or a seccomp profile that allows it"
        yield Check(
            "NUMA", "warn", f"{nodes or 'no nodes shown'}; binding {' and '.join(denied)} is forbidden here", mend
        )
    else:
        yield Check("NUMA", "pass", f"{nodes or 'no nodes shown'}; binding is allowed")


def _devices(facts: HostFacts) -> Iterator[Check]:
    yield from _hiding(facts)
    if not facts.gpus_present:
        yield Check("GPUs", "pass", "no NVIDIA GPU here: models run on the CPU")
        return
    if facts.gpu_note:
        verdict: Literal["warn", "fail"] = "warn" if facts.gpus else "fail"
        yield Check("GPUs", verdict, facts.gpu_note, "unset CUDA_VISIBLE_DEVICES, or use --device cpu")
    else:
        yield Check("GPUs", "pass", f"{facts.gpus} of {facts.gpus_present} visible: {','.join(facts.gpu_entries)}")
    if facts.torch_cuda is None:
        yield Check("torch", "fail", "the installed torch is built without CUDA", "pip install torch (a CUDA build)")
    else:
        yield Check("torch", "pass", f"built for CUDA {facts.torch_cuda}")
    yield from _driver()


def _hiding(facts: HostFacts) -> Iterator[Check]:
    """Variables of other accelerators: their number of devices is not known, their dialect is."""
    for dialect in DIALECTS[1:]:
        value = dict(facts.hiding).get(dialect.variable)
        if value is not None:
            fault = read_visible(value, 1 << 10, (), dialect).fault
            text = (
                f"{dialect.variable}={value!r} is not what {dialect.accelerator} take" if fault else f"set to {value!r}"
            )
            yield Check(
                dialect.variable, "warn" if fault else "pass", text, f"unset {dialect.variable}" if fault else ""
            )


def _driver() -> Iterator[Check]:
    """The driver's word on each GPU, and on who holds its memory."""
    if shutil.which("nvidia-smi") is None:
        yield Check("driver", "warn", "nvidia-smi is not here: nobody to ask who holds a GPU's memory", "install it")
        return
    gpus = _ask_smi("--query-gpu=index,uuid,name,memory.used,memory.total,driver_version,mig.mode.current")
    if isinstance(gpus, str):
        yield Check("driver", "fail", gpus, "nvidia-smi; see dmesg for NVRM lines; a reboot after a driver update")
        return
    for index, uuid, name, used, total, driver, mig in (row for row in gpus if len(row) == 7):
        slices = ", MIG enabled" if mig == "Enabled" else ""
        yield Check(f"GPU {index}", "pass", f"{name} ({uuid}), driver {driver}, {used} of {total} MiB in use{slices}")
    holders = _ask_smi("--query-compute-apps=pid,used_memory,gpu_uuid,process_name")
    for pid, used, uuid, name in [] if isinstance(holders, str) else [row for row in holders if len(row) == 4]:
        title = procfs.command_line(int(pid))[:60] if pid.isdigit() else ""
        text = f"pid {pid} ({title or name}) holds {used} MiB of {uuid}"
        yield Check("GPU memory", "warn", text, f"if it is a leftover: kill {pid}")


def _ask_smi(query: str) -> list[list[str]] | str:
    """Rows of a query, or one line about why there are none."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi does not answer: {type(error).__name__}"
    if done.returncode != 0:
        return f"nvidia-smi: {' '.join((done.stdout + done.stderr).split())[:200]}"
    return [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _run_directory(_facts: HostFacts) -> Iterator[Check]:
    base = places.whole_directory() or places.base_for_new()
    space = _space(str(base))
    low = space is not None and space < _DISK
    text = f"{base}, private" + (f", {size(space)} free" if space is not None else "")
    yield Check("run directory", "warn" if low else "pass", text, "free some space there" if low else "")
    names = [instance.name for instance in run_dir.list_instances()]
    yield Check("instances", "pass", f"running: {', '.join(names)}" if names else "none is running")


def _caches(_facts: HostFacts) -> Iterator[Check]:
    cache = envs.cache_dir()
    there = next((p for p in (cache, *cache.parents) if p.exists()), Path("/"))
    good = os.access(there, os.W_OK)
    mend = "" if good else "only needed to download models: set XSERVE_CACHE_DIR (and HF_HOME) to a directory of yours"
    yield Check("cache", "pass" if good else "warn", f"{cache} can{'' if good else 'not'} be written", mend)


def _clock(_facts: HostFacts) -> Iterator[Check]:
    """adjtimex(2) with nothing to adjust says whether anybody keeps the clock right."""
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    good = 0 <= state != 5  # TIME_ERROR
    mend = "" if good else "timedatectl set-ntp true: certificates and the logs of several machines go by it"
    yield Check("clock", "pass" if good else "warn", "synchronised" if good else "not synchronised by anybody", mend)


def _space(path: str) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


_CHECKS: tuple[Callable[[HostFacts], Iterator[Check]], ...] = (
    _kernel,
    _memory,
    _open_files,
    _cpus,
    _processes,
    _numa,
    _devices,
    _run_directory,
    _caches,
    _clock,
)
