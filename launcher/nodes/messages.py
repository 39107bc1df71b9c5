"""What nodes say to each other, and node 0's agent to its engine core. Data and a strict decoder, no I/O.

Control (master port; a follower's DEALER → node 0's ROUTER), one frame a message::

    follower → node 0   Join, Beat, Leaving
    node 0 → follower   Accepted, Refused, LeaderBeat, StartGroup, EndGroup

Local (``ipc://`` in node 0's run directory; engine core's DEALER → agent's ROUTER)::

    core → agent        OpenGroup, CloseGroup
    agent → core        GroupWaiting, GroupJoined, GroupLeaving, GroupLost

Words on the data link (an agent's DEALER → the engine core's ROUTER, one link a group; calls and answers travel on it
too, see `launcher.executor.frames`)::

    agent → core        Hello, GroupReady, GroupProgress, GroupFailed, Places
    core → agent        Welcome, EndGroup

A *group* is one life of the engine core with its workers on all nodes: (launch id, generation) names it, its token
proves that an agent was asked to join it. What belongs to another group is dropped. A frame is ``MAGIC`` + msgpack of
one of these; anything else is a `WireError`, to be counted and dropped by whoever reads.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

import msgspec

from launcher.errors import Failure, XserveError

PROTOCOL = 2
"""Rises with every change to these messages: nodes of different releases refuse each other in words."""
MAGIC = b"XSN\x01"
MAX_CONTROL = 1 << 20
"""Bytes of a control frame."""


class WireError(XserveError):
    """A frame that is none of ours."""


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A node that has joined, for people."""

    node_rank: int
    host: str
    address: str


# --- follower → node 0 -----------------------------------------------------------------------------------------------


class Join(msgspec.Struct, frozen=True, tag=True):
    """First word, and again whenever node 0 does not know the sender."""

    node_rank: int
    nnodes: int
    protocol: int
    version: str
    host: str
    address: str
    owner: str
    """Of the supervisor: the same over all lives of its agent."""
    incarnation: str
    """Of this life of the agent."""
    agreement: dict[str, str]
    generation: int = -1
    """The group that the sender is in already (node 0's agent was restarted); -1: none."""
    launch_id: str = ""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Each second. `number` ascends within an incarnation: older ones are dropped."""

    node_rank: int
    incarnation: str
    number: int
    generation: int = -1
    phase: str = ""


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """The sender ends: by its operator's wish, or by a failure of its own."""

    node_rank: int
    incarnation: str
    number: int
    reason: str
    failure: Failure | None = None


FromFollower = Join | Beat | Leaving


# --- node 0 → follower -----------------------------------------------------------------------------------------------


class Accepted(msgspec.Struct, frozen=True, tag=True):
    launch_id: str
    incarnation: str
    """Of the follower that is meant."""
    members: tuple[Member, ...]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """For good: the follower ends with exit 2 and this line."""

    incarnation: str
    reason: str


class LeaderBeat(msgspec.Struct, frozen=True, tag=True):
    launch_id: str
    number: int
    members: tuple[Member, ...] = ()
    known: bool = True
    """False: the follower has to join (again)."""
    ending: bool = False
    """Node 0 was told to stop: should it vanish from now on, that was its operator's wish."""


class StartGroup(msgspec.Struct, frozen=True, tag=True):
    """All nodes have joined: connect to the engine core at `endpoint`, let the workers meet at the store."""

    launch_id: str
    generation: int
    token: bytes
    endpoint: str
    store_host: str
    """A literal, with a zone if link-local."""
    store_port: int


class EndGroup(msgspec.Struct, frozen=True, tag=True):
    """The group is over."""

    launch_id: str
    generation: int
    reason: str
    failure: Failure | None = None
    """Its first cause, as far as node 0 knows it."""
    final: bool = False
    """There will be no other group."""
    orderly: bool = False
    """Nothing failed: stop too, exit 0."""


FromLeader = Accepted | Refused | LeaderBeat | StartGroup | EndGroup


# --- engine core ⇄ node 0's agent ------------------------------------------------------------------------------------


class OpenGroup(msgspec.Struct, frozen=True, tag=True):
    """Also said again each second, until `GroupJoined` and after it: the agent may be a new one."""

    generation: int
    token: bytes
    endpoint: str
    store_host: str
    store_port: int


class CloseGroup(msgspec.Struct, frozen=True, tag=True):
    generation: int
    reason: str
    failure: Failure | None = None
    orderly: bool = False


FromCore = OpenGroup | CloseGroup


class GroupWaiting(msgspec.Struct, frozen=True, tag=True):
    """Each second while nodes are missing."""

    generation: int
    members: tuple[Member, ...]
    missing: tuple[int, ...]


class GroupJoined(msgspec.Struct, frozen=True, tag=True):
    """Every node is there and was told to start."""

    generation: int
    members: tuple[Member, ...]


class GroupLost(msgspec.Struct, frozen=True, tag=True):
    """A node of the group is gone, silent or leaving, or did not come within the join timeout."""

    generation: int
    failure: Failure


class GroupLeaving(msgspec.Struct, frozen=True, tag=True):
    """A node of the group is being stopped. It goes on for a while: `GroupLost` follows, unless this node is being
    stopped too."""

    generation: int
    failure: Failure


FromAgent = GroupWaiting | GroupJoined | GroupLost | GroupLeaving


# --- agent ⇄ engine core, on the data link ---------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    token: bytes
    generation: int
    node_rank: int


class Welcome(msgspec.Struct, frozen=True, tag=True):
    generation: int


class GroupReady(msgspec.Struct, frozen=True, tag=True):
    """All workers of the sender's node are READY."""


class GroupProgress(msgspec.Struct, frozen=True, tag=True):
    """A worker of the sender's node has got further in its start: a limit on progress counts from here."""

    text: str


class GroupFailed(msgspec.Struct, frozen=True, tag=True):
    """A worker of the sender's node failed. The sender ends."""

    failure: Failure
    others: tuple[Failure, ...] = ()


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where one rank is: the call that it has begun last, since when it is busy (0: idle), whether it waits for peers.

    `busy_for` is in seconds: clocks of nodes differ.
    """

    rank: int
    call_id: int
    busy_for: float
    waiting: bool


class Places(msgspec.Struct, frozen=True, tag=True):
    """Each second: for the watchdog of node 0."""

    places: tuple[Place, ...]


OnData = Hello | GroupReady | GroupProgress | GroupFailed | Places
ToData = Welcome | EndGroup

T = TypeVar("T")
_encode = msgspec.msgpack.Encoder().encode


def encode(message: msgspec.Struct) -> bytes:
    return MAGIC + _encode(message)


class Reader:
    """Decodes one union of messages; counts what it drops. Never raises anything but `WireError`."""

    def __init__(self, kinds: object, limit: int = MAX_CONTROL) -> None:
        self._decode = msgspec.msgpack.Decoder(kinds).decode
        self._limit = limit
        self.dropped: Counter[str] = Counter()

    def read(self, frame: bytes | memoryview) -> msgspec.Struct:
        """The message; `WireError` says what is wrong with the frame."""
        why = ""
        if len(frame) > self._limit:
            why = "oversized"
        elif frame[: len(MAGIC)] != MAGIC:
            why = "other version" if frame[:3] == MAGIC[:3] else "not ours"
        else:
            try:
                return self._decode(frame[len(MAGIC) :])  # type: ignore[no-any-return]
            except (msgspec.DecodeError, ValueError, RecursionError, OverflowError):
                why = "malformed"
        self.dropped[why] += 1
        raise WireError(f"{why}: {len(frame)} bytes that begin with {bytes(frame[:16])!r}")
