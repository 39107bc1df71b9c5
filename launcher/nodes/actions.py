"""What node 0 is to do about an event of another node: decided by `launcher.nodes.membership`, done by
`launcher.nodes.leader`. Data only.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.errors import Failure
from launcher.nodes.messages import Member


@dataclass(frozen=True, slots=True)
class Accept:
    peer: bytes
    incarnation: str
    member: Member
    is_new: bool
    """It was not here before."""


@dataclass(frozen=True, slots=True)
class Refuse:
    peer: bytes
    incarnation: str
    reason: str
    is_mismatch: bool = False
    """This launch can never have all its nodes."""


@dataclass(frozen=True, slots=True)
class Lose:
    """The group is lost with this node."""

    failure: Failure
    is_leaving: bool = False
    """It said so itself, and nothing failed there."""


@dataclass(frozen=True, slots=True)
class Miss:
    """A node that had joined is not here any more; no group is lost by it."""

    text: str


@dataclass(frozen=True, slots=True)
class Fence:
    """The sender is in a group that is over."""

    peer: bytes
    launch_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class Unknown:
    """The sender has to join (again)."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class Start:
    """These are to start the group that is wanted (also if they were told before)."""

    peers: tuple[bytes, ...]
    is_complete: bool = False
    """All nodes have just come together."""


@dataclass(frozen=True, slots=True)
class Drop:
    why: str


Action = Accept | Refuse | Lose | Miss | Fence | Unknown | Start | Drop
