"""The door: a ZAP responder that lets in exactly the nodes of this launch, and a test that it is shut to others.

One thread a context. It answers libzmq's question about each new connection to a server socket of that context
(`Security.server`). It cannot fail open: whatever it does not understand is denied, an exception denies, and while no
thread answers nobody gets in (ZMQ_ZAP_ENFORCE_DOMAIN). It ends by `close`, or with its context.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading

import zmq

from launcher.clock import Deadline
from launcher.errors import HostError
from launcher.nodes.secure import DOMAIN, Security
from launcher.nodes.sockets import Watcher, make_socket

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"

_TEST_MESSAGE = 4096
"""Bytes; the handshake's own words count too, and are some hundred bytes long."""
JOIN = 5.0
"""Seconds for the thread to end: it answers from memory, and waits for nothing but its next request."""

log = logging.getLogger(__name__)


class Gate:
    """Make it before the first server socket of `context` binds; `close` it before the context ends."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], security: Security) -> None:
        """Without a key it does nothing. `HostError`: the context has a gate already."""
        self._security = security
        self.allowed = 0
        self.refused = 0
        """Requests denied. Written by the thread only."""
        self._thread: threading.Thread | None = None
        if security.is_open:
            return
        socket = context.socket(zmq.ROUTER)
        try:
            socket.linger = 0
            socket.bind(_ENDPOINT)
        except zmq.ZMQError as error:
            socket.close()
            raise HostError(f"cannot guard the network sockets with the cluster key: {error}") from error
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, args=(socket,), name="zap", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """From now on nobody new gets in. Connections that stand stay."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        os.close(self._wake_write)
        thread.join(JOIN)
        if not thread.is_alive():
            os.close(self._wake_read)

    def _run(self, socket: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        try:
            while self._wake_read not in (ready := dict(poller.poll())):
                if socket in ready:
                    self._answer_safely(socket)
        except zmq.ContextTerminated:
            pass  # the context's end closes every socket that asks us: there is nobody left to answer
        finally:
            socket.close(linger=0)

    def _answer_safely(self, socket: zmq.Socket[bytes]) -> None:
        try:
            self._answer(socket)
        except zmq.ContextTerminated:
            raise
        except Exception:
            log.exception("the gate could not answer a request: it stays denied")

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        frames = socket.recv_multipart(zmq.NOBLOCK)
        rank = None
        try:
            rank = self._judge(frames)
        except Exception:
            log.exception("the gate met a request that it could not judge, and denied it")
        if rank is None:
            self.refused += 1
        else:
            self.allowed += 1
        # The envelope is the sender, and what lies before the empty frame; the request's id goes back as it came.
        envelope, request = frames[:2], frames[3:4] or [b""]
        verdict = [b"400", b"denied", b""] if rank is None else [b"200", b"OK", str(rank).encode()]
        with contextlib.suppress(zmq.Again):  # who asked does not read: then it stays denied
            socket.send_multipart([*envelope, _VERSION, *request, *verdict, b""], zmq.NOBLOCK)

    def _judge(self, frames: list[bytes]) -> int | None:
        """The rank of the node that asks to come in; None: denied."""
        if len(frames) != 9:
            return None
        _, delimiter, version, _, domain, _, _, mechanism, credentials = frames
        if (delimiter, version, domain, mechanism) != (b"", _VERSION, DOMAIN, b"CURVE"):
            return None
        return self._security.rank_of(credentials)


def self_test(context: zmq.Context[zmq.Socket[bytes]], security: Security, deadline: Deadline) -> None:
    """Knock at a throw-away server socket behind the context's gate, with the right key, with a random one and with
    none. `HostError` unless the first gets in and the others are refused, all before `deadline`. Nothing without a key.
    """
    if security.is_open:
        return
    made: list[zmq.Socket[bytes]] = []
    watchers: dict[str, Watcher] = {}
    try:
        server = _socket(context, security, made, server=True)
        port = _bind(server)
        for who in _KNOCKING:
            client = _socket(context, security, made, server=False, who=who)
            watchers[who] = Watcher(client)
            client.connect(port)
            client.send(who.encode(), zmq.NOBLOCK)
        _judge_all(server, watchers, deadline)
    finally:
        for watcher in watchers.values():
            watcher.close()
        for socket in made:
            socket.close(linger=0)


_FRIEND = "the right key"
_KNOCKING = (_FRIEND, "a random key", "no key")


def _socket(
    context: zmq.Context[zmq.Socket[bytes]],
    security: Security,
    made: list[zmq.Socket[bytes]],
    *,
    server: bool,
    who: str = _FRIEND,
) -> zmq.Socket[bytes]:
    mine = Security(b"", security.nnodes, security.node_rank) if who == "no key" else security
    kind = zmq.ROUTER if server else zmq.DEALER
    socket = make_socket(context, kind, mine, server=server, max_message=_TEST_MESSAGE)
    made.append(socket)
    if who == "a random key":
        security.as_stranger(socket)
    return socket


def _bind(server: zmq.Socket[bytes]) -> str:
    for address in ("tcp://127.0.0.1:*", "tcp://[::1]:*"):
        with contextlib.suppress(zmq.ZMQError):
            server.bind(address)
            return server.getsockopt_string(zmq.LAST_ENDPOINT).replace("[::ffff:127.0.0.1]", "127.0.0.1")
    raise HostError("cannot test the cluster key: no loopback interface is up (ip link set lo up)")


def _judge_all(server: zmq.Socket[bytes], watchers: dict[str, Watcher], deadline: Deadline) -> None:
    waiting = set(_KNOCKING)
    poller = zmq.Poller()
    poller.register(server, zmq.POLLIN)
    for watcher in watchers.values():
        poller.register(watcher.fileno(), zmq.POLLIN)
    while waiting and not deadline.expired:
        for who, watcher in watchers.items():
            kinds = {event.kind for event in watcher.events()}
            if "up" in kinds and who != _FRIEND:
                raise HostError(f"the cluster key does not protect: a peer with {who} got in; nothing was started")
            if kinds & {"refused", "gave_up"} and who != _FRIEND:
                waiting.discard(who)
        while server.poll(0):
            if server.recv_multipart()[1] != _FRIEND.encode():
                raise HostError("the cluster key does not protect: a stranger's message got in; nothing was started")
            waiting.discard(_FRIEND)
        if waiting and not any(watcher.has_input for watcher in watchers.values()):
            poller.poll(deadline.remaining_ms())
    if waiting:
        names = " and ".join(sorted(waiting))
        raise HostError(f"cannot test the cluster key: no verdict on {names} within {deadline.seconds:.0f} s")
