"""Node 0's end of the control line: a socket and a table, for somebody else's poll loop. Never blocks, no thread but
the gate's.

::

    while True:
        for event in leader.pump(clock.now()): …
        poll(leader.fds(), leader.until_timer(clock.now()))     # in this order: see `launcher.nodes.sockets`

What it cannot read, it drops and counts. A flood of strangers costs time and no memory: they are in no table, and what
is told about them is limited.
"""

from __future__ import annotations

import errno
import logging
import socket as stdlib
from collections import Counter

import msgspec
import zmq

from launcher import clock
from launcher.clock import Deadline
from launcher.config import NodeSettings
from launcher.errors import Failure, HostError
from launcher.nodes import actions, messages
from launcher.nodes.addresses import host_port, zmq_endpoint
from launcher.nodes.agreement import Ours
from launcher.nodes.events import Joined, LeaderEvent, Lost, Mismatch, Ready, Refused
from launcher.nodes.gate import Gate, self_test
from launcher.nodes.membership import Membership
from launcher.nodes.messages import MAX_CONTROL, CloseGroup, EndGroup, Member, OpenGroup, Reader, WireError, encode
from launcher.nodes.secure import Security
from launcher.nodes.sockets import Watcher, drain, has_input, make_socket, peer_of, user_of
from launcher.nodes.words import clean, plain, time_of_day
from launcher.process.listen import port_holder

__all__ = ["Joined", "Leader", "LeaderEvent", "Lost", "Mismatch", "Ready", "Refused"]

BEAT = 1.0
"""Seconds between two beats, each way."""
SELF_TEST = 15.0
"""Seconds; it takes some milliseconds, and a loaded machine must not be taken for a key that does not protect."""
LAST_WORDS_MS = 500
"""For `EndGroup` and refusals to leave when we end. Nodes that are there take them at once."""
_HWM = 200
_TOLD_AGAIN = 10.0
"""Seconds before the same refusal is told again."""
_MAX_TOLD = 50
"""Refusals told within that time, at most."""

log = logging.getLogger(__name__)


class Leader:
    """Bound when made, until `close`. One thread."""

    def __init__(self, settings: NodeSettings, launch_id: str, version: str) -> None:
        """`HostError`: the port is taken (by whom, if that can be seen), or the cluster key does not protect."""
        self._launch_id = launch_id
        self.dropped: Counter[str] = Counter()
        """Frames that were passed over, by reason; what could not be decoded is in it too."""
        self._reader = Reader(messages.FromFollower)
        self._reader.dropped = self.dropped
        address = settings.address or settings.master_addr
        ours = Ours(Member(0, stdlib.gethostname(), address), settings.nnodes, version, settings.agreement)
        self._table = Membership(
            ours,
            launch_id,
            silence_limit=settings.silence_limit,
            join_timeout=settings.join_timeout,
            time_of_day=time_of_day,
        )
        self._open: OpenGroup | None = None
        self._end: EndGroup | None = None
        """The last word about a group that is over, for nodes that have not heard it."""
        self._events: list[LeaderEvent] = []
        self._told: dict[str, float] = {}
        self._number = 0
        self._is_ending = False
        self._beat_at = 0.0
        self._security = Security.of(settings)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._gate: Gate | None = None
        self._watcher: Watcher | None = None
        self._socket: zmq.Socket[bytes] | None = None
        try:
            self._bind(address, settings.master_port)
        except BaseException:
            self.close()
            raise

    def _bind(self, address: str, port: int) -> None:
        self._gate = Gate(self.context, self._security)
        self_test(self.context, self._security, Deadline.after(SELF_TEST))
        self._socket = make_socket(
            self.context, zmq.ROUTER, self._security, server=True, max_message=MAX_CONTROL, hwm=_HWM
        )
        self._watcher = Watcher(self._socket)
        try:
            self._socket.bind(zmq_endpoint(address, port))
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRINUSE:
                raise HostError(
                    f"--master-port {port} is taken on {address}{port_holder(port)}; "
                    "choose another with --master-port, the same on every node"
                ) from error
            raise HostError(f"cannot listen at {host_port(address, port)} for the other nodes: {error}") from error

    # --- for the poll loop

    def fds(self) -> list[int]:
        """To be polled for input."""
        assert self._socket is not None
        assert self._watcher is not None
        return [int(self._socket.fileno()), self._watcher.fileno()]

    def until_timer(self, now: float) -> float:
        """Seconds until the next `pump`, if nothing comes in before. Ask it last before waiting: 0 if there is input
        that the descriptors do not tell of any more."""
        if self._events or (self._socket is not None and has_input(self._socket)):
            return 0.0
        if self._watcher is not None and self._watcher.has_input:
            return 0.0
        return max(0.0, self._beat_at - now)

    def pump(self, now: float) -> list[LeaderEvent]:
        """Read what has come, say what is due."""
        if self._socket is None or self._watcher is None:
            return []
        self._watcher.log_refusals(self._watcher.events(), now)
        for frames in drain(self._socket):
            self._read(frames, now)
        if now >= self._beat_at:
            self._beat_at = now + BEAT
            self._do(self._table.tick(now), now)
            self._beat()
        events, self._events = self._events, []
        return events

    # --- for the agent

    @property
    def members(self) -> tuple[Member, ...]:
        """Who is here, node 0 first."""
        return self._table.members

    @property
    def missing(self) -> tuple[int, ...]:
        """Node ranks that have not joined."""
        return self._table.missing

    def open_group(self, group: OpenGroup) -> None:
        """The engine core wants it; may be said again. `Ready` comes once for each generation, or `Lost`."""
        if self._open is None or group.generation != self._open.generation:
            self._open = group
            now = clock.now()
            self._do(self._table.open(group.generation, now), now)

    def close_group(self, group: CloseGroup, *, final: bool = False) -> None:
        """Tell the nodes that it is over. `final`: whatever group they are in or wait for, there will be none."""
        self._table.close(group.generation)
        if self._open is not None and self._open.generation == group.generation:
            self._open = None
        self._end = EndGroup(
            self._launch_id, group.generation, group.reason, group.failure, final=final, orderly=group.orderly
        )
        for node in self._table.known:
            self._send(node.peer, self._end, node.rank)

    def is_ending(self) -> None:
        """This launch was told to stop: the nodes are to know it before the last word, which a kill may cut off."""
        if not self._is_ending:
            self._is_ending = True
            self._beat()

    def close(self) -> None:
        """Also after a constructor that failed. What was said last has `LAST_WORDS_MS` to leave."""
        if self._watcher is not None:
            self._watcher.close()
        if self._socket is not None:
            self._socket.close(linger=LAST_WORDS_MS)
        if self._gate is not None:
            self._gate.close()
        self._watcher = self._socket = self._gate = None
        self.context.term()

    # --- frames

    def _read(self, frames: list[zmq.Frame], now: float) -> None:
        if len(frames) != 2:
            self.dropped["malformed"] += 1
            return
        peer, body = frames[0].bytes, frames[1]
        try:
            word = self._reader.read(body.bytes)
        except WireError as error:
            self._tell(
                f"a message from {peer_of(body) or 'an unknown address'}: {error}", now, str(error).partition(":")[0]
            )
            return
        assert isinstance(word, messages.FromFollower)
        if not self._security.is_open and user_of(body) != str(word.node_rank):
            self.dropped["the key of another node"] += 1
            return
        match word:
            case messages.Join():
                self._do(self._table.join(peer, peer_of(body), word, now), now)
            case messages.Beat():
                self._do(self._table.beat(peer, word, now), now)
            case messages.Leaving():
                failure = clean(word.failure) if word.failure is not None else None
                self._do(self._table.leaving(msgspec.structs.replace(word, failure=failure), now), now)

    def _send(self, peer: bytes, word: msgspec.Struct, rank: int | None = None) -> None:
        assert self._socket is not None
        try:
            self._socket.send_multipart([peer, encode(word)], zmq.NOBLOCK)
        except zmq.Again:
            self.dropped["not sent: the node does not read"] += 1
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if rank is not None:
                self._table.gone(rank)

    def _beat(self) -> None:
        self._number += 1
        beat = messages.LeaderBeat(self._launch_id, self._number, self._table.members, ending=self._is_ending)
        for node in self._table.known:
            self._send(node.peer, beat, node.rank)

    # --- what the table says

    def _do(self, todo: list[actions.Action], now: float) -> None:
        for action in todo:
            match action:
                case actions.Accept(peer, incarnation, member, is_new):
                    self._send(
                        peer, messages.Accepted(self._launch_id, incarnation, self._table.members), member.node_rank
                    )
                    if is_new:
                        self._events.append(Joined(member))
                case actions.Refuse(peer, incarnation, reason, is_mismatch):
                    self._send(peer, messages.Refused(incarnation, reason))
                    self._refused(reason, is_mismatch, now)
                case actions.Unknown(peer):
                    self._send(peer, messages.LeaderBeat(self._launch_id, self._number, known=False))
                case actions.Fence(peer, launch_id, generation):
                    self._send(peer, self._over(launch_id, generation))
                case actions.Start(peers, is_complete):
                    self._start(peers, is_complete)
                case actions.Lose(failure, is_leaving):
                    self._lose(failure, is_leaving)
                case actions.Miss(text):
                    log.warning("%s", text)
                case actions.Drop(why):
                    self.dropped[why] += 1

    def _start(self, peers: tuple[bytes, ...], is_complete: bool) -> None:
        group = self._open
        assert group is not None
        word = messages.StartGroup(
            self._launch_id, group.generation, group.token, group.endpoint, group.store_host, group.store_port
        )
        for peer in peers:
            self._send(peer, word)
        if is_complete:
            self._events.append(Ready(self._table.members))

    def _lose(self, failure: Failure, is_leaving: bool) -> None:
        if self._open is not None:
            self._end = EndGroup(self._launch_id, self._open.generation, failure.headline, failure)
        self._events.append(Lost(failure, is_leaving))

    def _over(self, launch_id: str, generation: int) -> EndGroup:
        if self._end is not None and (self._end.launch_id, self._end.generation) == (launch_id, generation):
            return self._end
        return EndGroup(launch_id, generation, f"group {generation} is over: node 0 goes on without it")

    def _refused(self, reason: str, is_mismatch: bool, now: float) -> None:
        if is_mismatch:
            self._events.append(Mismatch(reason))
        else:
            self._tell(reason, now, reason)

    def _tell(self, text: str, now: float, key: str) -> None:
        """Once in a while: who is refused may come again at once."""
        if self._told.get(key, 0.0) > now:
            return
        if len(self._told) >= _MAX_TOLD:
            self._told = {known: until for known, until in self._told.items() if until > now}
            if len(self._told) >= _MAX_TOLD:
                return
        self._told[key] = now + _TOLD_AGAIN
        self._events.append(Refused(plain_line(text)))


def plain_line(text: str) -> str:
    return " ".join(plain(part) for part in text.split("\n"))
