"""Attention over a paged KV cache, as a transformers attention function (``xserve_paged``).

Layout, per layer: keys ``[blocks * block_size, KV heads, key width]``, values likewise; a token's *place* is
``block * block_size + offset``. One step is a flat token axis ``[1, T]``: decodes first, then prompt chunks
(`launcher.models.batch`).

transformers finds the function by name in a registry of its own; everything else hangs on the model: each attention
module carries its `PagedState`, so that several models may live in one process.

A model that hands its attention something unknown here (soft caps, sinks, biases) is refused, never run wrong.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from launcher.errors import UsageError
from launcher.models.batch import Batch, Chunk
from launcher.models.packed import Kernel, Packed
from launcher.models.transfer import upload

NAME = "xserve_paged"
_ATTRIBUTE = "xserve_state"

_UNDERSTOOD = frozenset(
    {"position_ids", "sliding_window", "is_causal", "use_cache", "cache_position", "output_attentions",
     "output_hidden_states", "output_router_logits", "past_key_values", "logits_to_keep", "position_embeddings"}
)  # fmt: skip
"""Keyword arguments that either change nothing here or are honoured. Any other one with a value is refused."""
_WORDS = {"softcap": "soft-capped attention scores", "s_aux": "attention sinks", "position_bias": "position biases"}


class LayerShape:
    """What one layer keeps per token on this rank, as seen by the probe."""

    def __init__(self, heads: int, key_width: int, value_width: int, queries: int) -> None:
        self.queries = queries
        """Heads of the queries."""
        self.heads = heads
        """Of keys and values."""
        self.key_width = key_width
        self.value_width = value_width

    @property
    def elements(self) -> int:
        return self.heads * (self.key_width + self.value_width)


class PagedCache:
    """Keys and values of all layers of this rank. `block_size` in tokens."""

    def __init__(
        self, shapes: dict[int, LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        tokens = num_blocks * block_size
        self.keys = {i: _zeros((tokens, s.heads, s.key_width), dtype, device) for i, s in shapes.items()}
        self.values = {i: _zeros((tokens, s.heads, s.value_width), dtype, device) for i, s in shapes.items()}


class Step:
    """A batch as tensors on the device: made once a step, read by every layer."""

    def __init__(
        self,
        batch: Batch,
        block_size: int,
        device: torch.device,
        wanted: Sequence[int] = (),
        kernel: Kernel | None = None,
    ) -> None:
        """`wanted`: places on the token axis whose logits are. With a `kernel` all sequences go through it at once."""
        token_ids, positions, self.places, self.wanted = upload(
            [batch.token_ids, batch.positions, batch.places, wanted], device
        )
        self.token_ids, self.positions = token_ids[None], positions[None]
        self.packed: Packed | None = None
        self.prefills: list[_Prefill] = []
        self.decodes: _Decodes | None = None
        if kernel is not None:
            self.packed = Packed(batch, block_size, device, kernel)
            return
        self.prefills = [_Prefill(chunk, device) for chunk in batch.prefills]
        if batch.decodes:
            self.decodes = _Decodes(batch, block_size, device)


class _Decodes:
    """B sequences of one new token each, padded to the longest."""

    def __init__(self, batch: Batch, block_size: int, device: torch.device) -> None:
        tables = torch.tensor(batch.tables(), device=device)
        self.count = len(batch.decodes)
        self.length = tables.shape[1] * block_size
        """M: padded context."""
        self.blocks = tables.view(-1)
        lengths = torch.tensor([chunk.context for chunk in batch.decodes], device=device)[:, None]
        at = torch.arange(self.length, device=device)
        self._before_end = at < lengths
        self._from_end = lengths - at
        self._masks: dict[int, torch.Tensor] = {0: self._before_end[:, None, None]}

    def mask(self, window: int) -> torch.Tensor:
        """[B, 1, 1, M], True = look. `window` 0: no window."""
        if window not in self._masks:
            self._masks[window] = (self._before_end & (self._from_end <= window))[:, None, None]
        return self._masks[window]


class _Prefill:
    def __init__(self, chunk: Chunk, device: torch.device) -> None:
        self.first, self.length, self.context, _ = chunk
        self.blocks = torch.tensor(chunk.blocks, device=device)
        self.device = device
        self.whole = chunk.length == chunk.context
        """The sequence starts in this chunk: its keys need not be read back."""
        self._masks: dict[int, torch.Tensor | None] = {0: None if self.whole else self._causal()}

    def _causal(self) -> torch.Tensor:
        ones = torch.ones(self.length, self.context, dtype=torch.bool, device=self.device)
        return ones.tril(self.context - self.length)

    def mask(self, window: int) -> torch.Tensor | None:
        """[length, context], True = look; None = plainly causal. `window` 0: no window."""
        if window >= self.context:
            window = 0
        if window not in self._masks:
            self._masks[window] = self._causal().triu(self.context - self.length - window + 1)
        return self._masks[window]


class PagedState:
    """What the attention modules of one model share: the step in progress, the cache, and what the probe saw."""

    def __init__(self) -> None:
        self.step: Step | None = None
        self.cache: PagedCache | None = None
        """None while probing or profiling: keys and values are used but not kept."""
        self.shapes: dict[int, LayerShape] = {}
        """Layer → what reached the attention function."""
        self.kernel: Kernel | None = None
        """For steps that are made for this state; None: padded attention by torch's scaled dot product."""


def install(model: torch.nn.Module) -> PagedState:
    """Give the model's attention modules a state of their own."""
    state = PagedState()
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            object.__setattr__(module, _ATTRIBUTE, state)
    return state


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001  (part of the signature that transformers calls)
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """query ``[1, H, T, D]``, key ``[1, KV, T, D]``, value ``[1, KV, T, Dv]``, rotated → ``[1, T, H, Dv]``."""
    state: PagedState | None = getattr(module, _ATTRIBUTE, None)
    if state is None or state.step is None:
        raise UsageError(f"{type(module).__name__} calls its attention in a way that this worker does not know")
    _refuse_unknown(module, attention_mask, rest)
    layer: int = module.layer_idx  # type: ignore[assignment]
    step, cache = state.step, state.cache
    if cache is None:
        state.shapes[layer] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1], query.shape[1])
    else:
        cache.keys[layer].index_copy_(0, step.places, key[0].transpose(0, 1))
        cache.values[layer].index_copy_(0, step.places, value[0].transpose(0, 1))
    window = rest.get("sliding_window") or 0
    if step.packed is not None:
        return step.packed.attend(query, key, value, cache, layer, window, scaling)[None], None
    found = []
    if step.decodes is not None:
        found.append(_decode(query, key, value, step.decodes, cache, layer, window, scaling))
    found += [_prefill(query, key, value, chunk, cache, layer, window, scaling) for chunk in step.prefills]
    return (found[0] if len(found) == 1 else torch.cat(found))[None], None


AttentionInterface.register(NAME, paged_attention)


def _decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decodes: _Decodes,
    cache: PagedCache | None,
    layer: int,
    window: int,
    scaling: float | None,
) -> torch.Tensor:
    """All decodes in one padded call, the heads that share a KV head packed as its queries. → ``[B, H, Dv]``"""
    count, kv_heads = decodes.count, key.shape[1]
    heads, width = query.shape[1], query.shape[-1]
    packed = query[0, :, :count].transpose(0, 1).reshape(count, kv_heads, heads // kv_heads, width)
    if cache is None:  # profiling: each token looks at itself
        keys = key[0, :, :count].transpose(0, 1)[:, :, None]
        values = value[0, :, :count].transpose(0, 1)[:, :, None]
        mask = None
    else:
        keys = _gather(cache.keys[layer], decodes, cache.block_size)
        values = _gather(cache.values[layer], decodes, cache.block_size)
        mask = decodes.mask(window if window < decodes.length else 0)
    out = scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scaling)
    return out.reshape(count, heads, -1)


def _gather(cached: torch.Tensor, decodes: _Decodes, block_size: int) -> torch.Tensor:
    """Whole blocks, which is cheaper than single tokens. → ``[B, KV, M, D]``"""
    heads, width = cached.shape[1:]
    blocks = cached.view(-1, block_size, heads, width).index_select(0, decodes.blocks)
    return blocks.view(decodes.count, decodes.length, heads, width).transpose(1, 2)


def _prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    chunk: _Prefill,
    cache: PagedCache | None,
    layer: int,
    window: int,
    scaling: float | None,
) -> torch.Tensor:
    """One sequence's chunk against all of the sequence so far. → ``[length, H, Dv]``"""
    here = slice(chunk.first, chunk.first + chunk.length)
    if chunk.whole or cache is None:
        keys, values = key[:, :, here], value[:, :, here]
    else:
        keys = _sequence(cache.keys[layer], chunk, cache.block_size)
        values = _sequence(cache.values[layer], chunk, cache.block_size)
    shared_by = query.shape[1] // key.shape[1]
    if shared_by > 1:
        keys, values = keys.repeat_interleave(shared_by, 1), values.repeat_interleave(shared_by, 1)
    mask = chunk.mask(window)
    causal = mask is None and chunk.length > 1
    out = scaled_dot_product_attention(query[:, :, here], keys, values, mask, is_causal=causal, scale=scaling)
    return out[0].transpose(0, 1)


def _sequence(cached: torch.Tensor, chunk: _Prefill, block_size: int) -> torch.Tensor:
    """→ ``[1, KV, context, D]``"""
    heads, width = cached.shape[1:]
    blocks = cached.view(-1, block_size, heads, width).index_select(0, chunk.blocks)
    return blocks.view(-1, heads, width)[: chunk.context].transpose(0, 1)[None]


def _refuse_unknown(module: torch.nn.Module, mask: torch.Tensor | None, rest: dict[str, Any]) -> None:
    if mask is not None:
        raise UsageError(f"{type(module).__name__} brings an attention mask of its own, which this worker cannot apply")
    for name, given in rest.items():
        if given is not None and name not in _UNDERSTOOD:
            what = _WORDS.get(name, f"`{name}`")
            raise UsageError(f"{type(module).__name__} needs {what}, which this worker cannot do")
    if rest.get("is_causal") is False:
        raise UsageError(f"{type(module).__name__} is not causal, and this worker can only decode")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed, as stale NaNs would get through the masks. Host memory is taken only as it is used."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    count = 1
    for n in shape:
        count *= n
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
