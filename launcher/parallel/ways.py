"""Which way an all-reduce on GPUs takes, by its size: arithmetic, no torch.

=========  ===========================================================================================================
way        what it does
=========  ===========================================================================================================
one_shot   every rank reads everybody's whole tensor and adds: one meeting, `size` times the reading
two_shot   every rank adds up its own part of it and hands the sums out: two meetings, less reading
nccl       the library's own
=========  ===========================================================================================================

A `Table` holds borders in ascending order: a tensor goes the way of the first border that it does not exceed, and by
NCCL beyond the last. All ranks of a group must have the same table: one that goes another way would wait for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Way = Literal["nccl", "one_shot", "two_shot"]
OWN_WAYS: tuple[Way, ...] = ("one_shot", "two_shot")
Table = tuple[tuple[int, Way], ...]

KIB, MIB = 1 << 10, 1 << 20
BORDERS = (8 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
"""Where the ways are compared; bytes."""
CAPACITY = BORDERS[-1]
"""Bytes of the symmetric buffer."""
GRAIN = 16
"""The kernels move so many bytes at a time: a tensor of another length goes by NCCL."""
SIZES = (2, 4, 8)
"""Group sizes for which the kernels add in rank order on every rank; others' sums would differ in the last bit."""
_CLEAR_WIN = 0.95
"""Of NCCL's time, at most, for another way to be taken: what is measured in milliseconds at a start is not exact."""

DEFAULT: Mapping[int, Table] = {
    # Measured on 2 and 4 cards, NVLink all to all (one-shot and two-shot of 16 MiB win by less than the two copies to
    # and from the symmetric buffer cost).
    2: ((64 * KIB, "one_shot"), (4 * MIB, "two_shot")),
    4: ((64 * KIB, "one_shot"), (4 * MIB, "two_shot")),
}
"""By the group's size; for others: all by NCCL, unless measured at the start."""


def choose(size: int, table: Table) -> Way:
    """The way of a tensor of `size` bytes."""
    if size % GRAIN or size == 0:
        return "nccl"
    return next((way for border, way in table if size <= border), "nccl")


class Timing(NamedTuple):
    """Microseconds of one all-reduce of `size` bytes by each way, copies to and from the symmetric buffer included."""

    size: int
    by_way: Mapping[Way, float]


def fastest(timing: Timing) -> Way:
    best = min(OWN_WAYS, key=lambda way: timing.by_way[way])
    return best if timing.by_way[best] <= _CLEAR_WIN * timing.by_way["nccl"] else "nccl"


def table_of(timings: Sequence[Timing]) -> Table:
    """The borders at which the fastest way changes; beyond the largest size measured, NCCL."""
    steps: list[tuple[int, Way]] = []
    for timing in sorted(timings):
        way = fastest(timing)
        if steps and steps[-1][1] == way:
            steps.pop()
        steps.append((timing.size, way))
    while steps and steps[-1][1] == "nccl":
        steps.pop()
    return tuple(steps)


def shown(table: Table) -> str:
    """``one-shot to 64 KiB, two-shot to 4 MiB, then NCCL``"""
    names = {"one_shot": "one-shot", "two_shot": "two-shot", "nccl": "NCCL"}
    steps = [f"{names[way]} to {_bytes(border)}" for border, way in table]
    return ", ".join([*steps, "then NCCL"]) if steps else "all by NCCL"


def _bytes(size: int) -> str:
    return f"{size // MIB} MiB" if size % MIB == 0 else f"{size / KIB:g} KiB"


def trial_sizes() -> list[int]:
    """Bytes to try each way with: one grain, and around every border where the buffer has room."""
    around = {GRAIN} | {border + step for border in BORDERS for step in (-GRAIN, 0, GRAIN)}
    return sorted(size for size in around if size <= CAPACITY)
