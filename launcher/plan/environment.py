"""The environment that each process gets on top of its parent's. Reasons stand beside the rows."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.process.spec import LAUNCH_ID_VARIABLE, ChildMethod

_QUIET = {
    # Libraries' progress bars and advice on stderr would be taken for a process's own words.
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # Its thread pool and a fork do not go together; prompts come one at a time anyway.
    "TOKENIZERS_PARALLELISM": "false",
}

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
"""Both open listeners even when the ranks meet in a file; beyond loopback only HTTP may be heard."""

NO_MULTICAST = {
    # NVLink multicast is state of all cards of the machine. Processes here may be killed at any moment, and must leave
    # nothing behind in it.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def base(launch_id: str, *, model_is_local: bool) -> dict[str, str]:
    """For every process of the tree."""
    env = {LAUNCH_ID_VARIABLE: launch_id, **_QUIET}
    if model_is_local:
        # A directory is complete, or it is refused by the plan: nothing may go and look on the network.
        env["HF_HUB_OFFLINE"] = "1"
    return env


def engine(
    common: dict[str, str],
    *,
    threads: int,
    method: ChildMethod,
    interface: Mapping[str, str],
    given: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """For engine cores, their workers, and the helper that they are forked from. `interface`: which one gloo and NCCL
    take (`interface_environment`, or `LOOPBACK` on one machine). `given`: by --env, which wins."""
    count = str(threads)
    env = {**common, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
    # OpenBLAS starts its pool when numpy is imported; a helper with a pool is not safe to fork from. Its size is
    # settled by then for the children as well, so that is what theirs says.
    env["OPENBLAS_NUM_THREADS"] = "1" if method == "forkserver" else count
    return {**env, **NO_MULTICAST, **interface, **(given or {})}


def front(common: dict[str, str]) -> dict[str, str]:
    """For API servers: they compute nothing that threads would help."""
    return {**common, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
