"""A worker that believes nothing, and an executor that carries calls to it within the process.

`StrictWorker` keeps its own model of slots, block tables and KV contents from the plans' deltas, and fails at the first
thing that does not fit. Token i of a request is a function of (prompt, i) alone.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.config import EngineSettings, RankSettings, WorkerSettings
from launcher.engine.core import EngineCore
from launcher.engine.messages import AddRequest, RequestOutput
from launcher.errors import ChildFailedError, DeadlineError, Failure
from launcher.executor.base import (
    Executor,
    Future,
    KVCacheConfig,
    KVCacheSpec,
    SamplingParams,
    StepOutput,
    StepPlan,
    TokenLogprobs,
    pack,
    unpack,
)

VOCAB = 1000


def expected(prompt: Sequence[int], count: int) -> list[int]:
    """The first `count` tokens that answer `prompt`."""
    seed = zlib.crc32(pack(prompt))
    return [zlib.crc32(b"%d %d" % (seed, i)) % VOCAB for i in range(count)]


class _Slot:
    def __init__(self, tokens: list[int], prompt_len: int, blocks: list[int], life: object) -> None:
        self.tokens = tokens
        self.prompt = tokens[:prompt_len]
        self.blocks = blocks
        self.computed = 0
        self.life = life


class StrictWorker:
    """One rank. `block_size`, `num_blocks` and limits are what the plans must keep to."""

    def __init__(self, settings: WorkerSettings, *, max_num_seqs: int, budget: int, eos: tuple[int, ...] = ()) -> None:
        self.settings = settings
        self.max_num_seqs = max_num_seqs
        self.budget = budget
        self.eos = eos
        self.max_model_len = 64
        self.bytes_per_block = 100
        self.available = 1 << 20
        self.num_blocks = 0
        self.block_size = settings.block_size
        self.slots: dict[int, _Slot] = {}
        self.kv: dict[tuple[int, int], tuple[object, int, int]] = {}
        """(block, offset) → (life, position, token) whose keys and values lie there."""
        self.steps = 0
        self.calls: list[str] = []
        self.pending: StepOutput | None = None

    def kv_cache_spec(self) -> KVCacheSpec:
        return KVCacheSpec(
            bytes_per_block=self.bytes_per_block,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            vocab_size=VOCAB,
            eos_token_ids=self.eos,
        )

    def determine_available_memory(self) -> int:
        return self.available

    def initialize_from_config(self, config: KVCacheConfig) -> None:
        assert config.block_size == self.block_size
        self.num_blocks = config.num_blocks

    def compile_or_warm_up_model(self) -> None:
        self.calls.append("warm_up")

    def check_health(self) -> None:
        self.calls.append("check_health")

    def echo(self, *args: Any) -> list[Any]:
        return [self.settings.ranks.rank, *args]

    def fail(self) -> None:
        raise ValueError("told to fail")

    def unsendable(self) -> object:
        return object()

    def execute_model(self, plan: StepPlan) -> StepOutput | None:
        self.steps += 1
        assert plan.step == self.steps, "steps are numbered from 1 without a gap"
        self._apply(plan)
        rows = list(zip(unpack(plan.slots), unpack(plan.num_tokens), plan.sample, strict=True))
        assert rows, "an empty plan"
        assert len({slot for slot, _, _ in rows}) == len(rows), "a slot twice in a step"
        assert sum(count for _, count, _ in rows) <= self.budget, "over the token budget"
        for slot, count, sample in rows:
            self._compute(self.slots[slot], count, sample)
        sampled = [slot for slot, _, sample in rows if sample]
        tokens = [self._next(self.slots[slot]) for slot in sampled]
        logprobs = tuple(TokenLogprobs(pack([token]), b"\0\0\0\0", 0) for token in tokens) if plan.step % 2 else ()
        output = StepOutput(plan.step, pack(sampled), pack(tokens), logprobs)
        if plan.has_grammar:
            self.pending = output
            return None
        return output

    def sample_tokens(self, _mask: object) -> StepOutput | None:
        output, self.pending = self.pending, None
        assert output is not None
        return output

    def _apply(self, plan: StepPlan) -> None:
        for slot in unpack(plan.freed):
            del self.slots[slot]
        for new in plan.new:
            assert 0 <= new.slot < self.max_num_seqs
            assert new.slot not in self.slots, "slot in use"
            tokens = unpack(new.token_ids)
            assert new.num_computed == 0
            assert 1 <= new.prompt_len <= len(tokens)
            prompt, output = tokens[: new.prompt_len], tokens[new.prompt_len :]
            assert output == expected(prompt, len(output)), "resumed with other tokens than were sampled"
            self.slots[new.slot] = _Slot(tokens, new.prompt_len, [], object())
            for block in unpack(new.block_ids):
                self._own(new.slot, block)
        for slot, block in zip(unpack(plan.block_slots), unpack(plan.block_ids), strict=True):
            self._own(slot, block)
        for slot, token in zip(unpack(plan.token_slots), unpack(plan.tokens), strict=True):
            state = self.slots[slot]
            assert token == self._next(state), "a token that was not sampled for this slot"
            state.tokens.append(token)

    def _own(self, slot: int, block: int) -> None:
        assert 0 <= block < self.num_blocks
        for other, state in self.slots.items():
            assert block not in state.blocks, f"block {block} is slot {other}'s"
        self.slots[slot].blocks.append(block)

    def _next(self, state: _Slot) -> int:
        count = len(state.tokens) - len(state.prompt)
        return expected(state.prompt, count + 1)[count]

    def _place(self, state: _Slot, position: int) -> tuple[int, int]:
        return state.blocks[position // self.block_size], position % self.block_size

    def _compute(self, state: _Slot, count: int, sample: int) -> None:
        assert count >= 1
        end = state.computed + count
        assert end <= len(state.tokens), "more tokens to compute than there are"
        assert bool(sample) == (end == len(state.tokens)), "samples exactly at the end"
        assert len(state.tokens) < self.max_model_len
        for position in range(state.computed):
            found = self.kv[self._place(state, position)]
            assert found == (state.life, position, state.tokens[position]), "keys and values were overwritten"
        for position in range(state.computed, end):
            self.kv[self._place(state, position)] = (state.life, position, state.tokens[position])
        state.computed = end


class Answer:
    """A future that the executor resolves; `hold` makes it late."""

    def __init__(self, value: Any = None, error: BaseException | None = None, hold: Callable[[], bool] = lambda: False):
        self.value = value
        self.error = error
        self.hold = hold

    def done(self) -> bool:
        return not self.hold()

    def result(self, timeout: float | None = None) -> Any:
        if self.hold():
            raise DeadlineError(f"not within {timeout} s")
        if self.error is not None:
            raise self.error
        return self.value


def dead(title: str = "Worker_DP0_PP0_TP0") -> ChildFailedError:
    return ChildFailedError(Failure(title=title, role="worker", kind="died", headline="killed by SIGKILL"))


class InProcess(Executor):
    """Carries calls to `StrictWorker`s at once. `die()` is a worker's death: the descriptor, then the error."""

    def __init__(self, settings: EngineSettings, workers: list[StrictWorker]) -> None:
        super().__init__(settings)
        self.workers = workers
        self.started = False
        self.stopped_within: float | None = None
        self.is_dead = False
        self.hangs = False
        self._death: tuple[int, int] | None = None

    def start(self) -> None:
        self.started = True

    def submit(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        unique_reply_rank: int | None = None,
    ) -> Future[Any]:
        if self.is_dead:
            return Answer(error=dead())
        try:
            answers = [
                method(worker, *args, **(kwargs or {}))
                if callable(method)
                else getattr(worker, method)(*args, **(kwargs or {}))
                for worker in self.workers
            ]
        except ValueError as error:
            return Answer(error=error)
        return Answer(answers if unique_reply_rank is None else answers[unique_reply_rank], hold=lambda: self.hangs)

    def watch_fds(self) -> list[int]:
        if self._death is None:
            self._death = os.pipe()
        return [self._death[0]]

    def die(self) -> None:
        self.is_dead = True
        if self._death is not None:
            os.write(self._death[1], b"x")

    def raise_if_dead(self) -> None:
        if self.is_dead:
            raise dead()

    def shutdown(self, budget: float) -> list[str]:
        self.stopped_within = budget
        if self._death is not None:
            for fd in self._death:
                os.close(fd)
            self._death = None
        return []


def make_core(
    *,
    world: int = 1,
    max_num_seqs: int = 4,
    budget: int = 32,
    max_model_len: int | None = None,
    eos: tuple[int, ...] = (),
    address: str = "",
    generation: int = 0,
    prepare: Callable[[list[StrictWorker]], None] = lambda workers: None,
) -> tuple[EngineCore, InProcess]:
    """A core with strict workers, not yet initialized."""
    workers = [
        StrictWorker(
            WorkerSettings(block_size=4, ranks=RankSettings(rank=rank, world_size=world, tp_size=world)),
            max_num_seqs=max_num_seqs,
            budget=budget,
            eos=eos,
        )
        for rank in range(world)
    ]
    prepare(workers)
    settings = EngineSettings(
        worker=workers[0].settings,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        address=address,
        generation=generation,
    )
    executor = InProcess(settings, workers)
    return EngineCore(executor, settings), executor


def add(request_id: str, prompt: Sequence[int], output: Sequence[int] = (), **sampling: Any) -> AddRequest:
    return AddRequest(request_id, pack(prompt), SamplingParams(**sampling), pack(output))


def gather(core: EngineCore, limit: int = 10_000) -> dict[str, list[int]]:
    """Step until there is no work; the tokens of each request."""
    tokens: dict[str, list[int]] = {}
    for _ in range(limit):
        if not core.has_work:
            return tokens
        for key, output in core.step():
            tokens.setdefault(key, []).extend(unpack(output.new_token_ids))
    raise AssertionError("the core never comes to an end")


def last(news: list[tuple[str, RequestOutput]]) -> RequestOutput:
    return news[-1][1]
