"""xserve: a process supervisor for multi-GPU inference engines.

The rooms, top to bottom (imports go downwards only; `scripts/check` enforces it):

    argv → cli → config → plan → process → (pipes) → children: api ⇄ engine → executor → ipc → worker → parallel, models

Glossary (the field's words, one per thing):

process         an operating-system process of the tree
child           a process that we started and own: we hold its pidfd, channel and exit status
role            what a process is for: supervisor, forkserver, api_server, engine_core, worker, coordinator, node_agent
rank            a worker's number in the world, 0 … world size - 1; *local rank*: its number on its machine
group           ranks that communicate collectively (TP, PP, DP, …)
start method    how a child comes to be: fork, spawn (exec), forkserver
channel         the socket pair of a child and its parent: reports up, stop and descriptors down, EOF = death
ring            shared memory in which one writer broadcasts records to N readers
slot            one request's place in a worker
handle          the location of a queue, to be attached elsewhere; never its contents
executor        carries the engine core's calls to the workers, wherever they are
plan            what a step of the engine shall do (`StepPlan`), or what a launch shall be (`LaunchPlan`)
engine core     scheduler + executor; *wave*: a stretch of steps that all data-parallel engine cores make together

`wait_*` waits and takes a deadline; `*_nowait` and `try_*` never block; `is_*`, `has_*` ask without effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from launcher.library import Engine

__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> Any:
    # Lazy: `import launcher` is on the path of `xserve --help` and of the supervisor, which must stay small.
    if name == "Engine":
        from launcher.library import Engine

        return Engine
    raise AttributeError(f"module 'launcher' has no attribute {name!r}")
