"""How the tests start executors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from launcher.config import EngineSettings, RankSettings, WorkerSettings
from launcher.executor.base import (
    Executor,
    KVCacheConfig,
    NewRequest,
    SamplingParams,
    StepOutput,
    StepPlan,
    pack,
    unpack,
)
from launcher.executor.multiproc import MultiprocExecutor
from launcher.executor.uniproc import UniProcExecutor
from launcher.process.spec import ProcessSpec

PROBE = "tests.executor.workers:Probe"


def settings_of(world: int, worker: str = PROBE, **fields: object) -> EngineSettings:
    return EngineSettings(
        backend="mp",
        worker=msgspec.structs.replace(WorkerSettings(worker=worker, ranks=ranks_of(0, world)), **fields),
        ready_timeout=30,
        ring_bytes=1 << 20,
    )


def ranks_of(rank: int, world: int) -> RankSettings:
    return RankSettings(rank=rank, local_rank=rank, world_size=world, tp_rank=rank, tp_size=world)


def specs_of(settings: EngineSettings, env: dict[str, str] | None = None) -> tuple[ProcessSpec, ...]:
    world = settings.worker.ranks.world_size
    return tuple(
        ProcessSpec(
            title=f"Worker_DP0_PP0_TP{rank}",
            early_title="Worker",
            comm=f"xs:w0.d0p0t{rank}",
            role="worker",
            target="launcher.worker.main:run",
            rank=rank,
            env=env or {},
            payload=msgspec.msgpack.encode(msgspec.structs.replace(settings.worker, ranks=ranks_of(rank, world))),
        )
        for rank in range(world)
    )


@contextmanager
def mp(
    settings: EngineSettings, *, start: bool = True, env: dict[str, str] | None = None
) -> Iterator[MultiprocExecutor]:
    executor = MultiprocExecutor(settings, specs=specs_of(settings, env), method="spawn")
    try:
        if start:
            executor.start()
        yield executor
    finally:
        executor.shutdown(10)


@contextmanager
def uni(settings: EngineSettings) -> Iterator[UniProcExecutor]:
    executor = UniProcExecutor(settings)
    executor.start()
    try:
        yield executor
    finally:
        executor.shutdown(10)


def generate(executor: Executor, prompt: list[int], n: int) -> list[int]:
    """Greedy tokens for one prompt in slot 0, planned as an engine would."""
    config = KVCacheConfig(num_blocks=64, block_size=16)
    executor.initialize_from_config([config] * executor.world_size)
    blocks = list(range(-(-(len(prompt) + n) // 16)))
    new = NewRequest(0, pack(prompt), len(prompt), pack(blocks), 0, SamplingParams())
    tokens = [token_of(executor.execute_model(StepPlan(1, pack([0]), pack([len(prompt)]), b"\x01", (new,))))]
    for step in range(2, n + 1):
        plan = StepPlan(step, pack([0]), pack([1]), b"\x01", token_slots=pack([0]), tokens=pack(tokens[-1:]))
        tokens.append(token_of(executor.execute_model(plan)))
    return tokens


def token_of(output: StepOutput | None) -> int:
    assert output is not None
    return unpack(output.tokens)[0]
