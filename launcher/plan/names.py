"""What processes are called: the full title, and the kernel's name of at most 15 bytes.

`ps` and our logs show titles; tools that read /proc/<pid>/comm (top, some GPU tools) show the short name, which must
tell role and rank by itself::

    APIServer_0              xs:api0
    EngineCore_DP0           xs:core.dp0
    Worker_DP0_PP0_TP3       xs:w3.d0p0t3
    NodeAgent_N1             xs:agent.n1
"""

from __future__ import annotations

from launcher.parallel.ranks import Coordinates

COMM_BYTES = 15
SUPERVISOR, SUPERVISOR_COMM = "Supervisor", "xs:supervisor"
FORKSERVER, FORKSERVER_COMM = "Forkserver", "xs:forkserver"
GUARD, GUARD_COMM = "Guard", "xs:guard"
COORDINATOR, COORDINATOR_COMM = "DPCoordinator", "xs:coordinator"
EARLY_WORKER = "Worker"
"""A worker's title until its groups exist."""


def api_server(index: int) -> tuple[str, str]:
    """(title, comm)"""
    return f"APIServer_{index}", f"xs:api{index}"


def engine_core(dp: int) -> tuple[str, str]:
    return f"EngineCore_DP{dp}", f"xs:core.dp{dp}"


def node_agent(node: int) -> tuple[str, str]:
    return f"NodeAgent_N{node}", f"xs:agent.n{node}"


def worker(rank: int, at: Coordinates) -> tuple[str, str]:
    """`rank` is the number within the engine core. The comm is the most telling form that fits."""
    title = f"Worker_DP{at.dp}_PP{at.pp}_TP{at.tp}"
    forms = (
        f"xs:w{rank}.d{at.dp}p{at.pp}t{at.tp}",
        # Rank and TP, PP sizes tell the missing numbers; DP is not in the rank, so it is the last to go.
        f"xs:w{rank}.d{at.dp}t{at.tp}",
        f"xs:w{rank}.d{at.dp}",
        f"xs:w{rank}",
    )
    return title, next(form for form in forms if len(form) <= COMM_BYTES)
