from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from launcher.ipc.extents import Extents


@given(st.lists(st.one_of(st.integers(1, 40), st.integers(-40, -1)), max_size=60))
def test_never_overlaps_and_merges(steps: list[int]) -> None:
    """Positive: take so much; negative: give back one of those that are out."""
    space = Extents(100, 200)
    out: list[tuple[int, int]] = []
    for step in steps:
        if step > 0:
            start = space.take(step)
            if start is None:
                assert all(length < step for _, length in space.free)
                continue
            out.append((start, step))
        elif out:
            space.give(*out.pop(-step % len(out)))
        pieces = sorted([*out, *space.free])
        assert pieces[0][0] == 100
        assert sum(size for _, size in pieces) == 200
        assert all(a[0] + a[1] == b[0] for a, b in pairwise(pieces))
        gaps = space.free
        assert all(a[0] + a[1] < b[0] for a, b in pairwise(gaps)), "neighbours are merged"
    while out:
        space.give(*out.pop())
    assert space.free == [(100, 200)]


def test_first_fit_is_the_lowest() -> None:
    space = Extents(0, 100)
    assert [space.take(10) for _ in range(3)] == [0, 10, 20]
    space.give(0, 10)
    assert space.take(11) == 30
    assert space.take(5) == 0
