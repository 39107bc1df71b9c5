"""The sampler: distributions, truncation, penalties, masks, logprobs; noise depends on (seed, position) alone."""

from __future__ import annotations

import math
import struct
from collections import Counter
from typing import Any

import pytest
import torch

from launcher.models.sampler import Row, sample, uniform
from launcher.worker.step import SamplingParams

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


def draw(logits: torch.Tensor, count: int, *, seed: int = 0, **params: Any) -> Counter[int]:
    chosen = SamplingParams(seed=seed, **params)
    return Counter(sample(logits[None], [Row(chosen, position)])[0][0] for position in range(count))


def test_noise_is_uniform_and_depends_on_both() -> None:
    noise = [uniform(7, position) for position in range(4000)]
    assert all(0 <= u < 1 for u in noise)
    assert abs(sum(noise) / len(noise) - 0.5) < 0.02
    assert len(set(noise)) == len(noise)
    assert uniform(7, 3) == uniform(7, 3) != uniform(8, 3)
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


def test_greedy() -> None:
    assert draw(LOGITS, 5, temperature=0) == {1: 5}
    assert draw(LOGITS, 5, temperature=1, top_k=1) == {1: 5}


def test_frequencies_follow_the_distribution() -> None:
    count = 4000
    for temperature in (0.7, 1.0, 2.0):
        probs = torch.softmax(LOGITS / temperature, -1).tolist()
        found = draw(LOGITS, count, temperature=temperature)
        for token, prob in enumerate(probs):
            assert abs(found[token] / count - prob) < 4 * math.sqrt(prob * (1 - prob) / count) + 1e-3


def test_top_k_and_top_p_leave_only_the_best() -> None:
    assert set(draw(LOGITS, 500, top_k=2)) == {1, 3}
    # Probabilities: 1 → 0.63, 3 → 0.23, 2 → 0.086
    assert set(draw(LOGITS, 500, top_p=0.5)) == {1}
    assert set(draw(LOGITS, 500, top_p=0.7)) == {1, 3}
    assert set(draw(LOGITS, 500, top_p=0.9)) == {1, 2, 3}
    assert set(draw(LOGITS, 50, top_p=0.0)) == {1}
    # top-p is over what top-k has left: of two tokens the first has 0.73.
    assert set(draw(LOGITS, 500, top_k=2, top_p=0.7)) == {1}


def test_top_p_over_a_flat_vocabulary_looks_further() -> None:
    flat = torch.zeros(1000)
    found = draw(flat, 400, top_p=0.9)
    assert len(found) > 200


def test_a_row_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(16, 500, generator=generator) * 3
    rows = [
        Row(
            SamplingParams(temperature=0.5 + i % 3, top_p=1 - 0.03 * i, top_k=[0, 50][i % 2], seed=i, logprobs=2),
            10 + i,
        )
        for i in range(16)
    ]
    together, logprobs = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [row]) for i, row in enumerate(rows)]
    assert together == [tokens[0] for tokens, _ in alone]
    assert list(logprobs) == [found[0] for _, found in alone]
    backwards, _ = sample(logits.flip(0), rows[::-1])
    assert together == backwards[::-1]


def test_penalties_lower_what_was_said() -> None:
    params = SamplingParams(temperature=0, presence_penalty=1.5)
    assert sample(LOGITS[None], [Row(params, 5, [1])])[0] == [3]
    params = SamplingParams(temperature=0, frequency_penalty=0.6)
    assert sample(LOGITS[None], [Row(params, 5, [1])])[0] == [1]
    assert sample(LOGITS[None], [Row(params, 5, [1, 1])])[0] == [3]
    assert LOGITS.tolist() == [0.0, 3.0, 1.0, 2.0, -1.0]


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_grammar_mask_is_obeyed(temperature: float) -> None:
    mask = bytes([0b00010101])  # tokens 0, 2, 4
    found = {
        sample(LOGITS[None], [Row(SamplingParams(temperature=temperature), p, (), mask)])[0][0] for p in range(300)
    }
    assert found <= {0, 2, 4}
    assert 2 in found


def test_logprobs_are_of_the_raw_distribution() -> None:
    params = SamplingParams(temperature=0, logprobs=2, presence_penalty=2)
    tokens, (found, none) = sample(LOGITS.repeat(2, 1), [Row(params, 5, [1]), Row(SamplingParams(temperature=0), 5)])
    assert tokens == [3, 1]
    assert none is None
    assert found is not None
    assert struct.unpack("<3i", found.ids) == (3, 1, 3)
    expected = torch.log_softmax(LOGITS, -1)
    assert struct.unpack("<3f", found.values) == pytest.approx([float(expected[i]) for i in (3, 1, 3)])
    assert found.rank == 1


def test_bfloat16_logits() -> None:
    assert sample(LOGITS.bfloat16()[None], [Row(SamplingParams(temperature=0), 0)]) == ([1], ())
