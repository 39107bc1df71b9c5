"""The engine core without sockets: scheduler + executor. For `core_process` and, in the caller's process, for `Engine`.

It never knows which executor it has. One thread owns it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from launcher.clock import Deadline, now
from launcher.config import EngineSettings
from launcher.engine.kv_blocks import BlockPool
from launcher.engine.kv_size import agree, decide_model_len, decide_num_blocks
from launcher.engine.messages import AddRequest, EngineInfo, RequestOutput, SchedulerStats
from launcher.engine.request import Limits
from launcher.engine.scheduled import ScheduledStep
from launcher.engine.scheduler import Scheduler
from launcher.errors import DeadlineError, InternalError
from launcher.executor.base import (
    Executor,
    Future,
    GrammarMask,
    KVCacheConfig,
    KVCacheSpec,
    StepOutput,
    StepPlan,
    unpack,
)
from launcher.process.reports import Step

WAIT_SLICE = 0.25
"""Seconds between two calls of `while_waiting` during a step: how late a stop may find a core whose workers hang."""

_RECENT = 8
"""Plans kept."""

T = TypeVar("T")


class Grammar(Protocol):
    """What masks the logits of structured output. None is built in; a step's requests are named by their keys."""

    def is_wanted(self, keys: Sequence[str]) -> bool:
        """Whether one of these requests, all sampled by the coming plan, needs a mask."""

    def mask(self, plan: StepPlan, keys: Sequence[str]) -> GrammarMask | None:
        """Computed while the workers run `plan`."""


class EngineCore:
    """`initialize` once, then `add_request`, `abort` and `step` in any order; the caller shuts the executor down."""

    def __init__(self, executor: Executor, settings: EngineSettings) -> None:
        self.executor = executor
        self.settings = settings
        self.recent: deque[StepPlan] = deque(maxlen=_RECENT)
        """The last plans, for who asks after a failure what was being done."""
        self.grammar: Grammar | None = None
        self.while_waiting: Callable[[], None] = lambda: None
        """Called now and then while a step is awaited; what it raises ends the step (and the core)."""
        self.step_began: float | None = None
        """When the step under way was given to the workers (monotonic seconds); None: they have nothing to do."""
        self._scheduler: Scheduler | None = None
        self._early: list[tuple[str, RequestOutput]] = []
        """Answers that need no step: refusals."""

    @property
    def scheduler(self) -> Scheduler:
        if self._scheduler is None:
            raise InternalError("the engine core is used before initialize()")
        return self._scheduler

    def initialize(self, enter: Callable[[Step, str], None] = lambda _step, _detail: None) -> EngineInfo:
        """Bring the workers up, size the KV cache by the smallest rank, cut it, warm up.

        `enter` is told each step as it begins. Raises `UsageError` or `HostError` when the sizes cannot work,
        `ChildFailedError` or `RemoteError` when a worker fails.
        """
        self.executor.start()
        enter(Step.KV_CACHE, "asking every rank for its free memory")
        specs: list[KVCacheSpec] = self.executor.collective_rpc("kv_cache_spec")
        available: list[int] = self.executor.collective_rpc("determine_available_memory")
        spec = agree(specs)
        max_model_len = decide_model_len(self.settings.max_model_len, spec)
        num_blocks = decide_num_blocks(specs, available, max_model_len, self.settings.max_num_seqs)
        enter(Step.WARM_UP, f"{num_blocks} KV blocks of {spec.block_size} tokens")
        config = KVCacheConfig(num_blocks=num_blocks, block_size=spec.block_size)
        self.executor.initialize_from_config([config] * self.executor.world_size)
        limits = Limits(max_model_len, num_blocks * spec.block_size, spec.vocab_size, spec.eos_token_ids)
        self._scheduler = Scheduler(
            BlockPool(num_blocks, spec.block_size),
            limits,
            max_num_seqs=self.settings.max_num_seqs,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
        )
        return EngineInfo(
            generation=self.settings.generation,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=spec.block_size,
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            max_num_seqs=self.settings.max_num_seqs,
        )

    def recent_steps(self) -> list[str]:
        """The last plans in short, oldest first."""
        lines = []
        for plan in self.recent:
            slots, tokens = unpack(plan.slots), unpack(plan.num_tokens)
            lines.append(
                f"step {plan.step}: {len(slots)} requests, {sum(tokens)} tokens, {len(plan.new)} new,"
                f" {len(plan.freed) // 4} freed, slots {slots[:16]}{'…' if len(slots) > 16 else ''}"
            )
        return lines

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return self.scheduler.has_work or bool(self._early)

    def add_request(self, request: AddRequest, key: str | None = None) -> None:
        """Accept a request, known as `key` (default: its own id). A refusal is an output of the next step."""
        key = request.request_id if key is None else key
        refused = self.scheduler.add(key, request)
        if refused is not None:
            self._early.append((key, refused))

    def abort(self, keys: Iterable[str]) -> int:
        """End these requests without an output; how many were alive. Unknown ones are no error: they had ended."""
        gone = set(keys)
        self._early = [(key, output) for key, output in self._early if key not in gone]
        return sum(self.scheduler.abort(key) for key in gone)

    def abort_all(self) -> list[tuple[str, RequestOutput]]:
        """End every request, each with an output that says ``abort``."""
        ended = [*self._early, *((key, RequestOutput(rid, b"", "abort")) for key, rid in self.scheduler.unfinished())]
        self.abort([key for key, _ in ended])
        return ended

    def step(self) -> list[tuple[str, RequestOutput]]:
        """Run one step of the workers, wait for it; (key, output) of every request that has news."""
        early, self._early = self._early, []
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            if self.scheduler.has_work:
                raise InternalError(f"requests, but nothing to compute: {self.stats()}")
            return early
        self.step_began = now()
        output = self._execute(scheduled)
        self.step_began = None
        return early + self.scheduler.update(scheduled, output)

    def _execute(self, scheduled: ScheduledStep) -> StepOutput | None:
        plan = scheduled.plan
        self.recent.append(plan)
        keys = [row.request.key for row in scheduled.sampled]
        if self.grammar is None or not self.grammar.is_wanted(keys):
            return self._await(self.executor.execute_model(plan, non_block=True))
        plan = msgspec.structs.replace(plan, has_grammar=True)
        computed = self.executor.execute_model(plan, non_block=True)
        mask = self.grammar.mask(plan, keys)
        sampled = self.executor.sample_tokens(mask, non_block=True)
        self._await(computed)
        return self._await(sampled)

    def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """A worker method on every rank, between two steps. `DeadlineError` after `timeout` seconds."""
        deadline = Deadline.after(timeout)
        answer = self.executor.collective_rpc(
            method, args, kwargs, timeout=timeout, non_block=True, unique_reply_rank=unique_reply_rank
        )
        return self._await(answer, deadline)

    def _await(self, answer: Future[T], deadline: Deadline | None = None) -> T:
        # A step has no limit of its own: it may be long, a dead worker ends the wait, a hung one is for the watchdog.
        deadline = deadline or Deadline.after(None)
        while True:
            try:
                return answer.result(min(WAIT_SLICE, deadline.remaining()))
            except DeadlineError:
                if deadline.expired:
                    raise
                self.while_waiting()

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()
