"""The engine core's end of the data link: see `data_link`. It never blocks.

ZMQ names a connection and tells of the end of one, but not which one it was. So when some connection has ended we send
a word to every node: to one that is gone it cannot be sent.
"""

from __future__ import annotations

import errno
import hmac
import logging
from collections import Counter, deque
from collections.abc import Collection, Sequence

import zmq

from launcher import clock
from launcher.clock import Deadline
from launcher.errors import HostError
from launcher.executor.data_link import LINGER_MS, make_data_socket
from launcher.executor.frames import (
    ANSWER,
    CALL,
    NO_RANK,
    Assembler,
    Frame,
    Lost,
    Whole,
    cut,
    is_frame,
    open_parts,
    parts_of,
)
from launcher.ipc.codec import Message
from launcher.ipc.segment import require_headroom
from launcher.nodes.addresses import zmq_endpoint
from launcher.nodes.gate import Gate, self_test
from launcher.nodes.messages import (
    GroupFailed,
    GroupProgress,
    GroupReady,
    Hello,
    OnData,
    Places,
    Reader,
    ToData,
    Welcome,
    WireError,
    encode,
)
from launcher.nodes.secure import Security
from launcher.nodes.sockets import Watcher, has_input, user_of

log = logging.getLogger(__name__)

_PROBE = 1.0
"""Seconds after the end of some connection in which we ask whether it was one of ours."""
_SELF_TEST = 10.0
_LOG_GAP = 1.0


Item = Whole | GroupReady | GroupProgress | GroupFailed | Places | Lost


class CoreLink:
    """One thread. `close` it also after an error."""

    def __init__(
        self, address: str, security: Security, *, generation: int, token: bytes, nodes: Collection[int]
    ) -> None:
        """`address`: a literal of this machine; `nodes`: the ranks that are to come.

        `HostError` if the address cannot be bound, or if the cluster key does not protect.
        """
        self._security = security
        self._token = token
        self._generation = generation
        self._wanted = frozenset(nodes)
        self._peers: dict[bytes, int] = {}
        """ZMQ's name for a connection → node."""
        self._names: dict[int, bytes] = {}
        self._answers: dict[int, Assembler] = {}
        self._outbox: dict[int, deque[Frame]] = {}
        self._came: deque[tuple[int, Item]] = deque()
        """What is behind the first of the answers that have come in one frame."""
        self._lost: deque[tuple[int, Lost]] = deque()
        self._number = 0
        """Of the next frame: the same for all nodes, which get the same frames."""
        self._probe_until = 0.0
        self._log_at = 0.0
        self._reader = Reader(OnData)
        self.dropped: Counter[str] = Counter()
        self.sent_bytes: Counter[int] = Counter()
        """Node → bytes of frames given to ZMQ."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._gate: Gate | None = None
        self._watcher: Watcher | None = None
        try:
            self._gate = Gate(self._context, security)
            self_test(self._context, security, Deadline.after(_SELF_TEST))
            self._socket = make_data_socket(self._context, zmq.ROUTER, security, server=True)
            self._watcher = Watcher(self._socket)
            self.endpoint = self._bind(address)
        except BaseException:
            self.close()
            raise

    def _bind(self, address: str) -> str:
        try:
            self._socket.bind(zmq_endpoint(address, 0))
        except zmq.ZMQError as error:
            raise HostError(f"cannot listen on {address} for the other nodes: {error}; see --iface") from error
        port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        return zmq_endpoint(address, port)

    # --- waiting ---------------------------------------------------------------------------------------------------

    def fds(self) -> list[int]:
        return [int(self._socket.fd), self._watch.fileno()]

    def has_news(self) -> bool:
        return bool(self._came or self._lost) or has_input(self._socket) or self._watch.has_input

    @property
    def _watch(self) -> Watcher:
        assert self._watcher is not None
        return self._watcher

    # --- in --------------------------------------------------------------------------------------------------------

    def read(self) -> tuple[int, Item] | None:
        """Node and what has come from it: an answer, news, or that its link is over, once all before it was read."""
        while True:
            if self._came:
                return self._came.popleft()
            if self._lost:
                return self._lost.popleft()
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                if self._look_for_lost():
                    continue
                return None
            node = self._peers.get(parts[0].bytes)
            try:
                if node is None:
                    self._knock(parts)
                else:
                    self._came.extend((node, item) for item in self._take(node, parts))
            except WireError as error:
                self._drop("malformed", str(error))
                if node is not None:
                    self._give_up(node, f"it sent what is none of its words: {error}")

    def _take(self, node: int, parts: list[zmq.Frame]) -> Sequence[Item]:
        if not 2 <= len(parts) <= 3:
            raise WireError(f"a message of {len(parts)} parts")
        if len(parts) > 2 or is_frame(parts[1].buffer):
            head, chunk = open_parts(parts[1].buffer, [part.buffer for part in parts[2:]])
            if not head.offset:
                require_headroom(head.total, f"an answer from node {node}")
            return self._answers[node].add_all(head, chunk)
        word = self._reader.read(parts[1].bytes)
        if isinstance(word, Hello):
            raise WireError("a second hello")
        assert isinstance(word, GroupReady | GroupProgress | GroupFailed | Places)
        return (word,)

    def _knock(self, parts: list[zmq.Frame]) -> None:
        """A frame of somebody whom we do not know."""
        word = self._reader.read(parts[1].bytes) if len(parts) == 2 else None
        if not isinstance(word, Hello):
            self._drop("stranger", "a frame of a stranger")
            return
        if not hmac.compare_digest(word.token, self._token) or word.generation != self._generation:
            self._drop("another group", f"node {word.node_rank} of another group")
            return
        if word.node_rank not in self._wanted or word.node_rank in self._names:
            self._drop("second", f"node {word.node_rank} is not expected")
            return
        if not self._security.is_open and user_of(parts[1]) != str(word.node_rank):
            self._drop("the key of another node", f"a hello as node {word.node_rank} with the key of another node")
            return
        name = parts[0].bytes
        self._peers[name], self._names[word.node_rank] = word.node_rank, name
        self._answers[word.node_rank], self._outbox[word.node_rank] = Assembler(ANSWER), deque()
        self._say_to(word.node_rank, encode(Welcome(self._generation)))

    def _drop(self, why: str, what: str) -> None:
        self.dropped[why] += 1
        if clock.now() >= self._log_at:
            self._log_at = clock.now() + _LOG_GAP
            log.warning("dropped on the data link: %s (%d so far)", what, self.dropped.total())

    # --- who is there ----------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> set[int]:
        """Those that are connected."""
        return set(self._names)

    def _look_for_lost(self) -> bool:
        """Nothing is there to be read: has a node gone?"""
        events = self._watch.events()
        now = clock.now()
        self._watch.log_refusals(events, now)
        if any(event.kind == "down" for event in events):
            self._probe_until = now + _PROBE
        if now < self._probe_until:
            for node in list(self._names):
                self._say_to(node, encode(Welcome(self._generation)))
        return bool(self._lost)

    def _give_up(self, node: int, why: str) -> None:
        name = self._names.pop(node, None)
        if name is not None:
            del self._peers[name]
            self._outbox[node].clear()
            self._lost.append((node, Lost(why)))

    # --- out -------------------------------------------------------------------------------------------------------

    def cut(self, message: Message) -> list[Frame]:
        """For `send`. They refer to the message's memory. `UsageError` if it is too large."""
        return cut(CALL, NO_RANK, message, self._number)

    def send(self, frames: list[Frame]) -> None:
        """To every node, once. What is held back still refers to the message's memory: go on until `flush` is true."""
        self._number += len(frames)
        for node in self._names:
            self._outbox[node].extend(frames)
        self.flush()

    def flush(self) -> bool:
        """Send what is held back, as far as it goes; whether all is sent."""
        for node, waiting in self._outbox.items():
            while waiting:
                if not self._say_to(node, *parts_of(waiting[0])):
                    break
                self.sent_bytes[node] += sum(map(len, waiting.popleft()))
        return not any(self._outbox.values())

    @property
    def is_held_back(self) -> bool:
        """Also while a probe is under way: that a connection is over may be told before it can be seen, and a look at
        the socket takes the news of that off its descriptor."""
        return any(self._outbox.values()) or clock.now() < self._probe_until

    def laggards(self) -> list[int]:
        """Nodes that do not take what is there for them."""
        return [node for node, waiting in self._outbox.items() if waiting]

    def say(self, word: ToData) -> None:
        """To every node; lost where one takes nothing."""
        for node in list(self._names):
            self._say_to(node, encode(word))

    def _say_to(self, node: int, *parts: bytes | memoryview) -> bool:
        """False: it has no room, or is gone, which `read` tells."""
        name = self._names.get(node)
        if name is None:
            return False
        try:
            # The name tells whether there is room; the parts behind it go where it goes.
            self._socket.send(name, zmq.NOBLOCK | zmq.SNDMORE)
            for part in parts[:-1]:
                self._socket.send(part, zmq.NOBLOCK | zmq.SNDMORE)
            self._socket.send(parts[-1], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._give_up(node, "its connection was closed")
            return False
        return True

    def close(self) -> None:
        """Last words get `LINGER_MS` to be taken. Idempotent."""
        if self._context.closed:
            return
        if self._watcher is not None:
            self._watcher.close()
            self._socket.close(linger=LINGER_MS)
        if self._gate is not None:
            self._gate.close()
        self._context.destroy(linger=LINGER_MS)
