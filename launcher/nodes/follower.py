"""A node's end of the control line, for somebody else's poll loop (as `launcher.nodes.leader`): joins, beats, and tells
what node 0 says.

    not let in  --Accepted-->  let in  --StartGroup-->  in a group  --EndGroup, node 0 silent-->  over

Not let in, it says `Join` each second, for as long as `join_timeout`; let in, it beats each second. A follower is in
one group at most: whoever runs it ends with its group, and a new life joins again.
"""

from __future__ import annotations

import secrets
from collections import Counter

import msgspec
import zmq

from launcher import clock
from launcher.config import NodeSettings
from launcher.errors import Failure
from launcher.nodes import messages
from launcher.nodes.addresses import host_port
from launcher.nodes.events import Accepted, Ended, FollowerEvent, Refused, Started, TimedOut, Unreachable
from launcher.nodes.events import LeaderLost as Lost
from launcher.nodes.leader import BEAT, LAST_WORDS_MS
from launcher.nodes.line import Line
from launcher.nodes.messages import PROTOCOL, EndGroup, Member, Reader, StartGroup, WireError, encode
from launcher.nodes.words import clean, plain, time_of_day

__all__ = ["Accepted", "Ended", "Follower", "FollowerEvent", "Lost", "Refused", "Started", "TimedOut", "Unreachable"]

FIRST_TOLD = 5.0
"""Seconds until it is told that node 0 cannot be reached; later if no reason is known yet (three seconds, for a packet
that nobody answers, and as much for a peer that says nothing)."""
TOLD_AGAIN = 10.0
_PAUSE = 2.0
"""Seconds between two pumps that mean that we ourselves were stopped: that time is not node 0's silence."""


class Follower:
    """One life of a node's agent. One thread; `close` it."""

    def __init__(self, settings: NodeSettings, owner: str, version: str, host: str) -> None:
        """`owner`: this node's supervisor. Tries to connect with the first `pump`. `HostError`: no CURVE for a key."""
        self.phase = ""
        """What the agent is doing: goes with every beat."""
        self.members: tuple[Member, ...] = ()
        """Who has joined, as node 0 says."""
        self.dropped: Counter[str] = Counter()
        self._settings = settings
        self._owner, self._version, self._host = owner, version, host
        self._incarnation = secrets.token_hex(8)
        self._reader = Reader(messages.FromLeader)
        self._reader.dropped = self.dropped
        self._events: list[FollowerEvent] = []
        self._number = self._heard_number = 0
        self._launch_id = ""
        self._is_accepted = self._is_left = self._is_over = False
        self.is_ending = False
        """Node 0 was told to stop, as it says: its end is no loss."""
        self._group: StartGroup | None = None
        now = clock.now()
        self._missed_since, self._pumped_at = now, now
        self._heard_at = self._due = now
        self._say_at, self._tell_at = now, now + FIRST_TOLD
        self._line = Line(settings, now)
        self._ups = 0

    @property
    def last_heard(self) -> str:
        """For people."""
        return f"last heard at {time_of_day(self._heard_at)}"

    # --- for the poll loop

    def fds(self) -> list[int]:
        """To be polled for input. They change: ask before each wait."""
        return self._line.fds()

    def until_timer(self, now: float) -> float:
        """Seconds until the next `pump`, if nothing comes in before. Ask it last before waiting."""
        return 0.0 if self._events else max(0.0, min(self._say_at - now, self._line.until_timer(now)))

    def pump(self, now: float) -> list[FollowerEvent]:
        """Read what has come, say what is due. Never blocks."""
        self._line.step(now)
        if self._line.ups != self._ups:
            self._ups, self._heard_number, self._say_at = self._line.ups, 0, now
        for frames in self._line.drain():
            self._read(frames, now)
        if now >= self._say_at:
            self._say_at = now + BEAT
            self._say()
        if not self._is_over:
            self._timers(now)
        events, self._events = self._events, []
        return events

    # --- for the agent

    @property
    def iface(self) -> str:
        """The interface that leads to node 0 (or the one given); empty until it is known."""
        return self._line.iface

    @property
    def address(self) -> str:
        """Our literal on it."""
        return self._line.address

    @property
    def generation(self) -> int:
        return -1 if self._group is None else self._group.generation

    def leave(self, reason: str, failure: Failure | None = None) -> None:
        """Tell node 0 that this node ends. Nothing is said after it; `pump` goes on to give what node 0 says, so that
        a node that is being stopped can finish what runs until its group is ended."""
        if self._is_accepted and not self._is_left:
            self._number += 1
            rank = self._settings.node_rank
            self._line.send(encode(messages.Leaving(rank, self._incarnation, self._number, reason, failure)))
        self._is_left = True

    def close(self) -> None:
        self._line.close(LAST_WORDS_MS)

    # --- what we say

    def _say(self) -> None:
        if self._is_left:
            return
        if self._is_accepted:
            self._number += 1
            rank = self._settings.node_rank
            self._line.send(encode(messages.Beat(rank, self._incarnation, self._number, self.generation, self.phase)))
        elif not self._is_over:
            self._line.send(encode(self._join()))

    def _join(self) -> messages.Join:
        settings = self._settings
        return messages.Join(
            node_rank=settings.node_rank,
            nnodes=settings.nnodes,
            protocol=PROTOCOL,
            version=self._version,
            host=self._host,
            address=self.address,
            owner=self._owner,
            incarnation=self._incarnation,
            agreement=settings.agreement,
            generation=self.generation,
            launch_id="" if self._group is None else self._group.launch_id,
        )

    # --- what node 0 says

    def _read(self, frames: list[zmq.Frame], now: float) -> None:
        if len(frames) != 1:
            self.dropped["malformed"] += 1
            return
        try:
            word = self._reader.read(frames[0].bytes)
        except WireError:
            return  # counted
        match word:
            case messages.Accepted(launch_id, incarnation, members) if incarnation == self._incarnation:
                self._hear(launch_id, now)
                self._accepted(members)
            case messages.Refused(incarnation, reason) if incarnation == self._incarnation:
                self._finish(Refused(reason))
            case messages.LeaderBeat():
                self._beaten(word, now)
            case StartGroup() if self._is_accepted and word.launch_id == self._launch_id:
                self._start(word)
            case EndGroup():
                self._end(word)
            case _:
                self.dropped["not for us"] += 1

    def _hear(self, launch_id: str, now: float) -> None:
        """Node 0 is alive. Another launch there: what we knew is void."""
        self._heard_at, self._due = now, now + self._settings.silence_limit
        if launch_id == self._launch_id:
            return
        if self._group is not None and launch_id != self._group.launch_id:
            self._finish(Lost(f"{self._node0} was started anew: its group {self.generation} is over"))
        self._launch_id, self._is_accepted = launch_id, False

    def _accepted(self, members: tuple[Member, ...]) -> None:
        self.members = members
        if not self._is_accepted and not self._is_over:
            self._is_accepted = True
            self._say_at = 0.0
            self._events.append(Accepted(members))

    def _beaten(self, beat: messages.LeaderBeat, now: float) -> None:
        if not beat.known:
            self._hear(beat.launch_id, now)
            if self._is_accepted:
                self._is_accepted, self._missed_since, self._say_at = False, now, 0.0
            return
        if beat.number <= self._heard_number:
            self.dropped["a number that does not ascend"] += 1
            return
        self._heard_number = beat.number
        self._hear(beat.launch_id, now)
        self.is_ending = beat.ending
        self.members = beat.members

    def _start(self, group: StartGroup) -> None:
        if self._group is None and not self._is_over:
            self._group = group
            self._say_at = 0.0
            self._events.append(Started(group))
        elif group != self._group:
            self.dropped["a second group"] += 1  # else: said again, because our beat was on its way

    def _end(self, end: EndGroup) -> None:
        group = self._group
        ours = group is not None and (end.launch_id, end.generation) == (group.launch_id, group.generation)
        if ours or (end.final and end.launch_id == self._launch_id):
            failure = clean(end.failure) if end.failure is not None else None
            self._finish(Ended(msgspec.structs.replace(end, reason=plain(end.reason), failure=failure)))
        else:
            self.dropped["not for us"] += 1

    def _finish(self, event: FollowerEvent) -> None:
        """The last event of this follower."""
        if not self._is_over:
            self._is_over = True
            self._events.append(event)

    # --- time

    def _timers(self, now: float) -> None:
        if now - self._pumped_at > _PAUSE:
            self._due += now - self._pumped_at - BEAT
        self._pumped_at = now
        if (self._is_accepted or self._group is not None) and now >= self._due:
            self._silence(now)
        if self._is_accepted or self._group is not None:
            self._tell_at = max(self._tell_at, now + FIRST_TOLD)
        elif now >= self._missed_since + self._settings.join_timeout:
            why = self._line.fault() or f"no word from {self._node0}"
            self._finish(TimedOut(f"not let in within --join-timeout {self._settings.join_timeout:g} s: {why}"))
        elif now >= self._tell_at and (text := self._line.fault()):
            self._tell_at = now + TOLD_AGAIN
            self._events.append(Unreachable(text))

    def _silence(self, now: float) -> None:
        """A node that waits for its group can wait on: node 0's agent may be started again."""
        self._is_accepted = False
        if self._group is None:
            self._missed_since = now
            return
        heard = time_of_day(self._heard_at)
        self._finish(Lost(f"{self._node0} has been silent for {now - self._heard_at:.1f} s: last heard at {heard}"))

    @property
    def _node0(self) -> str:
        return f"node 0 ({host_port(self._settings.master_addr, self._settings.master_port)})"
