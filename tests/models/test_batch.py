"""A step as flat columns."""

from __future__ import annotations

from launcher.models.batch import Chunk, Sample, build
from launcher.worker.slots import Scheduled, Slot
from launcher.worker.step import NewRequest, SamplingParams, pack


def slot(tokens: list[int], blocks: list[int]) -> Slot:
    return Slot(NewRequest(0, pack(tokens), len(tokens), pack(blocks), 0, SamplingParams()))


def test_decodes_come_first_and_samples_stay_in_order() -> None:
    slots = {
        4: slot([10, 11, 12, 13, 14, 15], [7, 2]),
        1: slot([20, 21, 22, 23, 24], [5, 0]),
        2: slot([30], [6]),
    }
    rows = [Scheduled(4, 1, 4, False), Scheduled(1, 4, 1, True), Scheduled(2, 0, 1, True)]
    batch = build(rows, slots, block_size=4)
    assert batch.token_ids == [24, 30, 11, 12, 13, 14]
    assert batch.positions == [4, 0, 1, 2, 3, 4]
    assert batch.places == [0, 24, 29, 30, 31, 8]
    assert batch.decodes == [Chunk(0, 1, 5, [5, 0]), Chunk(1, 1, 1, [6])]
    assert batch.prefills == [Chunk(2, 4, 5, [7, 2])]
    assert batch.samples == [Sample(1, 0), Sample(2, 1)]
    assert batch.tables() == [[5, 0], [6, 0]]


def test_blocks_held_ahead_are_not_read() -> None:
    batch = build([Scheduled(0, 0, 2, True)], {0: slot([1, 2, 3], [4, 9, 3])}, block_size=2)
    assert batch.prefills == [Chunk(0, 2, 2, [4])]
    assert batch.samples == [Sample(0, 1)]
    assert batch.tables() == []
