"""Whether a node that wants to join can ever fit this launch: pure, and in words that both sides print."""

from __future__ import annotations

from dataclasses import dataclass, field

from launcher.nodes.messages import PROTOCOL, Join, Member
from launcher.nodes.words import plain, ranks

_MAX_DIFFERENCES = 20
_ABSENT = "no such option"


@dataclass(frozen=True, slots=True)
class Ours:
    """What node 0 compares with."""

    member: Member
    nnodes: int
    version: str
    agreement: dict[str, str] = field(default_factory=dict)


def misfit(join: Join, ours: Ours) -> str:
    """Why these two can never be one launch; empty: they can. Names both sides' values."""
    who = f"node {join.node_rank} ({plain(join.host)})"
    node0 = f"node 0 ({ours.member.host})"
    if join.protocol != PROTOCOL or join.version != ours.version:
        theirs, mine = f"xserve {plain(join.version)}", f"xserve {ours.version}"
        if join.protocol != PROTOCOL:
            theirs, mine = f"{theirs} (protocol {join.protocol})", f"{mine} (protocol {PROTOCOL})"
        return f"{who} runs {theirs}, {node0} runs {mine}: install the same version on all nodes"
    if join.nnodes != ours.nnodes:
        return f"--nnodes: {who} has {join.nnodes}, {node0} has {ours.nnodes}"
    return "; ".join(_differences(join, who, ours))


def _differences(join: Join, who: str, ours: Ours) -> list[str]:
    theirs, mine = join.agreement, ours.agreement
    unequal = [option for option in sorted({*theirs, *mine}) if theirs.get(option) != mine.get(option)]
    lines = [
        f"{plain(option)}: {who} has {plain(theirs.get(option, _ABSENT))}, "
        f"node 0 has {plain(mine.get(option, _ABSENT))}"
        for option in unequal[:_MAX_DIFFERENCES]
    ]
    if len(unequal) > _MAX_DIFFERENCES:
        lines.append(f"and {len(unequal) - _MAX_DIFFERENCES} options more")
    return lines


def wrong_rank(join: Join, address: str, ours: Ours, members: tuple[Member, ...], missing: tuple[int, ...]) -> str:
    """Why no node of this launch can have this rank; empty: one can."""
    if 0 < join.node_rank < ours.nnodes:
        return ""
    who = f"{plain(join.host)} ({address})"
    here = ", ".join(f"{member.node_rank} ({member.host})" for member in members)
    state = f"joined so far: {here}; missing: {ranks(missing) or 'none'}"
    if join.node_rank == 0:
        return f"--node-rank 0 was given twice: to {who} and to {ours.member.host} ({ours.member.address}); {state}"
    return f"--node-rank {join.node_rank} of {who} is not below --nnodes {ours.nnodes}; {state}"
