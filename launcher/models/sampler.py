"""Choose the next token of each row. Runs on the output rank only; the others learn the tokens from the next plan.

A row's token depends on its logits, its parameters, its output so far, and the noise, which is a function of
(seed, position) alone: not of the batch, the rank, the device or the number of draws before. So a replay after a crash
or a preemption draws the same tokens.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from launcher.worker.step import SamplingParams, TokenLogprobs

_CANDIDATES = 128
"""How many of the best tokens a top-p cut looks at first; eight times more until they hold enough of the mass."""


class Row(NamedTuple):
    """One row of the logits."""

    params: SamplingParams
    position: int
    """Place in the sequence of the token to be chosen."""
    output_ids: Sequence[int] = ()
    """Generated so far, for the penalties; may be left out when there are none."""
    mask: bytes | None = None
    """Grammar: bit i of byte j allows token 8j + i."""


Chosen = tuple[list[int], tuple[TokenLogprobs | None, ...]]
"""Tokens, and logprobs: empty when no row asks."""


def uniform(seed: int, position: int) -> float:
    """In [0, 1): the noise."""
    digest = hashlib.blake2b(struct.pack("<Qq", seed & (2**64 - 1), position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> tuple[list[int], tuple[TokenLogprobs | None, ...]]:
    """`logits` ``[S, V]``, as the model gave them. Tokens, and logprobs (empty when no row asks)."""
    raw = logits.float()
    if all(is_plain(row) for row in rows):
        tokens = raw.argmax(-1).tolist()
    else:
        tokens = [_choose(raw[i], row) for i, row in enumerate(rows)]
    if all(row.params.logprobs < 0 for row in rows):
        return tokens, ()
    return tokens, tuple(
        _logprobs(raw[i], tokens[i], row.params.logprobs) if row.params.logprobs >= 0 else None
        for i, row in enumerate(rows)
    )


def is_plain(row: Row) -> bool:
    params = row.params
    return params.temperature <= 0 and row.mask is None and not params.presence_penalty and not params.frequency_penalty


def _choose(logits: torch.Tensor, row: Row) -> int:
    """`logits` ``[V]``."""
    params = row.params
    if row.mask is not None:
        logits = logits.masked_fill(~_allowed(row.mask, logits), -math.inf)
    if (params.presence_penalty or params.frequency_penalty) and row.output_ids:
        logits = _penalised(logits, row)
    if params.temperature <= 0 or params.top_k == 1:
        return int(logits.argmax())
    noise = uniform(params.seed, row.position)
    scaled = logits.double() / params.temperature
    size = scaled.numel()
    kept = params.top_k if 0 < params.top_k < size else size
    if kept == size and params.top_p >= 1:
        return _invert(torch.softmax(scaled, -1), noise)
    probs, ids = _best(scaled, kept, params.top_p)
    return int(ids[_invert(probs, noise)])


def _best(scaled: torch.Tensor, kept: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and ids of the tokens that top-k, then top-p leave, in falling order (not normalised)."""
    size = scaled.numel()
    count = kept if kept < size else min(size, _CANDIDATES)
    while True:
        values, ids = torch.topk(scaled, count)
        mass = torch.logsumexp(values if kept < size else scaled, -1)
        probs = torch.exp(values - mass)
        if top_p >= 1:
            return probs, ids
        before = probs.cumsum(-1) - probs
        inside = int((before < top_p).sum())
        if inside < count or count >= kept:
            inside = max(inside, 1)
            return probs[:inside], ids[:inside]
        count = min(kept, count * 8)


def _invert(probs: torch.Tensor, noise: float) -> int:
    """The index at which the cumulated mass passes `noise`."""
    mass = probs.cumsum(-1)
    total = float(mass[-1])
    # A product that rounds up to the total would point past the end.
    wanted = min(noise * total, math.nextafter(total, 0.0))
    return int(torch.searchsorted(mass, wanted, right=True))


def _penalised(logits: torch.Tensor, row: Row) -> torch.Tensor:
    counts = Counter(row.output_ids)
    ids = torch.tensor(list(counts), device=logits.device)
    times = torch.tensor(list(counts.values()), device=logits.device, dtype=logits.dtype)
    logits = logits.clone()
    logits[ids] -= row.params.presence_penalty + row.params.frequency_penalty * times
    return logits


def _allowed(mask: bytes, logits: torch.Tensor) -> torch.Tensor:
    """[V] bool"""
    packed = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
    bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.view(-1)[: logits.numel()].bool().to(logits.device)


def _logprobs(logits: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    values = torch.log_softmax(logits, -1)
    best, ids = torch.topk(values, min(count, values.numel()))
    own = float(values[token])
    return TokenLogprobs(
        ids=struct.pack(f"<{1 + len(ids)}i", token, *ids.tolist()),
        values=struct.pack(f"<{1 + len(ids)}f", own, *best.tolist()),
        rank=int((values > values[token]).sum()),
    )
