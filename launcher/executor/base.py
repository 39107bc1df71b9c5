"""The executor interface: how an engine core reaches its workers, whatever and wherever they are.

The core knows `execute_model`, `sample_tokens`, `collective_rpc` and `initialize_from_config`, and no executor in
particular. A new worker method needs no change here: it is reached by `collective_rpc`. An executor of your own derives
from `Executor` and is chosen by ``--backend module:Class``.

This file also re-exports what plans and answers are made of, so that the engine imports one room only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

import msgspec

from launcher import envs
from launcher.config import REFERENCE_WORKER, EngineSettings
from launcher.errors import Failure, UsageError
from launcher.worker.base import no_progress, take_own_config
from launcher.worker.classes import import_class
from launcher.worker.step import (
    GrammarMask,
    KVCacheConfig,
    KVCacheSpec,
    NewRequest,
    SamplingParams,
    StepOutput,
    StepPlan,
    TokenLogprobs,
    pack,
    unpack,
)

if TYPE_CHECKING:
    from launcher.process.child import ChildContext
    from launcher.worker.injury import Injury

__all__ = [
    "Executor",
    "Future",
    "GrammarMask",
    "KVCacheConfig",
    "KVCacheSpec",
    "NewRequest",
    "SamplingParams",
    "StepOutput",
    "StepPlan",
    "TokenLogprobs",
    "pack",
    "resolve_executor",
    "unpack",
]

T_co = TypeVar("T_co", covariant=True)

BACKENDS = {
    "uni": "launcher.executor.uniproc:UniProcExecutor",
    "mp": "launcher.executor.multiproc:MultiprocExecutor",
    "mp-nodes": "launcher.executor.multinode:MultinodeExecutor",
}
"""The last one is chosen by the plan, where a launch has several nodes."""


class Future(Protocol[T_co]):
    """The answer to a call that was sent without waiting. Futures of one executor resolve in the order of sending."""

    def done(self) -> bool:
        """Takes in what has arrived, never blocks; True once `result` would not block."""

    def result(self, timeout: float | None = None) -> T_co:
        """The answer, or the call's error. `DeadlineError` when `timeout` seconds pass; asking again is allowed."""


class Executor(ABC):
    """Carries calls to all workers of one engine core.

    One thread owns an executor. Every rank executes every call, in the order of sending; who answers is the caller's
    choice. Errors are the same kinds everywhere: `RemoteError` (the method raised; has the remote traceback),
    `ChildFailedError` (a worker is gone; the executor is of no more use), `DeadlineError` (names the silent ranks),
    `ClosedError` (after `shutdown`).
    """

    def __init__(self, settings: EngineSettings, ctx: ChildContext | None = None) -> None:
        """A subclass that forks does so here, before anything makes a thread, a ZMQ context or a ring."""
        ranks = settings.worker.ranks
        worker = msgspec.structs.replace(settings.worker, generation=settings.generation)
        self.settings = msgspec.structs.replace(settings, worker=worker)
        self.ctx = ctx
        self.world_size: int = ranks.world_size
        self.output_rank: int = ranks.world_size - ranks.tp_size
        """First TP rank of the last PP stage: the one whose `execute_model` answer counts."""
        self._injury: Injury | None = None
        """Faults of rank ``core`` in ``XSERVE_FAULT``: failures of this process, rehearsed."""
        if settings.worker.worker == REFERENCE_WORKER and envs.fault_text():
            from launcher.worker.injury import make_injury  # only then: it brings ctypes and subprocess

            self._injury = make_injury("core", worker, lambda: no_progress if ctx is None else ctx.progress)

    def _strike(self, point: Literal["init", "step", "cleanup"]) -> None:
        """A backend calls it where a rehearsed failure of the engine core would happen."""
        if self._injury is not None:
            self._injury.strike(point)

    # --- what a backend implements ---------------------------------------------------------------------------------

    @abstractmethod
    def start(self) -> None:
        """Return when every worker has its device, groups, model and queues. Raises `ChildFailedError`."""

    @abstractmethod
    def submit(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        unique_reply_rank: int | None = None,
    ) -> Future[Any]:
        """Send a call to every rank and return at once; see `collective_rpc`. The time runs from now."""

    @abstractmethod
    def watch_fds(self) -> list[int]:
        """Descriptors that become readable when a worker has died: for the poll of an idle core."""

    @abstractmethod
    def raise_if_dead(self) -> None:
        """`ChildFailedError` when a worker is gone, `RemoteError` for an error of a rank that was not to answer.

        Never blocks for longer than it takes to learn why.
        """

    def hung(self, limit: float) -> Failure | None:
        """The rank that keeps a call from ending, if one has been at it for more than `limit` seconds.

        An idle executor is never hung, nor is one whose ranks go from call to call.
        """
        del limit
        return None

    def tell_hung(self, failure: Failure) -> None:  # noqa: B027 - nobody to tell, on one machine
        """A rank was found to be hung: those who can show the stacks of ranks elsewhere are to do so."""

    def is_idle(self) -> bool:
        """Whether every rank has carried out every call; one that need not answer may be behind the answer."""
        return True

    @abstractmethod
    def shutdown(self, budget: float) -> list[str]:
        """End all workers within `budget` seconds; the titles of those cut short. A second call does nothing."""

    # --- what the engine core calls --------------------------------------------------------------------------------

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """Call a worker method by name, or ``method(worker, *args, **kwargs)`` for a callable, on every rank.

        The answers in rank order, or with `unique_reply_rank` that rank's answer alone; with `non_block` a future of
        it. `timeout` is in seconds for all ranks together; `DeadlineError` names those that were silent. A call that
        timed out has still been sent: the workers execute it, and its late answers are thrown away.
        """
        future = self.submit(method, args, kwargs, timeout=timeout, unique_reply_rank=unique_reply_rank)
        return future if non_block else future.result()

    @overload
    def execute_model(self, plan: StepPlan, non_block: Literal[False] = False) -> StepOutput | None: ...

    @overload
    def execute_model(self, plan: StepPlan, non_block: Literal[True]) -> Future[StepOutput | None]: ...

    def execute_model(self, plan: StepPlan, non_block: bool = False) -> StepOutput | Future[StepOutput | None] | None:
        """Run one step on all ranks; the output rank's answer. None if the plan has a grammar."""
        self._strike("step")
        future: Future[StepOutput | None] = self.submit("execute_model", (plan,), unique_reply_rank=self.output_rank)
        return future if non_block else future.result()

    @overload
    def sample_tokens(self, grammar: GrammarMask | None, non_block: Literal[False] = False) -> StepOutput | None: ...

    @overload
    def sample_tokens(self, grammar: GrammarMask | None, non_block: Literal[True]) -> Future[StepOutput | None]: ...

    def sample_tokens(
        self, grammar: GrammarMask | None, non_block: bool = False
    ) -> StepOutput | Future[StepOutput | None] | None:
        """Sample from the logits of the last `execute_model`, whose plan had ``has_grammar``."""
        future: Future[StepOutput | None] = self.submit("sample_tokens", (grammar,), unique_reply_rank=self.output_rank)
        return future if non_block else future.result()

    def initialize_from_config(self, kv_configs: list[KVCacheConfig]) -> None:
        """Cut the KV cache (one config per rank, in rank order) and warm up, on every rank."""
        if len(kv_configs) != self.world_size:
            raise UsageError(
                f"{len(kv_configs)} KV configs for {self.world_size} ranks; give one per rank, in rank order"
            )
        self.collective_rpc(take_own_config, (kv_configs,))
        self.collective_rpc("compile_or_warm_up_model")

    def check_health(self) -> None:
        """Ask every rank whether it is well; the first error of any of them."""
        self.raise_if_dead()
        self.collective_rpc("check_health")


def resolve_executor(backend: str) -> type[Executor]:
    """The class for ``uni``, ``mp`` or ``module:Class``. `UsageError` when there is none, or it is no `Executor`."""
    name = BACKENDS.get(backend, backend)
    if ":" not in name:
        raise UsageError(f"unknown backend {backend!r}; write uni, mp or module:Class")
    found = import_class(name, "backend")
    if not issubclass(found, Executor):
        raise UsageError(
            f"backend {backend!r}: {found.__qualname__} is not an Executor; "
            "derive it from launcher.executor.base:Executor"
        )
    return found
