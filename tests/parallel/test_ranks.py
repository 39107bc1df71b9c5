"""Rank arithmetic, for every layout of at most 16 ranks."""

from __future__ import annotations

import itertools

import pytest

from launcher.errors import UsageError
from launcher.parallel.ranks import GROUP_KINDS, Coordinates, GroupKind, Layout

LAYOUTS = [
    Layout(external_dp=e, dp=d, pp=p, pcp=c, tp=t, dcp=k)
    for e, d, p, c, t in itertools.product(range(1, 17), repeat=5)
    if e * d * p * c * t <= 16
    for k in range(1, t + 1)
    if t % k == 0
]


def test_the_articles_lists() -> None:
    layout = Layout(tp=2, pp=4)
    assert layout.world_size == 8
    assert layout.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("pp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout.groups("dp") == [[r] for r in range(8)]
    assert layout.groups("ep") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.output_rank == 6


def test_data_parallel_lists() -> None:
    layout = Layout(tp=2, pp=2, dp=2, dcp=2)
    assert layout.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.groups("pp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("ep") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert layout.groups("dcp") == [[0, 1], [2, 3], [4, 5], [6, 7]]


def sizes(layout: Layout) -> dict[GroupKind, int]:
    experts = layout.dp * layout.pcp * layout.tp
    return {
        "tp": layout.tp,
        "pcp": layout.pcp,
        "pp": layout.pp,
        "dp": layout.dp,
        "ep": experts,
        "eplb": experts,
        "dcp": layout.dcp,
    }


def test_every_layout() -> None:
    assert len(LAYOUTS) > 400
    for layout in LAYOUTS:
        world = range(layout.world_size)
        assert [layout.rank(layout.coordinates(rank)) for rank in world] == list(world)
        for kind in GROUP_KINDS:
            groups = layout.groups(kind)
            assert sorted(itertools.chain(*groups)) == list(world), (layout, kind)
            assert {len(group) for group in groups} == {sizes(layout)[kind]}, (layout, kind)
            assert all(group == sorted(group) for group in groups)
            assert groups == sorted(groups)
        assert all(rank in layout.group_of("ep", rank) for rank in world)
        at = layout.coordinates(layout.output_rank)
        assert at == Coordinates(0, 0, layout.pp - 1, 0, 0)


def test_members_differ_only_along_their_axis() -> None:
    for layout in LAYOUTS:
        for axis in ("tp", "pcp", "pp", "dp"):
            for group in layout.groups(axis):  # type: ignore[arg-type]
                places = [layout.coordinates(rank) for rank in group]
                assert [getattr(p, axis) for p in places] == list(range(len(group)))
                assert len({p._replace(**{axis: 0}) for p in places}) == 1


@pytest.mark.parametrize(
    ("sizes", "words"),
    [({"tp": 0}, "tp size is 0"), ({"pp": -1}, "pp size is -1"), ({"tp": 4, "dcp": 3}, "dcp size 3 does not divide")],
)
def test_impossible_sizes(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Layout(**sizes)


@pytest.mark.parametrize("rank", [-1, 8])
def test_ranks_outside_the_world(rank: int) -> None:
    with pytest.raises(ValueError, match="is not within"):
        Layout(tp=2, pp=4).coordinates(rank)
