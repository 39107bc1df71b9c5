"""What an engine core does with its executor, for tests in which the core is a process of its own (fork wants one)."""

from __future__ import annotations

import msgspec

from launcher.config import EngineSettings
from launcher.executor.multiproc import MultiprocExecutor
from launcher.process.child import ChildContext
from launcher.worker.reference import expected_tokens
from tests.executor.rig import generate


def tokens(ctx: ChildContext) -> None:
    """Generates 20 tokens; READY tells whether they are right, and who the workers are."""
    settings = msgspec.msgpack.decode(ctx.spec.payload, type=EngineSettings)
    executor = MultiprocExecutor(settings, ctx)
    executor.start()
    got = generate(executor, [1, 2, 3], 20)
    ctx.ready(
        {
            "right": got == expected_tokens([1, 2, 3], 20),
            "pids": [child.pid for child in executor.children],
            "who": [list(who) for who in executor.collective_rpc("who")],
            "titles": executor.collective_rpc(_title),
        }
    )
    cut = executor.shutdown(10)
    assert cut == []


def starts(ctx: ChildContext) -> None:
    """Only starts: for workers that do not get there."""
    executor = MultiprocExecutor(msgspec.msgpack.decode(ctx.spec.payload, type=EngineSettings), ctx)
    executor.start()


def _title(worker: object) -> list[str]:
    from pathlib import Path

    return [Path("/proc/self/cmdline").read_text().split("\0")[0], Path("/proc/self/comm").read_text().strip()]


def hangs(ctx: ChildContext) -> None:
    """One worker busy, the others idle, and a core that waits for ever."""
    executor = MultiprocExecutor(msgspec.msgpack.decode(ctx.spec.payload, type=EngineSettings), ctx)
    executor.start()
    executor.collective_rpc("who")
    future = executor.collective_rpc("nap", (1, 600.0), non_block=True)
    ctx.ready({"pids": [child.pid for child in executor.children]})
    future.result()
