"""Which failure is the cause. Pure: a list of failures in, one cause and its follow-ons out.

A tensor-parallel group dies as one: within milliseconds of the first death every other rank reports a closed
connection and the engine core reports a lost worker. Only one of these is worth a traceback.

Order (DESIGN.md §3): a hard death that we did not cause, before an exception of a rank's own, before a limit that
passed, before the loss of another node (of which nobody knows more), before a failure that only passes on another's;
then the earlier before the later (another node's counts from when it was told). A worker that went down with its engine
core (the kernel's parent-death signal is a SIGKILL like any other) is a follow-on of the core.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence

from launcher.errors import Failure

_WEIGHT = {"died": 0, "raised": 1, "timeout": 2, "peer_lost": 4}
_NODE_LOST = 3


def first_cause(failures: Sequence[Failure]) -> tuple[Failure, tuple[Failure, ...]]:
    """(cause, follow-ons in order). `failures` must not be empty; one per process, the first report of each counts."""
    unique: dict[str, Failure] = {}
    for failure in sorted(failures, key=lambda f: (_weight(f, ()), f.at)):
        unique.setdefault(failure.title, failure)
    dead_cores = {f.title for f in unique.values() if f.role == "engine_core" and f.kind == "died"}
    ordered = sorted(unique.values(), key=lambda f: (_weight(f, dead_cores), f.at))
    return ordered[0], tuple(ordered[1:])


def _weight(failure: Failure, dead_cores: Collection[str]) -> int:
    if dead_cores and failure.role == "worker" and failure.signal == signal.SIGKILL:
        return _WEIGHT["peer_lost"]
    if failure.node_lost:
        return _NODE_LOST
    return _WEIGHT[failure.kind]


def describe_exit(exit_code: int | None, number: int | None, *, out_of_memory: bool = False) -> str:
    """One line on how a process ended, for a headline."""
    if number is not None:
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = "unknown"
        if out_of_memory:
            return f"died of signal {number} ({name}): out of memory (the oom_kill counter rose)"
        return f"died of signal {number} ({name})"
    if exit_code == 0:
        return "ended by itself (exit 0), though nobody had asked it to"
    return f"died with exit code {exit_code} and no report"
