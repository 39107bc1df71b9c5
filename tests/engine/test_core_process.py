"""The process's target, run in a thread with the reference worker behind the `uni` executor."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from launcher.config import EngineSettings, WorkerSettings
from launcher.engine import core_process
from launcher.engine.client import EngineClient
from launcher.engine.messages import EngineInfo, SamplingParams
from launcher.errors import HostError, UsageError
from launcher.executor.base import unpack
from launcher.process.reports import Step, Stop
from launcher.process.spec import ProcessSpec
from launcher.worker.reference import expected_tokens
from tests.engine.conftest import Parent


class Context(Parent):
    """What `core_process` needs of a `ChildContext`."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__()
        self.spec = ProcessSpec(
            title="EngineCore_DP0",
            role="engine_core",
            target="launcher.engine.core_process:run",
            payload=msgspec.msgpack.encode(settings),
        )
        self.descriptors: dict[str, int] = {}
        self.story: list[str] = []
        self.info: dict[str, Any] = {}
        self.is_ready = threading.Event()

    def enter(self, step: Step, detail: str = "") -> None:
        self.story.append(str(step))

    def progress(self, done: float, total: float = 0, unit: str = "", detail: str = "") -> None:
        pass

    def watch_parent(self) -> None:
        self.story.append("watching parent")

    def ready(self, info: dict[str, Any] | None = None) -> None:
        self.story.append("ready")
        self.info = info or {}
        self.is_ready.set()


def settings_of(address: str, **worker: Any) -> EngineSettings:
    return EngineSettings(
        backend="uni",
        address=address,
        generation=2,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=worker.pop("max_model_len", 256),
        worker=WorkerSettings(max_num_seqs=8, max_num_batched_tokens=64, **worker),
    )


@pytest.fixture
def make_context() -> Iterator[Callable[[EngineSettings], Context]]:
    made: list[Context] = []

    def make(settings: EngineSettings) -> Context:
        made.append(Context(settings))
        return made[-1]

    yield make
    gc.unfreeze()
    for context in made:
        context.close()


async def _ask(address: str) -> None:
    client = EngineClient(address, "api-0")
    try:
        await client.start(10)

        async def one(index: int) -> list[int]:
            outputs = client.generate(f"r{index}", [index] * (40 + index), SamplingParams(max_tokens=100))
            return [token async for output in outputs for token in unpack(output.new_token_ids)]

        got = await asyncio.gather(*(one(index) for index in range(20)))
        assert got == [expected_tokens([index] * (40 + index), 100) for index in range(20)]
        assert client.stats.preemptions > 0
        assert (await client.call("stats"))["free_blocks"] == client.stats.total_blocks
    finally:
        await client.close()


def test_from_start_to_stop_with_a_cache_that_forces_preemption(
    address: str, make_context: Callable[[EngineSettings], Context]
) -> None:
    # 24 blocks of 16 tokens at 1 kB each: two and a half of the requests below.
    ctx = make_context(settings_of(address, kv_cache_memory=24 * 16 * 1024))
    thread = threading.Thread(target=core_process.run, args=(ctx,))
    thread.start()
    assert ctx.is_ready.wait(10)
    try:
        asyncio.run(_ask(address))
    finally:
        ctx.say(Stop(budget=2))
        thread.join(10)
    assert not thread.is_alive()
    assert msgspec.convert(ctx.info, EngineInfo).num_blocks == 24
    tail = ctx.story[ctx.story.index("kv cache") :]
    assert tail == ["kv cache", "warm-up", "ready", "serving", "stopping"]
    assert "watching parent" in ctx.story[: ctx.story.index("kv cache")]


def test_sizes_that_cannot_work_end_it_before_ready(
    address: str, make_context: Callable[[EngineSettings], Context]
) -> None:
    ctx = make_context(settings_of(address, kv_cache_memory=1024))
    with pytest.raises(HostError, match="--kv-cache-memory"):
        core_process.run(ctx)  # type: ignore[arg-type]
    ctx = make_context(settings_of(address, max_model_len=5000))
    with pytest.raises(UsageError, match="--max-model-len 5000"):
        core_process.run(ctx)  # type: ignore[arg-type]
    assert not ctx.is_ready.is_set()


def test_an_address_that_is_taken_away_ends_it_before_ready(
    make_context: Callable[[EngineSettings], Context],
) -> None:
    ctx = make_context(settings_of("ipc:///nowhere/core"))
    with pytest.raises(HostError, match="cannot listen"):
        core_process.run(ctx)  # type: ignore[arg-type]
    assert not ctx.is_ready.is_set()


def test_nothing_before_the_fork_imports_zmq_or_starts_a_thread() -> None:
    code = (
        "import sys, threading, launcher.engine.core_process as target; "
        "print('zmq' in sys.modules, 'torch' in sys.modules, threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False", "1"]
