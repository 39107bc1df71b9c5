"""Machines to plan for."""

from __future__ import annotations

from typing import Any

from launcher.host import HostFacts

GIB = 1 << 30


def machine(**changes: Any) -> HostFacts:
    """16 CPUs, 64 GiB, no GPU."""
    return HostFacts(**{"hostname": "m", "uid": 1, "cpus": 16, "memory_free": 64 * GIB, **changes})


def gpu_machine(gpus: int = 8, **changes: Any) -> HostFacts:
    return machine(**{"gpus": gpus, "gpus_present": gpus, "torch_cuda": "12.8", **changes})
