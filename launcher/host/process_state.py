"""What of this process makes a fork of it unsafe. Looks at what is loaded already; imports and starts nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from launcher import envs
from launcher.host.files import ROOT, list_entries, read_text

_SHOWN_THREADS = 4
_AT_EXEC = ("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "GLIBC_TUNABLES", "MALLOC_", "MIMALLOC_", "_RJEM_MALLOC_CONF")
"""Variables, or beginnings of them, that the loader and the allocators read once: when a program is executed."""


def unsafe_to_fork(root: Path = ROOT) -> list[str]:
    """Why a fork of this process could hang or break, in words; empty when it is safe."""
    reasons = []
    names = [read_text(task / "comm") for task in list_entries(root / "proc/self/task")]
    if len(names) > 1:
        reasons.append(f"it runs {len(names)} threads ({', '.join(names[:_SHOWN_THREADS])})")
    reasons += [f"{kind.upper()} is initialised in this process" for kind in ("cuda", "xpu") if _is_initialised(kind)]
    if _in_ray_actor():
        reasons.append("this is a Ray actor")
    if is_wsl(root):
        reasons.append("this is WSL, whose GPU driver does not survive a fork")
    return reasons


def is_wsl(root: Path = ROOT) -> bool:
    return "microsoft" in read_text(root / "proc/sys/kernel/osrelease").lower()


def needs_exec(wanted: dict[str, str]) -> list[str]:
    """Names in `wanted` that take effect only in a newly executed program, and that this one has otherwise."""
    current = envs.child_environment()
    return sorted(n for n, value in wanted.items() if n.startswith(_AT_EXEC) and current.get(n) != value)


def _is_initialised(kind: str) -> bool:
    module: Any = getattr(sys.modules.get("torch"), kind, None)
    return module is not None and bool(module.is_initialized())


def _in_ray_actor() -> bool:
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    return ray.get_runtime_context().get_actor_id() is not None
