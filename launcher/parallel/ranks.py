"""Which ranks belong together: pure arithmetic, no torch, no I/O.

The world is a grid ``ExternalDP x DP x PP x PCP x TP``, numbered with TP fastest: neighbouring ranks, which share the
fastest links, are of one TP group. A group of a kind holds the ranks that differ only along that kind's axes::

    TP = 2, PP = 4 on 8 ranks                 kind   axes that vary
      tp   [[0,1],[2,3],[4,5],[6,7]]          tp     TP
      pp   [[0,2,4,6],[1,3,5,7]]              pcp    PCP                 (prefill context parallel)
                                              pp     PP
                                              dp     DP
                                              ep     DP, PCP, TP         (experts are spread over all of them)
                                              eplb   as ep               (its own group: it moves weights meanwhile)
                                              dcp    TP, in runs of `dcp` ranks   (decode context parallel)

Every rank is in exactly one group of each kind; ranks within a group, and groups within a kind, ascend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from launcher.errors import UsageError

GroupKind = Literal["tp", "pcp", "pp", "dp", "ep", "eplb", "dcp"]
GROUP_KINDS: tuple[GroupKind, ...] = get_args(GroupKind)

_AXES = ("external_dp", "dp", "pp", "pcp", "tp")
_VARY: dict[GroupKind, frozenset[str]] = {
    "tp": frozenset({"tp"}),
    "pcp": frozenset({"pcp"}),
    "pp": frozenset({"pp"}),
    "dp": frozenset({"dp"}),
    "ep": frozenset({"dp", "pcp", "tp"}),
    "eplb": frozenset({"dp", "pcp", "tp"}),
}


class Coordinates(NamedTuple):
    """Where a rank stands on each axis."""

    external_dp: int
    dp: int
    pp: int
    pcp: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The size of each axis. Raises UsageError on sizes that cannot be."""

    external_dp: int = 1
    dp: int = 1
    pp: int = 1
    pcp: int = 1
    tp: int = 1
    dcp: int = 1

    def __post_init__(self) -> None:
        for axis in (*_AXES, "dcp"):
            if getattr(self, axis) < 1:
                raise UsageError(f"{axis} size is {getattr(self, axis)}: must be 1 or more")
        if self.tp % self.dcp:
            raise UsageError(f"dcp size {self.dcp} does not divide tp size {self.tp}: it splits each TP group evenly")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in _AXES)

    @property
    def world_size(self) -> int:
        return math.prod(self.shape)

    def coordinates(self, rank: int) -> Coordinates:
        """Raises ValueError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not within 0 … {self.world_size - 1}")
        found = []
        for size in reversed(self.shape):
            rank, at = divmod(rank, size)
            found.append(at)
        return Coordinates(*reversed(found))

    def rank(self, at: Coordinates) -> int:
        number = 0
        for size, index in zip(self.shape, at, strict=True):
            number = number * size + index
        return number

    def groups(self, kind: GroupKind) -> list[list[int]]:
        """All groups of a kind, as lists of ranks."""
        if kind == "dcp":
            return [tp[i : i + self.dcp] for tp in self.groups("tp") for i in range(0, self.tp, self.dcp)]
        vary = _VARY[kind]
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            key = tuple(index for axis, index in zip(_AXES, at, strict=True) if axis not in vary)
            members.setdefault(key, []).append(rank)
        return list(members.values())

    def group_of(self, kind: GroupKind, rank: int) -> list[int]:
        """The one group of `kind` that `rank` is in."""
        return next(group for group in self.groups(kind) if rank in group)

    @property
    def output_rank(self) -> int:
        """The rank whose answer counts: the first TP rank of the last PP stage (of the first replica)."""
        return self.rank(Coordinates(0, 0, self.pp - 1, 0, 0))
