"""How many KV blocks an engine core has: arithmetic on what the ranks say, and the lines that refuse it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.engine.kv_blocks import blocks_for
from launcher.errors import HostError, InternalError, UsageError
from launcher.executor.base import KVCacheSpec

SHARED_FIELDS = ("block_size", "max_model_len", "vocab_size", "eos_token_ids")
"""Must be equal on all ranks. `bytes_per_block` need not: pipeline stages hold different numbers of layers."""


def agree(specs: Sequence[KVCacheSpec]) -> KVCacheSpec:
    """Rank 0's spec, once every rank says the same. `InternalError` names the ranks that differ."""
    first = specs[0]
    for rank, spec in enumerate(specs):
        for field in SHARED_FIELDS:
            if getattr(spec, field) != getattr(first, field):
                raise InternalError(
                    f"the workers disagree: {field} is {getattr(first, field)} on rank 0 "
                    f"and {getattr(spec, field)} on rank {rank}"
                )
        for field in ("bytes_per_block", "block_size", "max_model_len", "vocab_size"):
            if getattr(spec, field) < 1:
                raise InternalError(f"rank {rank}'s kv_cache_spec() says {field}={getattr(spec, field)}")
    return first


def decide_model_len(asked: int | None, spec: KVCacheSpec) -> int:
    """Tokens of the longest sequence served: as asked, at most the model's. `UsageError` when more was asked."""
    if asked is None:
        return spec.max_model_len
    if asked > spec.max_model_len:
        raise UsageError(
            f"--max-model-len {asked} is more than this model's {spec.max_model_len}; give at most {spec.max_model_len}"
        )
    if asked < 2:
        raise UsageError(f"--max-model-len {asked} has no room for a prompt and a token of output; give at least 2")
    return asked


def decide_num_blocks(
    specs: Sequence[KVCacheSpec], available: Sequence[int], max_model_len: int, max_num_seqs: int
) -> int:
    """Blocks on every rank: what the smallest rank can hold, and no more than all slots together can ever fill.

    `available`: bytes per rank. `HostError` when one sequence of `max_model_len` tokens would not fit: the length is
    never reduced behind the user's back.
    """
    holds = [size // spec.bytes_per_block for spec, size in zip(specs, available, strict=True)]
    smallest = min(range(len(holds)), key=holds.__getitem__)
    spec, blocks = specs[smallest], holds[smallest]
    needed = blocks_for(max_model_len, spec.block_size)
    if blocks < needed:
        fits = blocks * spec.block_size
        lower = f"lower --max-model-len to at most {fits} or " if fits >= 2 else ""
        raise HostError(
            f"KV cache too small: a sequence of {max_model_len} tokens needs {needed} blocks x {spec.bytes_per_block} "
            f"bytes = {needed * spec.bytes_per_block} bytes, and rank {smallest} has {available[smallest]} bytes "
            f"available ({blocks} blocks, {fits} tokens); {lower}give more bytes with --kv-cache-memory"
        )
    return min(blocks, max_num_seqs * needed)
