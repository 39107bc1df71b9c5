"""`HostFacts` and its one reader."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

import msgspec

from launcher import envs
from launcher.host.files import ROOT, read_text
from launcher.host.gpus import Gpu, read_gpus, torch_cuda
from launcher.host.limits import cpu_quota, has_memfd, has_pidfd, memory_headroom_of, processes_free
from launcher.host.numa import NumaNode, memory_nodes_allowed, numa_nodes
from launcher.host.process_state import unsafe_to_fork
from launcher.host.visible import Dialect, accelerator_here, read_visible, set_dialects


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is made from. Bytes and counts; None: no such limit, or it cannot be read."""

    hostname: str
    uid: int
    cpus: int
    """CPUs in the affinity mask given from outside."""
    cpu_ids: tuple[int, ...] = ()
    """Their numbers."""
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
    gpu_entries: tuple[str, ...] = ()
    """The visible GPUs as CUDA_VISIBLE_DEVICES names them: numbers, UUIDs, MIG slices."""
    gpu_devices: tuple[Gpu, ...] = ()
    """All of `gpus_present`, by index."""
    numa_nodes: tuple[NumaNode, ...] = ()
    numa_memory: tuple[int, ...] | None = None
    """Nodes whose memory may be used; None: all."""
    numa_denied: tuple[str, ...] = ()
    """What of ``cpus`` and ``memory`` this process may not bind (seccomp); see `launcher.process.numa`."""
    accelerator: Dialect | None = None
    """What is here, by its variable; None: no driver is loaded."""
    hiding: tuple[tuple[str, str], ...] = ()
    """Variables that hide devices, of any accelerator, with their values."""
    unsafe_to_fork: tuple[str, ...] = ()
    """Why a fork of the process that reads this is not safe."""
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


def read_host(root: Path = ROOT) -> HostFacts:
    """All facts. A few milliseconds; nothing is imported for it and no device is touched."""
    headroom = memory_headroom_of(root)
    nodes = numa_nodes(root)
    devices = read_gpus(root, nodes)
    visible = read_visible(envs.cuda_visible_devices(), len(devices), [gpu.uuid for gpu in devices])
    mask = os.sched_getaffinity(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return HostFacts(
        hostname=read_text(root / "proc/sys/kernel/hostname") or socket.gethostname(),
        uid=os.getuid(),
        cpus=len(mask),
        cpu_ids=tuple(sorted(mask)),
        cpu_quota=cpu_quota(root),
        memory_free=headroom.bytes,
        memory_origin=headroom.origin,
        gpus=len(visible.entries),
        gpus_present=len(devices),
        gpu_note=visible.fault,
        gpu_entries=visible.entries,
        gpu_devices=devices,
        numa_nodes=nodes,
        numa_memory=memory_nodes_allowed(root),
        accelerator=accelerator_here(root),
        hiding=tuple((d.variable, value) for d, value in set_dialects(envs.child_environment())),
        unsafe_to_fork=tuple(unsafe_to_fork(root)),
        torch_cuda=torch_cuda(),
        omp_num_threads=envs.omp_num_threads(),
        processes_free=processes_free(root),
        nofile_soft=soft,
        nofile_hard=hard,
        pidfd=has_pidfd(),
        memfd=has_memfd(),
    )
