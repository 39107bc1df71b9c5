"""The engine core's ZMQ socket and its clients: who they are, what is still to be sent to them. Knows no scheduler.

One ROUTER, bound by the core at an ``ipc://`` path; each API server connects one DEALER whose identity is new with
every start. Frames: identity (ZMQ's own) and one msgpack message. What comes in badly formed is dropped and counted.

A client that does not read costs no step: what its pipe does not take stays in its outbox, where the outputs of later
steps join it, and goes out later in one message. It is bounded by what the client itself has asked for.
"""

from __future__ import annotations

import os
from collections import deque
from types import TracebackType
from typing import Self

import msgspec
import zmq

from launcher.engine.messages import FromCore, RequestOutput, SchedulerStats, StepOutputs, ToCore
from launcher.errors import HostError

SEND_HWM = 1000
"""Messages that ZMQ holds for one client before the outbox does."""
RECV_HWM = 10_000
"""Messages of one client that ZMQ holds for us during a long step; beyond it the client's own sends wait."""
MAX_MESSAGE = 64 << 20
"""Bytes of one message: sixteen million prompt tokens."""
MAX_REPLIES = 100
"""Answers kept for a client that does not read; the oldest go first (nobody waits for an answer that long)."""
LAST_WORDS_MS = 200
"""For the outputs that say ``abort`` at an orderly stop. Clients that read take them at once."""
AT_ONCE = 1024
"""Messages taken in between two steps: a flood must not stop the steps."""


class Client:
    """One life of one API server."""

    __slots__ = ("identity", "is_gone", "keys", "name", "number", "outbox", "replies")

    def __init__(self, identity: bytes, number: int) -> None:
        self.identity = identity
        self.number = number
        """Makes its requests' keys unique in the core."""
        self.is_gone = False
        """Forgotten: what it had still said is void."""
        self.name = ""
        """From `Hello`: the same in all its lives."""
        self.keys: set[str] = set()
        """Its requests that are not finished."""
        self.outbox: list[RequestOutput] = []
        self.replies: deque[FromCore] = deque(maxlen=MAX_REPLIES)

    @property
    def has_mail(self) -> bool:
        return bool(self.outbox or self.replies)


class _SocketFile:
    """The file of an ``ipc://`` address, which ZMQ makes and does not remove."""

    def __init__(self, address: str) -> None:
        self._path = address.removeprefix("ipc://")
        self._inode = self._now()

    def _now(self) -> int | None:
        try:
            return os.stat(self._path).st_ino
        except OSError:
            return None  # no file: an abstract name, or removed by someone else

    def remove(self) -> None:
        """Unless it is another's by now: the core that replaces us may be up already."""
        if self._inode is not None and self._now() == self._inode:
            os.unlink(self._path)


class Front:
    """Owns the ZMQ context and socket. One thread; never blocks."""

    def __init__(self, address: str, generation: int) -> None:
        self._generation = generation
        self._decoder = msgspec.msgpack.Decoder(ToCore)
        self._encoder = msgspec.msgpack.Encoder()
        self._clients: dict[bytes, Client] = {}
        self._numbers = 0
        self.malformed = 0
        """Messages dropped because they could not be read."""
        self._file: _SocketFile | None = None
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            self._socket.linger = 0
            self._socket.sndhwm, self._socket.rcvhwm = SEND_HWM, RECV_HWM
            self._socket.maxmsgsize = MAX_MESSAGE
            # Without it, messages to a client that is gone would vanish without a word.
            self._socket.router_mandatory = True
            self._socket.router_handover = True
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise HostError(f"cannot listen at {address!r} for API servers: {error}") from error
        self._file = _SocketFile(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(LAST_WORDS_MS if error is None else 0)

    def close(self, linger_ms: int = 0) -> None:
        """Give the last messages `linger_ms` to leave; what a client has not taken by then is dropped."""
        if self._file is not None:
            self._file.remove()
        self._socket.close(linger=linger_ms)
        self._context.term()

    def fileno(self) -> int:
        """Edge-triggered, as ZMQ's descriptors are: before waiting on it ask `has_input`."""
        return self._socket.fileno()

    @property
    def has_input(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    @property
    def clients(self) -> list[Client]:
        return list(self._clients.values())

    def receive(self) -> list[tuple[Client, ToCore]]:
        """What has come in, at most `AT_ONCE` messages."""
        got = []
        for _ in range(AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                identity, body = frames
                message = self._decoder.decode(body)
            except (ValueError, msgspec.DecodeError):
                self.malformed += 1
                continue
            got.append((self._client(identity), message))
        return got

    def _client(self, identity: bytes) -> Client:
        client = self._clients.get(identity)
        if client is None:
            self._numbers += 1
            client = self._clients[identity] = Client(identity, self._numbers)
        return client

    def forget(self, client: Client) -> None:
        """It is gone: nothing will be sent to it any more."""
        self._clients.pop(client.identity, None)
        client.is_gone = True

    def reply(self, client: Client, message: FromCore) -> None:
        """Send an answer with the next `flush`."""
        client.replies.append(message)

    def flush(self, client: Client, stats: SchedulerStats) -> bool:
        """Send what is there for `client`, as far as it takes it; False when the client is gone."""
        try:
            while client.replies:
                self._send(client, client.replies[0])
                client.replies.popleft()
            if client.outbox:
                self._send(client, StepOutputs(self._generation, tuple(client.outbox), stats))
                client.outbox.clear()
        except zmq.Again:
            return True  # it does not read; the rest stays
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _send(self, client: Client, message: FromCore) -> None:
        self._socket.send_multipart((client.identity, self._encoder.encode(message)), zmq.NOBLOCK)
