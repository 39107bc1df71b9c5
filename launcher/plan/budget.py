"""Shares of the machine: threads for each worker, and whether weights and KV cache fit into memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from launcher.config import BLOCK_SIZE
from launcher.errors import HostError, UsageError
from launcher.host import HostFacts
from launcher.plan.checkpoint import Checkpoint


class Threads(NamedTuple):
    number: int
    origin: str
    """One line: where the number came from."""


def thread_budget(facts: HostFacts, local_workers: int, bound: Sequence[Sequence[int]] = ()) -> Threads:
    """OMP threads of each worker: the CPUs we may use, shared over all local workers; at least one. `bound`: the CPUs
    that each worker will be bound to (empty: to none); the tightest place decides for all, since ranks wait for
    each other.

    More threads than CPUs is the classic way to make a start 15 times slower, so quota counts like the mask: it is
    rounded down, since a thread that waits for the next period holds up all others at the barrier.
    """
    if facts.omp_num_threads is not None:
        return Threads(facts.omp_num_threads, "OMP_NUM_THREADS is set")
    cpus, source = facts.cpus, f"{facts.cpus} CPUs in the affinity mask"
    if facts.cpu_quota is not None and facts.cpu_quota < cpus:
        cpus, source = max(1, math.floor(facts.cpu_quota)), f"CPU quota of {facts.cpu_quota:g}"
    number = max(1, cpus // local_workers)
    origin = f"{source} over {local_workers} local worker{'s'[: local_workers > 1]}"
    shares = [len(own) // sum(other == own for other in bound) for own in bound if own]
    if shares and max(1, min(shares)) < number:
        return Threads(max(1, min(shares)), f"{origin}, and no more than the CPUs that each is bound to")
    return Threads(number, origin)


class Memory(NamedTuple):
    """What a model needs at least, in bytes over all local ranks."""

    weights: int
    kv: int
    """0: it cannot be told."""
    line: str
    """The arithmetic."""
    per_token: int = 0
    """Of the KV cache, over all local ranks; 0: it cannot be told, or its size was given."""


def check_kv_memory(model: Checkpoint, dtype: str, tp: int, given: int | None, max_model_len: int | None) -> None:
    """Refuse a --kv-cache-memory that holds no block, or not one sequence of the longest kind.

    The engine core decides this again from what the workers say; here it costs no start.
    """
    block = model.kv_bytes_per_block(dtype, tp)
    if given is None or not block:
        return
    tokens = given // block * BLOCK_SIZE
    if not tokens:
        raise UsageError(
            f"--kv-cache-memory {given} holds no block of {BLOCK_SIZE} tokens, which takes {block} bytes a rank"
            f" ({_shape(model, dtype, tp)}): give at least {block}"
        )
    length = max_model_len or model.max_model_len
    if tokens < length:
        whose = "--max-model-len" if max_model_len else "the model's"
        raise UsageError(
            f"--kv-cache-memory {given} holds {tokens} tokens, less than one sequence of {whose} {length}:"
            f" give at least {_blocks(length) * block}, or --max-model-len {tokens}"
        )


def memory_need(
    model: Checkpoint,
    dtype: str,
    tp: int,
    given: int | None,
    max_model_len: int | None,
    *,
    local_workers: int | None = None,
) -> Memory:
    """Weights (sharded, so once over all nodes) and the least KV cache that serves: what was given, else one sequence.

    `local_workers`: of the `tp` ranks, those on this machine; None: all.
    """
    workers = tp if local_workers is None else local_workers
    weights = model.weight_bytes_as(dtype) * workers // tp
    length = max_model_len or model.max_model_len or BLOCK_SIZE
    if given is not None:
        kv, what = given * workers, f"{workers} x {size(given)} of KV cache"
    else:
        kv = _blocks(length) * model.kv_bytes_per_block(dtype, tp) * workers
        what = f"{size(kv)} of KV cache for one sequence of {length} tokens"
    part = f" ({workers} of {tp} ranks)" if workers != tp else ""
    line = f"weights as {dtype}{part} {size(weights)} + {what} = {size(weights + kv)}"
    return Memory(weights, kv, line, model.kv_bytes_per_token(dtype, tp) * workers if given is None else 0)


def check_memory(facts: HostFacts, need: Memory) -> None:
    """Refuse a model that cannot fit beside what runs here already: later the kernel would kill it, without a word."""
    if need.weights + need.kv <= facts.memory_free:
        return
    advice = "free some, raise the limit, or give a smaller --dtype or model"
    if need.per_token:
        # Half of what the weights leave is what a CPU launch gives to its KV cache.
        fits = max(0, facts.memory_free - need.weights) // 2 // need.per_token // BLOCK_SIZE * BLOCK_SIZE
        advice = f"give --max-model-len {fits}, or free some" if fits else advice
    elif need.kv:
        advice = f"{advice}, or a smaller --kv-cache-memory"
    raise HostError(
        f"not enough memory: {need.line}, but {size(facts.memory_free)} are free ({facts.memory_origin}): {advice}"
    )


def size(count: int) -> str:
    """Bytes for people: ``1.5 GiB``; whole numbers below 1 KiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _blocks(tokens: int) -> int:
    return math.ceil(tokens / BLOCK_SIZE)


def _shape(model: Checkpoint, dtype: str, tp: int) -> str:
    return f"{model.layers} layers x {model.kv_heads // tp} KV heads x {model.head_dim} x 2, {dtype}"
