"""What node 0 knows of the ranks on the other nodes: who they are, where they are, what became of them. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launcher import clock
from launcher.config import NodeSettings, RankSettings
from launcher.errors import Failure
from launcher.executor.hangs import Late
from launcher.nodes.addresses import bracketed
from launcher.nodes.messages import GroupFailed, Member, Places
from launcher.parallel.ranks import Coordinates
from launcher.plan import names
from launcher.process.causes import first_cause
from launcher.worker.marks import Place


class FarRanks:
    """Ranks from `first` on: node k has those from ``k * ranks_per_node`` up to the next node's."""

    def __init__(self, ranks: RankSettings, nodes: NodeSettings) -> None:
        self._per_node = nodes.ranks_per_node
        self.first = nodes.ranks_per_node
        self.nodes = range(1, nodes.nnodes)
        self._titles = [_title(ranks, rank) for rank in range(ranks.world_size)]
        self._members: dict[int, Member] = {}
        self._places = [Place(0.0, 0, 0, False) for _ in range(ranks.world_size - self.first)]
        self.ready: set[int] = set()
        """Nodes whose workers are all READY."""
        self.failures: list[Failure] = []
        """What nodes, and our own agent, have said."""
        self.lost: dict[int, str] = {}
        """Node → why its data link is over."""
        self.leaving: dict[int, Failure] = {}
        """Node → what is to be said of its end, since it is being stopped."""

    @property
    def missing(self) -> set[int]:
        """Nodes that are not ready yet."""
        return set(self.nodes) - self.ready

    # --- who they are ----------------------------------------------------------------------------------------------

    def joined(self, members: Sequence[Member]) -> None:
        self._members = {member.node_rank: member for member in members}

    @property
    def have_joined(self) -> bool:
        return bool(self._members)

    def node_of(self, rank: int) -> int:
        return rank // self._per_node

    def host(self, node: int) -> str:
        member = self._members.get(node)
        return member.host if member is not None else ""

    def node_name(self, node: int) -> str:
        """``node 1 (hostname, 10.0.0.2)``"""
        member = self._members.get(node)
        return f"node {node}" + (f" ({member.host}, {bracketed(member.address)})" if member is not None else "")

    def where(self, rank: int) -> dict[str, Any]:
        """For `remote_error`."""
        node = self.node_of(rank)
        return {"title": self._titles[rank], "node": node, "host": self.host(node) or "?"}

    def name(self, rank: int) -> str:
        node = self.node_of(rank)
        host = self.host(node)
        return f"rank {rank} ({self._titles[rank]}) on node {node}" + (f" ({host})" if host else "")

    # --- where they are --------------------------------------------------------------------------------------------

    def took(self, node: int, word: Places) -> None:
        """Clocks of nodes differ: since when a rank is busy is counted from when we first heard of it."""
        now = clock.now()
        for place in word.places:
            if self.node_of(place.rank) != node or not self.first <= place.rank < len(self._titles):
                continue
            index = place.rank - self.first
            before = self._places[index]
            since = 0.0
            if place.busy_for:
                same = before.call_id == place.call_id and before.busy_since
                since = before.busy_since if same else now - place.busy_for
            self._places[index] = Place(since, place.call_id, 0, place.waiting)

    def places(self) -> list[Place]:
        """In rank order, as last heard."""
        return list(self._places)

    # --- what became of them ---------------------------------------------------------------------------------------

    def failed(self, word: GroupFailed) -> None:
        self.failures += [word.failure, *word.others]

    def cause(self, own: Sequence[Failure]) -> tuple[Failure, tuple[Failure, ...]]:
        """The first cause, and what follows from it; `own`: failures on this node.

        That a connection was closed is a cause only where nobody has said anything better.
        """
        known = [*own, *self.failures]
        if not has_cause(known):
            known += [self.leaving.get(node) or self.gone(node, f"is gone: {why}") for node, why in self.lost.items()]
        return first_cause(known)

    def gone(self, node: int, why: str, *, is_late: bool = False) -> Failure:
        """A failure of the node as a whole. `is_late`: it is there, and has not done its part in time."""
        return Failure(
            title=f"NodeAgent_N{node}",
            role="node_agent",
            kind="timeout" if is_late else "peer_lost",
            headline=f"{self.node_name(node)} {why}",
            node=node,
            host=self.host(node),
            at=clock.now(),
            node_lost=not is_late,
        )

    def hang(self, late: Late, limit: float) -> Failure:
        node = self.node_of(late.rank)
        return late.failure(limit, self._titles[late.rank], node=node, host=self.host(node))


def _title(ranks: RankSettings, rank: int) -> str:
    pp, tp = divmod(rank, ranks.tp_size)
    return names.worker(rank, Coordinates(0, ranks.dp_rank, pp, 0, tp))[0]


def has_cause(failures: Sequence[Failure]) -> bool:
    """Whether one of them is more than the loss of a peer, or is a node's that is known to be lost."""
    return any(failure.kind != "peer_lost" or failure.node_lost for failure in failures)
