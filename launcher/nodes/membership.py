"""Node 0's view of the other nodes: a table, without clock and without I/O.

Each node has a state; an event gives actions, for `launcher.nodes.leader` to perform. ``=`` is the same life (the
incarnation of an agent) as the one that the node is known by, ``owner`` another life under the same supervisor, and
``other`` one under another supervisor::

                absent      joined                        silent             left
    join =      accept      accept (its line is new)      accept / fence     drop
    join owner  accept      lose, accept                  accept             accept
    join other  accept      hold: the holder has 3 s      accept             accept
    beat =      -           note / fence / start again    accept / fence     drop
    beat else   unknown     unknown                       unknown            unknown
    leaving =   -           lose, then left               left               drop
    leaving .   drop        drop                          drop               drop
    gone        -           note                          -                  -
    tick        -           silent too long: lose         -                  -

Whatever the state: a join that can never fit is refused; lives that are over and numbers that do not ascend are
dropped. *lose* ends a group that was complete; before that, the node is only missing again. *fence* tells a node whose
group is over that it is. A *group* is wanted from `open` until `close`, and complete once all nodes are here.
"""

from __future__ import annotations

from collections.abc import Callable

from launcher.errors import Failure
from launcher.nodes.actions import Accept, Action, Drop, Fence, Lose, Miss, Refuse, Start, Unknown
from launcher.nodes.agreement import Ours, misfit, wrong_rank
from launcher.nodes.messages import Beat, Join, Leaving, Member
from launcher.nodes.seat import Claim, Node
from launcher.nodes.words import named, plain, ranks

HOLD = 3.0
"""Seconds that the holder of a node rank has to show that it is alive, when another claims the rank."""
_SURE = 0.5
"""A beat so soon after the claim may have been on its way before."""
_TICK = 1.0
_PAUSE = 2.0
"""Seconds between two ticks that mean that we ourselves were stopped: that time is not the others' silence."""
_STRAYS = 2
"""Beats outside of a group, of a node that was told to start one, until we take it that our word got lost."""


class Membership:
    """Times are monotonic seconds, given by the caller. `time_of_day` turns one into a text for people."""

    def __init__(
        self,
        ours: Ours,
        launch_id: str,
        *,
        silence_limit: float,
        join_timeout: float,
        time_of_day: Callable[[float], str],
    ) -> None:
        self._ours = ours
        self._launch_id = launch_id
        self._silence_limit = silence_limit
        self._join_timeout = join_timeout
        self._time_of_day = time_of_day
        self._nodes = {rank: Node(rank) for rank in range(1, ours.nnodes)}
        self.wanted = -1
        """Generation of the group that is wanted; -1: none."""
        self.is_complete = False
        self._is_lost = False
        self._ended = -1
        """The newest generation that is over."""
        self._served = False
        """Some group was complete: from now on a stranger's mistake is only his."""
        self._since = 0.0
        self._ticked: float | None = None

    # --- questions

    def node(self, rank: int) -> Node:
        return self._nodes[rank]

    @property
    def joined(self) -> tuple[Node, ...]:
        return tuple(node for node in self._nodes.values() if node.state == "joined")

    @property
    def known(self) -> tuple[Node, ...]:
        """Who may still hear us: also who is leaving, and finishes what runs."""
        return tuple(node for node in self._nodes.values() if node.peer)

    @property
    def members(self) -> tuple[Member, ...]:
        """Node 0 first."""
        return (self._ours.member, *(node.member for node in self.joined))

    @property
    def missing(self) -> tuple[int, ...]:
        """A node that is still in a group that is over counts as missing: it has to come again."""
        return tuple(node.rank for node in self._nodes.values() if not self._is_here(node))

    def _is_here(self, node: Node) -> bool:
        return node.state == "joined" and {node.generation, node.told} <= {-1, self.wanted}

    def _is_over(self, generation: int) -> bool:
        """Unknown, and so not over, while no core has said which group is wanted: this agent may be a new one."""
        return generation >= 0 and (generation <= self._ended or self.wanted not in (-1, generation))

    # --- the group

    def open(self, generation: int, now: float) -> list[Action]:
        """The core wants this group. Saying it again changes nothing."""
        if generation == self.wanted:
            return []
        self._ended = max(self._ended, self.wanted)
        self.wanted, self._since = generation, now
        self.is_complete = self._is_lost = False
        over = [(node, max(node.generation, node.told)) for node in self.joined]
        fenced = [Fence(node.peer, self._launch_id, last) for node, last in over if self._is_over(last)]
        return [*fenced, *self._gather()]

    def close(self, generation: int) -> None:
        self._ended = max(self._ended, generation)
        if generation == self.wanted:
            self.wanted = -1
            self.is_complete = self._is_lost = False

    def _gather(self) -> list[Action]:
        """Whether all are here now."""
        if self.wanted < 0 or self.is_complete or self._is_lost or self.missing:
            return []
        self.is_complete = self._served = True
        for node in self.joined:
            node.told, node.strays = self.wanted, 0
        return [Start(tuple(node.peer for node in self.joined), is_complete=True)]

    # --- events

    def join(self, peer: bytes, address: str, join: Join, now: float) -> list[Action]:
        """`address`: where it came from, as far as is known; else what it says itself counts."""
        address = plain(address or join.address)
        if reason := misfit(join, self._ours):
            held = join.node_rank in self._nodes and self._nodes[join.node_rank].state == "joined"
            return [Refuse(peer, join.incarnation, reason, is_mismatch=not (self._served or held))]
        if reason := wrong_rank(join, address, self._ours, self.members, self.missing):
            return [Refuse(peer, join.incarnation, reason)]
        node = self._nodes[join.node_rank]
        claim = Claim(peer, join, address, now)
        if join.incarnation in node.past:
            return [Drop("a life that is over")]
        if join.generation >= 0 and self._is_stale(node, join):
            return [Fence(peer, join.launch_id, join.generation)]
        if node.state != "joined" or join.incarnation == node.incarnation:
            return self._admit(node, claim)
        if join.owner == node.owner:
            return [*self._lose(node, f"node {node.rank} ({node.host}) restarted its agent"), *self._admit(node, claim)]
        return self._hold(node, claim)

    def _is_stale(self, node: Node, join: Join) -> bool:
        """Its group is over, or another launch's; it has to end, and to come as a new life."""
        if join.incarnation == node.incarnation:
            node.generation = join.generation
            if node.is_lost:
                return True
        return join.launch_id != self._launch_id or self._is_over(join.generation)

    def _admit(self, node: Node, claim: Claim) -> list[Action]:
        join, now = claim.join, claim.at
        is_new = node.state != "joined" or node.incarnation != join.incarnation
        if node.incarnation and node.incarnation != join.incarnation:
            node.past.append(node.incarnation)
        if node.incarnation != join.incarnation:
            node.number = node.told = -1
        node.state, node.peer, node.owner, node.incarnation = "joined", claim.peer, join.owner, join.incarnation
        node.host, node.address, node.generation = plain(join.host), claim.address, join.generation
        node.claim, node.is_lost = None, False
        self._hear(node, now)
        if is_new:
            node.joined_at = now
        return [Accept(claim.peer, join.incarnation, node.member, is_new), *self._gather()]

    def _hold(self, node: Node, claim: Claim) -> list[Action]:
        if node.claim is None:
            node.claim = claim
        elif node.claim.join.incarnation == claim.join.incarnation:
            node.claim.peer = claim.peer
        else:
            return [Drop("a second claim to a node rank")]
        return []

    def beat(self, peer: bytes, beat: Beat, now: float) -> list[Action]:
        node = self._nodes.get(beat.node_rank)
        if node is None:
            return [Drop("a node rank out of range")]
        if node.state == "absent" or beat.incarnation != node.incarnation:
            return [Drop("a life that is over") if beat.incarnation in node.past else Unknown(peer)]
        if node.state == "left":
            return [Drop("a life that is over")]
        if beat.number <= node.number:
            return [Drop("a number that does not ascend")]
        node.number, node.peer, node.generation, node.phase = beat.number, peer, beat.generation, plain(beat.phase)
        self._hear(node, now)
        return [*self._settle_claim(node, now), *self._place(node)]

    def _hear(self, node: Node, now: float) -> None:
        node.heard_at, node.due, node.is_cut = now, now + self._silence_limit, False

    def _place(self, node: Node) -> list[Action]:
        """What its generation says about a node that beats."""
        if node.generation < 0 <= node.told != self.wanted:
            # The first such beat may have crossed our word on the way; by the second, our word got lost.
            node.strays += 1
            node.told = node.told if node.strays < _STRAYS else -1
        if self._is_over(node.generation) or (node.is_lost and node.generation >= 0):
            return [self._fence(node)]
        if node.state == "silent":
            node.state, node.is_lost = "joined", False
            return [Accept(node.peer, node.incarnation, node.member, is_new=True), *self._gather()]
        if self.is_complete and not self._is_lost and node.generation < 0:
            return [Start((node.peer,))]  # what it was told got lost
        return self._gather()

    def _fence(self, node: Node) -> Fence:
        return Fence(node.peer, self._launch_id, node.generation)

    def leaving(self, leaving: Leaving, now: float) -> list[Action]:
        node = self._nodes.get(leaving.node_rank)
        if node is None or node.state not in ("joined", "silent") or leaving.incarnation != node.incarnation:
            return [Drop("a life that is over")]
        if leaving.number <= node.number:
            return [Drop("a number that does not ascend")]
        node.number = leaving.number
        self._hear(node, now)
        if leaving.failure is not None:
            done = self._lose(node, leaving.failure.headline, failure=leaving.failure)
        else:
            done = self._lose(node, f"{node} is leaving: {plain(leaving.reason)}", is_leaving=True)
        node.state = "left"
        node.past.append(node.incarnation)
        return done

    def gone(self, rank: int) -> None:
        """Its connection has closed: a hint, for the words of its loss. Its agent may be restarted in a moment."""
        node = self._nodes[rank]
        if node.state == "joined":
            node.is_cut = True
        elif node.state == "left":
            node.peer = b""

    def tick(self, now: float) -> list[Action]:
        """At least each second."""
        if self._ticked is not None and now - self._ticked > _PAUSE:
            self._forgive(now - self._ticked - _TICK)
        self._ticked = now
        done: list[Action] = []
        for node in self._nodes.values():
            done += self._settle_claim(node, now)
            if node.state == "joined" and now >= node.due:
                done += self._silence(node, now)
        return [*done, *self._time_out(now)]

    def _forgive(self, paused: float) -> None:
        """We were stopped: what the others said meanwhile is still on its way to us."""
        for node in self._nodes.values():
            node.due += paused
            if node.claim is not None:
                node.claim.at += paused

    def _settle_claim(self, node: Node, now: float) -> list[Action]:
        claim = node.claim
        if claim is None:
            return []
        if node.state == "joined" and node.heard_at >= claim.at + _SURE:
            node.claim = None
            reason = (
                f"--node-rank {node.rank} is taken: {node.host} ({node.address}) joined {now - node.joined_at:.0f} s "
                f"ago and is alive; give {plain(claim.join.host)} ({claim.address}) another --node-rank"
            )
            return [Refuse(claim.peer, claim.join.incarnation, reason)]
        if node.state == "joined" and now < claim.at + HOLD:
            return []
        lost = self._lose(node, f"{node} {self._silent_for(node, now)}; {plain(claim.join.host)} has taken its place")
        return [*lost, *self._admit(node, Claim(claim.peer, claim.join, claim.address, now))]

    def _silence(self, node: Node, now: float) -> list[Action]:
        done = self._lose(node, f"{node} {self._silent_for(node, now)}")
        node.state = "silent"
        return done

    def _silent_for(self, node: Node, now: float) -> str:
        cut = ", its connection has closed" if node.is_cut else ""
        heard = self._time_of_day(node.heard_at)
        return f"has been silent for {now - node.heard_at:.1f} s: last heard at {heard}{cut}"

    def _lose(
        self, node: Node, headline: str, *, failure: Failure | None = None, is_leaving: bool = False
    ) -> list[Action]:
        """Of a node that was here: with it the group, if there is one."""
        if node.state != "joined":
            return []
        if not self.is_complete:
            return [Miss(headline)]
        self._is_lost = node.is_lost = True
        return [Lose(failure or _failure(node.rank, node.host, headline), is_leaving)]

    def _time_out(self, now: float) -> list[Action]:
        missing = self.missing
        if self.wanted < 0 or self.is_complete or self._is_lost or not missing:
            return []
        if now < self._since + self._join_timeout:
            return []
        self._is_lost = True
        who = f"node{'s' * (len(missing) > 1)} {ranks(missing)}"
        joined = ", ".join(named(member) for member in self.members)
        limit = f"--join-timeout {self._join_timeout:g} s"
        headline = f"{who} did not join within {limit}; joined: {joined}; missing: {ranks(missing)}"
        return [Lose(_failure(missing[0], "", headline))]


def _failure(rank: int, host: str, headline: str) -> Failure:
    return Failure(
        title=f"NodeAgent_N{rank}",
        role="node_agent",
        kind="peer_lost",
        headline=headline,
        node=rank,
        host=host,
        node_lost=True,
    )
