"""What `Leader.pump` and `Follower.pump` give a node agent. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.errors import Failure
from launcher.nodes.messages import EndGroup, Member, StartGroup

# --- node 0 ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    member: Member


@dataclass(frozen=True, slots=True)
class Ready:
    """All nodes are here, and each was told to start the group that is wanted. Node 0 is the first member."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """The group is lost with a node; or nodes have not come within the join timeout."""

    failure: Failure
    leaving: bool = False
    """The node's operator wished it; nothing failed there."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A node can never fit, and no group has been complete yet: node 0 ends too."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Node 0: somebody was not let in, for the log. A follower: this node, for good."""

    reason: str


LeaderEvent = Joined | Ready | Lost | Mismatch | Refused


# --- the others ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Accepted:
    """Let in (again); told once each time."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Started:
    group: StartGroup


@dataclass(frozen=True, slots=True)
class Ended:
    """Our group is over, or (`final`) there will be none."""

    end: EndGroup


@dataclass(frozen=True, slots=True)
class Unreachable:
    """Node 0 cannot be reached, and why as far as can be seen; tried again all the time."""

    text: str


@dataclass(frozen=True, slots=True)
class LeaderLost:
    """Node 0 is lost to us, and with it our group."""

    text: str


@dataclass(frozen=True, slots=True)
class TimedOut:
    """Not let in within the join timeout."""

    text: str


FollowerEvent = Accepted | Refused | Started | Ended | Unreachable | LeaderLost | TimedOut
