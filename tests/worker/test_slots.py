"""The slot table: every kind of change, their order, and plans that cannot be."""

from __future__ import annotations

import pytest

from launcher.errors import InternalError
from launcher.worker.slots import Scheduled, SlotTable
from launcher.worker.step import NewRequest, SamplingParams, StepPlan, pack


def request(
    slot: int, tokens: list[int], blocks: list[int], prompt_len: int | None = None, computed: int = 0
) -> NewRequest:
    length = len(tokens) if prompt_len is None else prompt_len
    return NewRequest(slot, pack(tokens), length, pack(blocks), computed, SamplingParams())


def test_prompt_in_chunks_then_decode() -> None:
    table = SlotTable(block_size=4)
    plan = StepPlan(
        step=0, slots=pack([3]), num_tokens=pack([4]), sample=bytes([0]), new=(request(3, [1, 2, 3, 4, 5, 6], [9]),)
    )
    assert table.apply(plan) == [Scheduled(3, 0, 4, False)]
    plan = StepPlan(
        step=1, slots=pack([3]), num_tokens=pack([2]), sample=bytes([1]), block_slots=pack([3]), block_ids=pack([7])
    )
    assert table.apply(plan) == [Scheduled(3, 4, 2, True)]
    plan = StepPlan(
        step=2, slots=pack([3]), num_tokens=pack([1]), sample=bytes([1]), token_slots=pack([3]), tokens=pack([42])
    )
    assert table.apply(plan) == [Scheduled(3, 6, 1, True)]
    slot = table.slots[3]
    assert (slot.token_ids, slot.block_ids, slot.num_computed) == ([1, 2, 3, 4, 5, 6, 42], [9, 7], 7)
    assert slot.output_ids == [42]


def test_freed_comes_before_new() -> None:
    table = SlotTable()
    table.apply(StepPlan(step=0, new=(request(0, [1], []),)))
    table.apply(StepPlan(step=1, freed=pack([0]), new=(request(0, [5, 6, 7], [1], prompt_len=1, computed=2),)))
    assert table.slots[0].output_ids == [6, 7]
    assert table.slots[0].num_computed == 2


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (StepPlan(step=5, freed=pack([1])), "step 5 frees slot 1, which is empty"),
        (StepPlan(step=5, new=(request(0, [1], []),)), "fills slot 0, which is taken"),
        (StepPlan(step=5, block_slots=pack([2]), block_ids=pack([0])), "gives a block to slot 2"),
        (StepPlan(step=5, token_slots=pack([2]), tokens=pack([0])), "gives a token to slot 2"),
        (StepPlan(step=5, slots=pack([2]), num_tokens=pack([1]), sample=b"\0"), "schedules slot 2"),
        (StepPlan(step=5, slots=pack([0]), num_tokens=pack([4]), sample=b"\0"), "only 3 are known"),
        (
            StepPlan(
                step=5,
                slots=pack([0]),
                num_tokens=pack([3]),
                sample=b"\0",
                token_slots=pack([0, 0]),
                tokens=pack([1, 1]),
            ),
            "it has 1 blocks",
        ),
    ],
)
def test_impossible_plans(plan: StepPlan, words: str) -> None:
    table = SlotTable(block_size=2)
    table.apply(StepPlan(step=0, new=(request(0, [1, 2, 3], [4]),)))
    with pytest.raises(InternalError, match=words):
        table.apply(plan)
