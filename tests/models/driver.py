"""A small engine for the tests: chunked prefill under a token budget, decodes first, preemption on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from launcher.config import RankSettings, WorkerSettings
from launcher.models.worker import TransformersWorker
from launcher.worker.step import KVCacheConfig, NewRequest, SamplingParams, StepOutput, StepPlan, pack, unpack

Execute = Callable[[StepPlan], StepOutput | None]
GREEDY = SamplingParams(temperature=0)


@dataclass
class Request:
    prompt: list[int]
    count: int
    sampling: SamplingParams = GREEDY
    output: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    slot: int | None = None
    unsent: list[int] = field(default_factory=list)
    """Tokens that the workers have not been told."""
    logprobs: list[object] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.count


class Driver:
    """`step` runs one plan; `preempt` takes a request out, to be started again from its tokens."""

    def __init__(self, execute: Execute, *, blocks: int = 256, block_size: int = 16, budget: int = 24) -> None:
        self.execute = execute
        self.free_blocks = [(i * 7) % blocks if blocks % 7 else i for i in range(blocks)]
        self.block_size = block_size
        self.budget = budget
        self.requests: list[Request] = []
        self.free_slots = list(range(64))
        self.freed: list[int] = []
        self.steps = 0
        self.mixed = 0

    def add(self, request: Request) -> Request:
        self.requests.append(request)
        return request

    def preempt(self, request: Request) -> None:
        if request.slot is not None:
            self._release(request)
            request.computed = 0

    def _release(self, request: Request) -> None:
        assert request.slot is not None
        self.freed.append(request.slot)
        self.free_slots.append(request.slot)
        self.free_blocks += request.blocks
        request.slot, request.blocks, request.unsent = None, [], []

    def step(self) -> None:
        left, rows, new = self.budget, [], []
        block_slots: list[int] = []
        block_ids: list[int] = []
        told: list[tuple[int, int]] = []
        running = [r for r in self.requests if not r.finished]
        for request in sorted(running, key=lambda r: len(r.tokens) - r.computed != 1):
            count = min(len(request.tokens) - request.computed, left)
            if count <= 0:
                continue
            left -= count
            needed = -(-(request.computed + count) // self.block_size) - len(request.blocks)
            more = [self.free_blocks.pop() for _ in range(needed)]
            request.blocks += more
            if request.slot is None:
                request.slot = self.free_slots.pop(0)
                new.append(
                    NewRequest(
                        request.slot,
                        pack(request.tokens),
                        len(request.prompt),
                        pack(request.blocks),
                        0,
                        request.sampling,
                    )
                )
            else:
                block_slots += [request.slot] * len(more)
                block_ids += more
                told += [(request.slot, token) for token in request.unsent]
            request.unsent = []
            rows.append((request, count))
        self.mixed += len({count == 1 for _, count in rows}) == 2
        reach = [request.computed + count == len(request.tokens) for request, count in rows]
        plan = StepPlan(
            self.steps,
            pack(r.slot for r, _ in rows if r.slot is not None),
            pack(count for _, count in rows),
            bytes(reach),
            tuple(new),
            pack(self.freed),
            pack(block_slots),
            pack(block_ids),
            pack(slot for slot, _ in told),
            pack(token for _, token in told),
        )
        self.freed = []
        self.steps += 1
        output = self.execute(plan)
        assert output is not None
        assert output.step == plan.step
        by_slot = {request.slot: request for request, _ in rows}
        for request, count in rows:
            request.computed += count
        for i, (slot, token) in enumerate(zip(unpack(output.slots), unpack(output.tokens), strict=True)):
            request = by_slot[slot]
            request.output.append(token)
            request.unsent.append(token)
            if output.logprobs:
                request.logprobs.append(output.logprobs[i])
            if request.finished:
                self._release(request)

    def run(
        self, arrivals: dict[int, list[Request]] | None = None, preemptions: dict[int, Request] | None = None
    ) -> None:
        arrivals, preemptions = dict(arrivals or {}), preemptions or {}
        while arrivals or any(not r.finished for r in self.requests):
            for request in arrivals.pop(self.steps, []):
                self.add(request)
            if self.steps in preemptions:
                self.preempt(preemptions[self.steps])
            self.step()
            assert self.steps < 2000


def settings(model: str, *, tp: int = 1, rank: int = 0, rendezvous: str = "", **more: object) -> WorkerSettings:
    ranks = RankSettings(rank=rank, local_rank=rank, world_size=tp, tp_rank=rank, tp_size=tp)
    return WorkerSettings(model=model, ranks=ranks, rendezvous=rendezvous, local_world_size=tp, **more)  # type: ignore[arg-type]


def started(worker: TransformersWorker, blocks: int = 256) -> TransformersWorker:
    """Through the whole start, in the protocol's order."""
    worker.init_device()
    worker.load_model()
    worker.kv_cache_spec()
    worker.determine_available_memory()
    worker.initialize_from_config(KVCacheConfig(num_blocks=blocks, block_size=16))
    worker.compile_or_warm_up_model()
    return worker
