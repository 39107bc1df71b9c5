"""A step's attention in one call per layer, for any mix of decodes and prompt chunks: the way on a GPU.

Queries are the token axis as it is. Keys and values of every sequence, old and new, are gathered from the paged cache
side by side; two lists of bounds tell the kernel where each sequence begins::

    queries  [a | b | c c c c]            bounds_q  0 1 2 6
    keys     [a a a | b b b b b | c …]    bounds_k  0 3 8 …

The kernel is torch's own variable-length attention (flash attention). It takes 16-bit types only, and what it does
with grouped heads and windows has changed between versions: it is tried on random numbers first (`find_kernel`), and
where it is not right the padded attention of `launcher.models.paged` stays.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from launcher.models.batch import Batch
from launcher.models.transfer import upload

if TYPE_CHECKING:
    from launcher.models.paged import LayerShape, PagedCache

Kernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int, "float | None"], torch.Tensor
]
"""(query [T, H, D], key [S, KV, D], value [S, KV, D], bounds_q [B + 1] int32, bounds_k [B + 1] int32, longest query,
longest key, window or 0, scale) → [T, H, D]; each sequence's queries are its last tokens, and look back only."""

_TOLERANCE = 0.03
"""Of results around one, in 16-bit types."""


class Packed:
    """Where everything is, as tensors on the device: made once a step, read by every layer."""

    def __init__(self, batch: Batch, block_size: int, device: torch.device, kernel: Kernel) -> None:
        chunks = [*batch.decodes, *batch.prefills]
        lengths, contexts = [c.length for c in chunks], [c.context for c in chunks]
        self._kernel = kernel
        self._longest_query, self._longest_key = max(lengths), max(contexts)
        self._fresh = lengths == contexts
        """All sequences start in this step: nothing need be read back."""
        ends, key_ends = list(accumulate(lengths, initial=0)), list(accumulate(contexts, initial=0))
        first_blocks = list(accumulate((len(c.blocks) for c in chunks), initial=0))[:-1]
        blocks = [block for chunk in chunks for block in chunk.blocks]
        bounds, sizes, firsts, table = upload([ends + key_ends, contexts, first_blocks, blocks], device)
        self._bounds, self._key_bounds = bounds.int().split(len(ends))
        self._places = torch.empty(0, dtype=torch.int64, device=device)
        if not self._fresh:
            sequence = torch.arange(len(chunks), device=device).repeat_interleave(sizes, output_size=key_ends[-1])
            at = torch.arange(key_ends[-1], device=device) - bounds[len(ends) :][sequence]
            self._places = table[firsts[sequence] + at // block_size] * block_size + at % block_size
            """[S]: the place in the cache of every token of every sequence."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedCache | None,
        layer: int,
        window: int,
        scaling: float | None,
    ) -> torch.Tensor:
        """As `paged.paged_attention` is given them; the cache holds the new ones already. → [T, H, D]"""
        queries = query[0].transpose(0, 1)
        if self._fresh or cache is None:  # without a cache a chunk sees itself alone: profiling
            keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
            bounds, longest = self._bounds, self._longest_query
        else:
            keys, values = (kept[layer].index_select(0, self._places) for kept in (cache.keys, cache.values))
            bounds, longest = self._key_bounds, self._longest_key
        return self._kernel(queries, keys, values, self._bounds, bounds, self._longest_query, longest, window, scaling)


def find_kernel(shapes: Iterable[LayerShape], dtype: torch.dtype, device: torch.device) -> tuple[Kernel | None, str]:
    """The kernel, if it is right here for layers of these shapes; else None and why."""
    if device.type != "cuda":
        return None, "not on a GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return None, f"{dtype} is not for it"
    try:
        kernel = _varlen()
    except ImportError as error:
        return None, str(error)
    for queries, heads, width, value_width in {(s.queries, s.heads, s.key_width, s.value_width) for s in shapes}:
        if width != value_width:
            return None, f"keys of {width} and values of {value_width}"
        try:
            wrong = _difference(kernel, queries, heads, width, dtype, device)
        except (RuntimeError, TypeError, ValueError) as error:
            return None, str(error).splitlines()[0]
        if not wrong < _TOLERANCE:
            return None, f"it is wrong by {wrong:.2g} here"
    return kernel, ""


def plain_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds_q: torch.Tensor,
    bounds_k: torch.Tensor,
    _longest_query: int,
    _longest_key: int,
    window: int,
    scale: float | None,
) -> torch.Tensor:
    """A `Kernel` written out, sequence by sequence in float32: what the fast one is compared with."""
    shared_by, found = query.shape[1] // key.shape[1], []
    ends_q, ends_k = bounds_q.tolist(), bounds_k.tolist()
    for q0, q1, k0, k1 in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        keys, values = (t[k0:k1].float().repeat_interleave(shared_by, 1) for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1].float(), keys)
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        ahead = (k1 - k0) - (q1 - q0)
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=query.device).tril(ahead)
        if window:
            seen = seen.triu(ahead - window + 1)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        found.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(found).to(query.dtype)


def _varlen() -> Kernel:
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    if "window_size" not in known or "scale" not in known:
        raise ImportError("this torch's varlen_attn has no windows or no scale")
    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}

    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bounds_q: torch.Tensor,
        bounds_k: torch.Tensor,
        longest_query: int,
        longest_key: int,
        window: int,
        scale: float | None,
    ) -> torch.Tensor:
        # A single query is the last token: nothing is ahead of it, and without a mask the kernel splits long contexts.
        sight = (window - 1, 0) if window else (-1, -1) if longest_query == 1 else (-1, 0)
        found = varlen_attn(
            query,
            key,
            value,
            bounds_q,
            bounds_k,
            longest_query,
            longest_key,
            scale=scale,
            window_size=sight,
            **options,
        )
        assert isinstance(found, torch.Tensor)
        return found

    return kernel


def _difference(
    kernel: Kernel, queries: int, heads: int, width: int, dtype: torch.dtype, device: torch.device
) -> float:
    """The largest one from `plain_kernel`: a mixed step, decodes alone, and both with a window."""
    generator = torch.Generator(device).manual_seed(0)
    worst = 0.0
    for lengths, contexts in (([1, 1, 5, 9], [3, 40, 12, 9]), ([1, 1, 1], [1, 19, 300])):
        query = torch.randn(sum(lengths), queries, width, generator=generator, device=device).to(dtype)
        key, value = (
            torch.randn(sum(contexts), heads, width, generator=generator, device=device).to(dtype) for _ in range(2)
        )
        bounds = [
            torch.tensor(list(accumulate(sizes, initial=0)), dtype=torch.int32, device=device)
            for sizes in (lengths, contexts)
        ]
        for window in (0, 7):
            found, expected = (
                by(query, key, value, bounds[0], bounds[1], max(lengths), max(contexts), window, None).float()
                for by in (kernel, plain_kernel)
            )
            worst = max(worst, float((found - expected).abs().max()))
    return worst
