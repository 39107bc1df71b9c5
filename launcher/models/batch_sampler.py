"""`launcher.models.sampler.sample` for all rows at once: the way on a GPU, where a row at a time is a wait at a time.

The same choice for the same row: the same noise, the same order of tokens (falling, by id among equals where a cut is
made; by id where none is), sums in float64. Every row is computed by itself, whatever else is in the batch.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence

import torch

from launcher.models.sampler import Row, is_plain, uniform
from launcher.models.transfer import download, upload, upload_bytes, upload_floats
from launcher.worker.step import TokenLogprobs


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> tuple[list[int], tuple[TokenLogprobs | None, ...]]:
    """`logits` ``[S, V]``, as the model gave them. Tokens, and logprobs (empty when no row asks)."""
    raw = logits.float()
    changed = raw if all(is_plain(row) for row in rows) else _penalised(_masked(raw, rows), rows)
    tokens = changed.argmax(-1)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0 and row.params.top_k != 1]
    cut = [i for i in drawn if _cuts(rows[i], raw.shape[-1])]
    whole = [i for i in drawn if not _cuts(rows[i], raw.shape[-1])]
    for which, draw in ((whole, _draw), (cut, _draw_of_best)):
        if which:
            [where] = upload([which], raw.device)
            tokens[where] = draw(changed[where], [rows[i] for i in which])
    asking = [i for i, row in enumerate(rows) if row.params.logprobs >= 0]
    if not asking:
        return download([tokens])[0].tolist(), ()
    return _with_logprobs(raw, tokens, rows, asking)


def _cuts(row: Row, size: int) -> bool:
    return 0 < row.params.top_k < size or row.params.top_p < 1


def _noise(rows: Sequence[Row]) -> list[float]:
    return [uniform(row.params.seed, row.position) for row in rows]


def _draw(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    temperature, noise = upload_floats([[row.params.temperature for row in rows], _noise(rows)], logits.device)
    return _invert(torch.softmax(logits.double() / temperature[:, None], -1), noise)


def _draw_of_best(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    size, device = logits.shape[-1], logits.device
    params = [row.params for row in rows]
    temperature, top_p, noise = upload_floats(
        [[p.temperature for p in params], [p.top_p for p in params], _noise(rows)], device
    )
    [top_k] = upload([[p.top_k if 0 < p.top_k < size else size for p in params]], device)
    values, ids = logits.sort(stable=True, dim=-1, descending=True)
    place = torch.arange(size, device=device)
    scaled = (values.double() / temperature[:, None]).masked_fill_(place >= top_k[:, None], -math.inf)
    probs = torch.softmax(scaled, -1)
    before = probs.cumsum(-1) - probs
    inside = (before < top_p[:, None]) | (top_p[:, None] >= 1) | (place == 0)
    chosen = _invert(probs * inside, noise)
    return ids.gather(-1, chosen[:, None])[:, 0]


def _invert(probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """[S]: the index at which each row's cumulated mass passes its noise."""
    mass = probs.cumsum(-1)
    total = mass[:, -1]
    # A product that rounds up to the total would point past the end.
    wanted = torch.minimum(noise * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(mass, wanted[:, None], right=True)[:, 0].clamp_(max=probs.shape[-1] - 1)


def _masked(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    masks = {i: row.mask for i, row in enumerate(rows) if row.mask is not None}
    if not masks:
        return logits
    [where] = upload([list(masks)], logits.device)
    packed = upload_bytes(b"".join(masks.values()), logits.device).view(len(masks), -1, 1)
    bits = (packed >> torch.arange(8, dtype=torch.uint8, device=logits.device)) & 1
    allowed = bits.flatten(1)[:, : logits.shape[-1]].bool()
    logits = logits.clone()
    logits[where] = logits[where].masked_fill(~allowed, -math.inf)
    return logits


def _penalised(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    places: list[int] = []
    ids: list[int] = []
    amounts: list[float] = []
    for i, row in enumerate(rows):
        presence, frequency = row.params.presence_penalty, row.params.frequency_penalty
        if presence or frequency:
            for token, times in Counter(row.output_ids).items():
                places.append(i)
                ids.append(token)
                amounts.append(presence + frequency * times)
    if not places:
        return logits
    where, which = upload([places, ids], logits.device)
    [less] = upload_floats([amounts], logits.device)
    logits = logits.clone()
    logits[where, which] -= less.float()
    return logits


def _with_logprobs(
    raw: torch.Tensor, tokens: torch.Tensor, rows: Sequence[Row], asking: Sequence[int]
) -> tuple[list[int], tuple[TokenLogprobs | None, ...]]:
    [where] = upload([asking], raw.device)
    values = torch.log_softmax(raw[where], -1)
    most = min(max(rows[i].params.logprobs for i in asking), raw.shape[-1])
    best, ids = torch.topk(values, most)
    own = values.gather(-1, tokens[where][:, None])
    ranks = (values > own).sum(-1)
    chosen, *told = download([tokens, best, ids, own[:, 0], ranks])
    found: list[TokenLogprobs | None] = [None] * len(rows)
    all_tokens: list[int] = chosen.tolist()
    for i, (best_of, ids_of, own_of, rank) in zip(asking, zip(*(t.tolist() for t in told), strict=True), strict=True):
        count = min(rows[i].params.logprobs, most)
        found[i] = TokenLogprobs(
            ids=struct.pack(f"<{1 + count}i", all_tokens[i], *ids_of[:count]),
            values=struct.pack(f"<{1 + count}f", own_of, *best_of[:count]),
            rank=rank,
        )
    return all_tokens, tuple(found)
