"""What node 0 knows about one other node. Data only: `launcher.nodes.membership` writes it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from launcher.nodes.messages import Join, Member

_PAST = 32
"""Lives that are over, kept for each node rank."""

State = Literal["absent", "joined", "silent", "left"]


@dataclass(slots=True)
class Claim:
    """Another's join under a node rank that is held."""

    peer: bytes
    join: Join
    address: str
    at: float


@dataclass(slots=True)
class Node:
    rank: int
    state: State = "absent"
    peer: bytes = b""
    """Where its last word came from."""
    owner: str = ""
    incarnation: str = ""
    host: str = ""
    address: str = ""
    joined_at: float = 0.0
    heard_at: float = 0.0
    due: float = 0.0
    """When it counts as silent."""
    number: int = -1
    generation: int = -1
    """The group that it says it is in."""
    told: int = -1
    """The group that we told it to start: it may not have said yet that it is in it."""
    strays: int = 0
    """Beats since then in which it was in none."""
    phase: str = ""
    is_lost: bool = False
    """A group was lost with it: it is not to go on with that."""
    is_cut: bool = False
    """Its connection has closed since it was last heard."""
    claim: Claim | None = None
    past: deque[str] = field(default_factory=lambda: deque(maxlen=_PAST))

    @property
    def member(self) -> Member:
        return Member(self.rank, self.host, self.address)

    def __str__(self) -> str:
        return f"node {self.rank} ({self.host}, {self.address})"
