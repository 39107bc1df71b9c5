"""Our network sockets and what happens to their connections. Every option is set here, once, for all of them.

**Waiting on them.** ZMQ's descriptor (`socket.fileno()`) is *edge*-triggered: it becomes readable once, and any call on
the socket, a send too, may take that edge away while messages are still there. So a poll loop does, each turn::

    for frames in drain(socket): …        # until there is nothing more
    …whatever it sends…
    if not has_input(socket): poll(fd)    # the last thing before it waits, after the last send

No wake-up is lost between the last two: what comes after `has_input` makes the descriptor readable, and it stays so
until the socket is called again.
"""

from __future__ import annotations

import logging
import os
import socket as stdlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import zmq
from zmq.utils.monitor import parse_monitor_message

from launcher.nodes.closing import last_closed
from launcher.nodes.secure import Security

HANDSHAKE_MS = 5000
RECONNECT_MS = 100
CONNECT_MS = 3000
"""A first packet that nobody answers is sent again after 1, 2, 4 … 64 s; we begin anew instead."""
STALL_MS = 10_000
"""What is sent and not acknowledged for so long ends the connection (a pulled cable says nothing)."""
HWM = 1000
"""Messages each way and connection that ZMQ holds."""
KEEPALIVE = (10, 5, 3)
"""Seconds of quiet, seconds between probes, probes. Of idle connections; for busy ones `STALL_MS` is sooner."""
AT_ONCE = 1000
"""Messages that one `drain` gives at most: a flood must not stop the loop's timers."""

log = logging.getLogger(__name__)


def make_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: int,
    security: Security,
    *,
    server: bool,
    max_message: int,
    hwm: int = HWM,
) -> zmq.Socket[bytes]:
    """A socket that is not bound or connected yet. `server`: the end that binds. `max_message`: bytes of a frame; who
    sends a longer one is disconnected.

    Without ZMQ_IMMEDIATE: what is sent before the connection stands goes out when it does, and is lost when it falls.
    """
    socket = context.socket(kind)
    socket.linger = 0
    socket.ipv6 = True
    socket.maxmsgsize = max_message
    socket.sndhwm = socket.rcvhwm = hwm
    socket.handshake_ivl = HANDSHAKE_MS
    socket.reconnect_ivl = RECONNECT_MS
    socket.connect_timeout = CONNECT_MS
    socket.setsockopt(zmq.TCP_MAXRT, STALL_MS)
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = KEEPALIVE
    if kind == zmq.ROUTER:
        # Else a message to who is gone vanishes without a word.
        socket.router_mandatory = True
    if server:
        security.server(socket)
    else:
        security.client(socket)
    return socket


def drain(socket: zmq.Socket[bytes], at_most: int = AT_ONCE) -> Iterator[list[zmq.Frame]]:
    """The messages that are there, each a list of frames (`.bytes`, `.buffer`, `peer_of`). Never blocks."""
    for _ in range(at_most):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return


def has_input(socket: zmq.Socket[bytes]) -> bool:
    """Whether a `drain` would give something. To be asked before each wait (see above)."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def peer_of(frame: zmq.Frame) -> str:
    """The address of the TCP peer that sent it, as a literal without port; empty: not known."""
    return _word(frame, "Peer-Address").removeprefix("::ffff:")


def user_of(frame: zmq.Frame) -> str:
    """What the gate called the sender (its node rank in digits); empty: no gate."""
    return _word(frame, "User-Id")


def _word(frame: zmq.Frame, name: str) -> str:
    try:
        return str(frame.get(name))
    except zmq.ZMQError:  # no such property
        return ""


# --- what happens to connections -------------------------------------------------------------------------------------

Kind = Literal["up", "refused", "gave_up", "down"]

_WATCHED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)
_MONITOR_HWM = 10_000
"""Events kept for a loop that does not come; beyond it ZMQ's I/O thread waits for the loop."""
_LOG, _SAME_LOG = 1.0, 10.0
"""Seconds between two lines about refusals, and between two that say the same of the same address."""
_MAX_PEERS = 1024
"""Connections whose peers are kept in mind; the oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class LinkEvent:
    """Something about one connection. ``up``: the handshake is done. ``refused``: one end refused the other, `why` in
    words. ``gave_up``: it ended before the handshake did (timeout, closed). ``down``: closed, after any of them."""

    kind: Kind
    why: str = ""
    peer: str = ""
    """Of an accepted connection, where it could still be asked for."""


class Watcher:
    """The events of one socket. Make it before `bind` or `connect`; poll `fileno` as a socket's (edge-triggered)."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._peers: OrderedDict[int, str] = OrderedDict()
        """Descriptor of ZMQ's → peer. A closed one's number is soon another's: good for logs, not for decisions."""
        self._failed: LinkEvent | None = None
        self.refused = 0
        """Handshakes refused, on either end."""
        self._unlogged = 0
        self._log_at = 0.0
        self._logged = "", ""
        """Why and who, in the last line about a refusal."""
        address = f"inproc://watch-{socket.fileno()}-{os.urandom(4).hex()}"
        socket.monitor(address, _WATCHED)
        self._monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        self._monitor.linger = 0
        self._monitor.rcvhwm = _MONITOR_HWM
        self._monitor.connect(address)

    def fileno(self) -> int:
        return int(self._monitor.fileno())

    @property
    def has_input(self) -> bool:
        return has_input(self._monitor)

    def events(self) -> list[LinkEvent]:
        """What has happened since the last call. Never blocks."""
        found: list[LinkEvent] = []
        for frames in drain(self._monitor):
            event = parse_monitor_message([frame.bytes for frame in frames])
            found.extend(self._one(int(event["event"]), int(event["value"])))
        return found

    def _one(self, event: int, value: int) -> list[LinkEvent]:
        if event == zmq.EVENT_ACCEPTED:
            self._peers[value] = _peer(value, self._port())
            if len(self._peers) > _MAX_PEERS:
                self._peers.popitem(last=False)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return [LinkEvent("up")]
        elif event == zmq.EVENT_DISCONNECTED:
            peer = self._peers.pop(value, "")
            # The failure of a handshake is followed by the end of its connection; only that one tells which it was.
            failed, self._failed = self._failed, None
            first = [LinkEvent(failed.kind, failed.why, peer)] if failed is not None else []
            return [*first, LinkEvent("down", peer=peer)]
        else:
            before = [self._failed] if self._failed is not None else []
            self._failed = LinkEvent(*_failure(event, value))
            self.refused += self._failed.kind == "refused"
            return before
        return []

    def log_refusals(self, events: list[LinkEvent], now: float) -> None:
        """For who listens. A line a second at most, and the same one each ten: who knocks is not to fill the log."""
        for event in events:
            if event.kind != "refused":
                continue
            self._unlogged += 1
            same = (event.why, event.peer.partition(" ")[0]) == self._logged
            if now < self._log_at + (_SAME_LOG - _LOG if same else 0.0):
                continue
            self._logged = event.why, event.peer.partition(" ")[0]
            more = f" ({self._unlogged - 1} more since the last such line)" if self._unlogged > 1 else ""
            peer = event.peer or last_closed(self._port()) or "an unknown address"
            log.warning("refused a connection from %s: %s%s", peer, event.why, more)
            self._unlogged = 0
            self._log_at = now + _LOG

    def _port(self) -> int:
        """That the socket is bound to."""
        return int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2] or 0)

    def close(self) -> None:
        """Before the socket is closed; may be said again."""
        if self._monitor.closed:
            return
        # The I/O thread may be waiting for room here, with the lock that `monitor` needs.
        self.events()
        if not self._socket.closed:
            self._socket.monitor(None, 0)
        self._monitor.close(linger=0)


def _failure(event: int, value: int) -> tuple[Kind, str]:
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "refused", "its key is none of this launch's"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return "refused", "one end has a cluster key and the other has none"
        if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            return "refused", "its cluster key is another one"
        return "refused", f"it does not follow the protocol ({value:#x})"
    return "gave_up", os.strerror(value) if value else "closed"


def _peer(fd: int, port: int) -> str:
    """Who is behind ZMQ's descriptor, which may be closed by now, or another's: so it has to be of our `port`."""
    try:
        look = stdlib.socket(fileno=fd)
    except OSError:
        return ""
    try:
        own, peer = look.getsockname(), look.getpeername()
    except OSError:
        return ""
    finally:
        look.detach()  # it is not ours to close
    is_ours = isinstance(own, tuple) and own[1] == port
    return f"{peer[0].removeprefix('::ffff:')} port {peer[1]}" if is_ours else ""
