"""The worker protocol: what an engine builder implements to get the whole process tree.

One instance lives in each worker process (or, with the `uni` executor, in the engine core). xserve calls, in order::

    worker = YourWorker(settings)      # cheap: store settings
    init_device()                      # device, distributed groups, BLAS handles
    load_model()
    kv_cache_spec()                    # every rank's spec …
    determine_available_memory()       # … and bytes for KV; the smallest rank decides
    initialize_from_config(kv_config)  # cut the KV cache
    compile_or_warm_up_model()
    execute_model(plan) … per step; sample_tokens(mask) only for plans with a grammar
    shutdown()

Any other method you add is reachable with ``collective_rpc("name", args)``. Methods run one at a time, in the order
that the engine core sent them, the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from launcher.config import WorkerSettings
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

__all__ = [
    "GrammarMask",
    "KVCacheConfig",
    "KVCacheSpec",
    "NewRequest",
    "Progress",
    "SamplingParams",
    "StepOutput",
    "StepPlan",
    "TokenLogprobs",
    "Worker",
    "WorkerSettings",
    "pack",
    "unpack",
]


class Progress(Protocol):
    """``progress(done, total, unit, detail)``: call it within slow phases, so that slow is told from stuck."""

    def __call__(self, done: float, total: float = 0, unit: str = "", detail: str = "") -> None: ...


def no_progress(done: float, total: float = 0, unit: str = "", detail: str = "") -> None:
    """The default: nobody listens."""


def no_waits(waiting: bool) -> None:
    """The default: nobody watches."""


class Worker:
    """Base class with harmless defaults; only `execute_model` and `kv_cache_spec` have none."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.progress: Progress = no_progress
        """Replaced by the worker process before `init_device`."""
        self.waits: Callable[[bool], None] = no_waits
        """Call it with True before a wait for other ranks, with False after it: so that a hung group's culprit can be
        named. Replaced by the worker process before its first call."""

    def init_device(self) -> None:
        """Choose the device, join the groups. Collective: every rank calls it at the same time."""

    def load_model(self) -> None:
        """Load weights."""

    def kv_cache_spec(self) -> KVCacheSpec:
        raise NotImplementedError(f"{type(self).__name__}.kv_cache_spec")

    def determine_available_memory(self) -> int:
        """Bytes that this rank can give to its KV cache."""
        return self.settings.kv_cache_memory or 1 << 30

    def initialize_from_config(self, config: KVCacheConfig) -> None:
        """Cut the KV cache into `config.num_blocks` blocks."""

    def compile_or_warm_up_model(self) -> None:
        """Run what the first request should not have to wait for."""

    def execute_model(self, plan: StepPlan) -> StepOutput | None:
        """Run one step. The output rank's answer counts; the others may return None."""
        raise NotImplementedError(f"{type(self).__name__}.execute_model")

    def sample_tokens(self, mask: GrammarMask | None) -> StepOutput | None:
        """Sample from the logits of the last `execute_model`, whose plan had ``has_grammar``."""
        raise NotImplementedError(f"{type(self).__name__}.sample_tokens")

    def check_health(self) -> Any:
        """Answer; raise if this rank is not well."""

    def shutdown(self) -> None:
        """Free what the process's end does not free."""


def take_own_config(worker: Any, kv_configs: list[KVCacheConfig]) -> None:
    """For `collective_rpc`: every rank takes its own of the list."""
    worker.initialize_from_config(kv_configs[worker.settings.ranks.rank])
