"""The way of a tensor by its size: every border, both sides; tables from timings."""

from __future__ import annotations

import random

import pytest

from launcher.parallel.ways import (
    BORDERS,
    CAPACITY,
    DEFAULT,
    GRAIN,
    SIZES,
    Table,
    Timing,
    choose,
    fastest,
    shown,
    table_of,
    trial_sizes,
)

KIB, MIB = 1 << 10, 1 << 20
FOUR_CARDS = {
    8 * KIB: (12.4, 7.8, 7.4),
    64 * KIB: (14.8, 9.2, 10.2),
    256 * KIB: (15.5, 11.0, 9.3),
    MIB: (20.8, 18.6, 12.8),
    4 * MIB: (42.1, 48.8, 28.5),
    16 * MIB: (95.7, 166.7, 91.8),
}


def timings(each: dict[int, tuple[float, float, float]]) -> list[Timing]:
    names = ("nccl", "one_shot", "two_shot")
    return [Timing(size, dict(zip(names, times, strict=True))) for size, times in each.items()]  # type: ignore[arg-type]


@pytest.mark.parametrize("size", SIZES)
def test_both_sides_of_every_border(size: int) -> None:
    table = DEFAULT.get(size, ())
    for number, (border, way) in enumerate(table):
        after = table[number + 1][1] if number + 1 < len(table) else "nccl"
        assert choose(border - GRAIN, table) == choose(border, table) == way
        assert choose(border + GRAIN, table) == after
    assert choose(CAPACITY + GRAIN, table) == "nccl"


@pytest.mark.parametrize("size", [0, 4, 8, 15, 17, 8 * KIB + 2])
def test_what_is_no_whole_number_of_grains_goes_by_nccl(size: int) -> None:
    assert choose(size, DEFAULT[4]) == "nccl"


def test_borders_are_within_the_buffer_and_ascend() -> None:
    for table in (*DEFAULT.values(), tuple((border, "one_shot") for border in BORDERS)):
        borders = [border for border, _ in table]
        assert borders == sorted(set(borders))
        assert all(border <= CAPACITY and border % GRAIN == 0 for border in borders)
        assert set(borders) <= set(BORDERS)  # only there were they tried
    sizes = trial_sizes()
    assert sizes[0] == GRAIN
    assert sizes[-1] == CAPACITY
    assert {border - GRAIN for border in BORDERS} <= set(sizes)


def test_a_table_from_times() -> None:
    assert table_of(timings(FOUR_CARDS)) == (
        (8 * KIB, "two_shot"),
        (64 * KIB, "one_shot"),
        (4 * MIB, "two_shot"),
    )  # 16 MiB: 0.96 of NCCL's time is no clear win
    assert table_of([]) == ()
    assert table_of(timings(dict.fromkeys(BORDERS, (1.0, 2.0, 2.0)))) == ()
    assert table_of(timings(dict.fromkeys(BORDERS, (2.0, 1.0, 1.5)))) == ((CAPACITY, "one_shot"),)


def test_a_hole_in_the_middle_stays_one() -> None:
    table = table_of(timings({8 * KIB: (2.0, 1.0, 1.0), 64 * KIB: (1.0, 1.0, 1.0), MIB: (2.0, 3.0, 1.0)}))
    assert table == ((8 * KIB, "one_shot"), (64 * KIB, "nccl"), (MIB, "two_shot"))
    assert choose(32 * KIB, table) == "nccl"


def test_any_times_give_a_table_that_takes_the_fastest_way() -> None:
    numbers = random.Random(7)
    for _ in range(300):
        each = timings({size: tuple(numbers.uniform(1, 3) for _ in range(3)) for size in BORDERS})  # type: ignore[misc]
        numbers.shuffle(each)
        table = table_of(each)
        for timing in each:
            assert choose(timing.size, table) == fastest(timing)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ((), "all by NCCL"),
        (DEFAULT[4], "one-shot to 64 KiB, two-shot to 4 MiB, then NCCL"),
        (((8 * KIB, "one_shot"), (64 * KIB, "nccl"), (MIB, "two_shot")),
         "one-shot to 8 KiB, NCCL to 64 KiB, two-shot to 1 MiB, then NCCL"),
    ],
)  # fmt: skip
def test_words(table: Table, words: str) -> None:
    assert shown(table) == words
