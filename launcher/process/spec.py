"""What a process of the tree is, as data: checked when made, sent to the child, shown by `plan` and `status`."""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["supervisor", "forkserver", "guard", "api_server", "engine_core", "worker", "coordinator", "node_agent"]
ChildMethod = Literal["fork", "spawn", "forkserver"]


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process. `target` is called with a `ChildContext` in the new process; returning is exit 0."""

    title: str
    """``Worker_DP0_PP0_TP3``: log prefix, and behind ``xserve::`` the process title."""
    early_title: str = ""
    """Shown until the process knows its groups (``Worker``); empty: `title` at once."""
    comm: str = ""
    """The kernel's 15-byte name, e.g. ``xs:w0.d0p0t3``."""
    role: Role
    target: str
    """``module:function``"""
    rank: int | None = None
    node: int = 0
    env: dict[str, str] = {}
    """Set in the child before the target is imported."""
    payload: bytes = b""
    """The role's settings (see `launcher.config`), msgpack."""
    children: tuple[ProcessSpec, ...] = ()
    """Processes that this one starts itself, by `child_method`."""
    child_method: ChildMethod = "spawn"
    cpus: tuple[int, ...] = ()
    """To be bound to, before the first big allocation; empty: whatever is inherited."""
    memory_nodes: tuple[int, ...] = ()
    """NUMA nodes that its memory must come from; empty: any."""
    main_path: str = ""
    """A script to import as ``__main__`` first, when what the child needs is defined in it (library use, spawn)."""
    instance: str = ""
    launch_id: str = ""


def comes_by_exec(spec: ProcessSpec) -> bool:
    """Whether the supervisor starts it by spawn, however engine cores are started: it has no use for what the helper
    has imported, and is wanted at once."""
    return spec.role == "api_server" or (spec.role == "node_agent" and not spec.children)


LAUNCH_ID_VARIABLE = "XSERVE_LAUNCH_ID"
"""In the environment of every process of a launch, so that a descendant that made its own session is found."""
