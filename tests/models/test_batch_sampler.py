"""All rows at once choose what a row at a time chooses."""

from __future__ import annotations

import itertools
import struct

import pytest
import torch

from launcher.models import batch_sampler, sampler
from launcher.models.sampler import Row
from launcher.worker.step import SamplingParams

SIZE = 500


def some_logits(count: int) -> torch.Tensor:
    return torch.randn(count, SIZE, generator=torch.Generator().manual_seed(1)) * 3


def some_rows() -> list[Row]:
    """Every combination of greedy and drawn, cut and whole, penalised, masked, with logprobs."""
    rows = []
    choices = itertools.product((0.0, 0.7), (0, 1, 40, SIZE), (1.0, 0.8), (False, True), (False, True), (-1, 0, 3))
    for i, (temperature, top_k, top_p, penalised, masked, logprobs) in enumerate(choices):
        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=i,
            logprobs=logprobs,
            presence_penalty=0.5 if penalised else 0.0,
            frequency_penalty=0.25 if penalised else 0.0,
        )
        mask = bytes([0b01010101] * 30 + [0] * 33) if masked else None
        rows.append(Row(params, 10 + i, [3, 3, 7, i % SIZE], mask))
    return rows


def test_as_a_row_at_a_time() -> None:
    rows = some_rows()
    logits = some_logits(len(rows))
    tokens, logprobs = batch_sampler.sample(logits, rows)
    expected, expected_logprobs = sampler.sample(logits, rows)
    assert tokens == expected
    for found, wanted in zip(logprobs, expected_logprobs, strict=True):
        assert (found is None) == (wanted is None)
        if found is None or wanted is None:
            continue
        assert (found.ids, found.rank) == (wanted.ids, wanted.rank)
        count = len(wanted.ids) // 4
        assert struct.unpack(f"<{count}f", found.values) == pytest.approx(struct.unpack(f"<{count}f", wanted.values))


def test_a_row_does_not_depend_on_its_batch() -> None:
    rows = some_rows()
    logits = some_logits(len(rows)).bfloat16()  # many equal ones
    together, _ = batch_sampler.sample(logits, rows)
    assert together == [batch_sampler.sample(logits[i : i + 1], [row])[0][0] for i, row in enumerate(rows)]


def test_plain_rows_and_no_logprobs() -> None:
    logits = some_logits(3)
    assert batch_sampler.sample(logits, [Row(SamplingParams(temperature=0), 0)] * 3) == (logits.argmax(-1).tolist(), ())
    assert batch_sampler.sample(logits, [Row(SamplingParams(temperature=1, top_p=0.0), 0)] * 3)[0] == (
        logits.argmax(-1).tolist()
    )
