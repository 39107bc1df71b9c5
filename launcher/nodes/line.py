"""A node's connection to node 0: found, made, made again, and when it does not come about, why. Knows no messages.

ZMQ reconnects by itself after a connection that fell, but not after a handshake that broke the protocol (another
program, a key on one side only): so a socket whose handshake fails is thrown away, and a new one tries again, at the
next of the master's addresses if its name has several.
"""

from __future__ import annotations

from collections.abc import Iterator

import zmq

from launcher.config import NodeSettings
from launcher.host.interfaces import Route, read_interfaces, route_to
from launcher.nodes.addresses import bracketed, family_of, host_port, is_literal, zmq_endpoint
from launcher.nodes.messages import MAX_CONTROL
from launcher.nodes.reach import Found, Names, Probe
from launcher.nodes.secure import Security
from launcher.nodes.sockets import LinkEvent, Watcher, drain, has_input, make_socket

_HWM = 200
_AGAIN = 1.0
"""Seconds between a handshake that failed and the next try."""
_TRY = 4.0
"""Seconds for one address, if there are others."""
_ASK = 3.0
"""Seconds between two questions to the resolver, while it knows nothing."""
_ASK_ANEW = 30.0
"""Seconds until a name that did resolve is asked for again: its addresses did not help."""
_PROBE = 3.0
"""Seconds between two looks at an address that does not come up."""
_STEP = 0.05
"""Seconds between two steps of a probe or a question."""


class Line:
    """Owns a ZMQ context. One thread; never blocks (the resolver has a thread of its own)."""

    def __init__(self, settings: NodeSettings, now: float) -> None:
        self._settings = settings
        self._security = Security.of(settings)
        self.is_up = False
        self.ups = 0
        """Connections that have stood."""
        self.iface, self.address = settings.iface, settings.address
        """Ours, towards node 0; empty until a route is known."""
        self._names = Names(settings.master_addr)
        self._ask_at = 0.0
        self._turn = 0
        """Which of the master's addresses is tried."""
        self._open_at = self._opened_at = now
        self._probe: Probe | None = None
        self._probe_at = now + _AGAIN
        self._found: Found | None = None
        self._failure = ""
        """Of the newest handshake; empty: none has failed since the last that did not."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] | None = None
        self._watcher: Watcher | None = None

    # --- for the poll loop

    def fds(self) -> list[int]:
        """They change with every new socket."""
        if self._socket is None or self._watcher is None:
            return []
        return [int(self._socket.fileno()), self._watcher.fileno()]

    def until_timer(self, now: float) -> float:
        if self._socket is not None and has_input(self._socket):
            return 0.0
        if self._watcher is not None and self._watcher.has_input:
            return 0.0
        if self._probe is not None or self._names.is_asking:
            return _STEP
        if self.is_up:
            return float("inf")
        return max(0.0, min(self._open_at if self._socket is None else now + _TRY, self._probe_at) - now)

    def step(self, now: float) -> None:
        """See what has happened, and go on with whatever is needed for a connection."""
        if self._watcher is not None:
            for event in self._watcher.events():
                self._note(event, now)
        if self.is_up:
            return
        self._resolve(now)
        literals = self._names.literals
        if not literals:
            return
        if self._socket is not None and len(literals) > 1 and now >= self._opened_at + _TRY:
            self._drop_socket(now)
        if self._socket is None and now >= self._open_at:
            self._open(literals[self._turn % len(literals)], now)
        self._look(literals[self._turn % len(literals)], now)

    def drain(self) -> Iterator[list[zmq.Frame]]:
        return iter(()) if self._socket is None else drain(self._socket)

    def send(self, frame: bytes) -> bool:
        """False: it is not up, or node 0 does not read."""
        if self._socket is None or not self.is_up:
            return False
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self, linger_ms: int) -> None:
        """What was sent last has `linger_ms` to leave, if the line is up."""
        self._end_probe()
        if self._watcher is not None:
            self._watcher.close()
        if self._socket is not None:
            self._socket.close(linger=linger_ms if self.is_up else 0)
        self._socket = self._watcher = None
        self.is_up = False
        self._context.term()

    # --- the connection

    def _note(self, event: LinkEvent, now: float) -> None:
        if event.kind == "up":
            self.is_up = True
            self.ups += 1
            self._failure = ""
            self._end_probe()
        elif event.kind == "down":
            self.is_up = False
            self._probe_at = now + _AGAIN
        else:
            self._failure = event.why
            if self._socket is not None:
                self._drop_socket(now)

    def _drop_socket(self, now: float) -> None:
        assert self._socket is not None
        assert self._watcher is not None
        self._watcher.close()
        self._socket.close(linger=0)
        self._socket = self._watcher = None
        self.is_up = False
        self._turn += 1
        self._open_at = now + _AGAIN

    def _open(self, literal: str, now: float) -> None:
        route = self._route(literal)
        if route is not None:
            self.iface, self.address = route.iface, route.address
        self._opened_at = now
        self._socket = make_socket(
            self._context, zmq.DEALER, self._security, server=False, max_message=MAX_CONTROL, hwm=_HWM
        )
        self._watcher = Watcher(self._socket)
        endpoint = zmq_endpoint(literal, self._settings.master_port)
        if self._is_bound_to(literal):
            # ZMQ's form for "from this address": else the routes choose, and with several NICs not as --iface says.
            endpoint = f"tcp://{bracketed(self.address)}:0;{endpoint.removeprefix('tcp://')}"
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:  # no such interface (any more)
            self._failure = str(error)
            self._drop_socket(now)

    def _is_bound_to(self, literal: str) -> bool:
        given = self._settings.iface or self._settings.address
        return bool(given and self.address) and family_of(self.address) == family_of(literal)

    def _route(self, literal: str) -> Route | None:
        """How we reach it; what was given comes first."""
        given = self._settings
        if given.address:
            return Route(given.iface, given.address)
        route = route_to(literal)
        if given.iface and (route is None or route.iface != given.iface):
            version = 6 if ":" in literal else 4
            mine = next((i.best(version) for i in read_interfaces() if i.name == given.iface), None)
            return None if mine is None else Route(given.iface, mine.literal)
        return route

    # --- why it does not come about

    def _resolve(self, now: float) -> None:
        if self._names.step(now):
            self._turn = 0
        known = bool(self._names.literals)
        if not self._names.is_asking and now >= self._ask_at:
            self._ask_at = now + (_ASK_ANEW if known else _ASK)
            self._names.ask(now)

    def _look(self, literal: str, now: float) -> None:
        if self._probe is None and now >= self._probe_at:
            self._probe = Probe(literal, self._settings.master_port, now, has_key=not self._security.is_open)
        if self._probe is not None:
            found = self._probe.step(now)
            if found is not None:
                self._found = found
                self._end_probe()
                self._probe_at = now + _PROBE

    def _end_probe(self) -> None:
        if self._probe is not None:
            self._probe.close()
        self._probe = None

    def fault(self) -> str:
        """Why node 0 cannot be reached, in one line; empty: not known yet."""
        host, port = self._settings.master_addr, self._settings.master_port
        if not self._names.literals:
            why = self._names.fault
            return f"cannot reach node 0: the name {host!r} does not resolve: {why}" if why else ""
        where = f"node 0 at {host_port(host, port)}"
        if not is_literal(host):
            literals = self._names.literals
            where += f" ({literals[self._turn % len(literals)]})"
        if self.is_up:
            return f"{where} answers, but has not let this node in yet"
        if self._found is None:
            return ""
        if self._found.what != "open":
            return f"cannot reach {where}: {self._found.text}"
        if self._failure and not self._security.is_open:
            return f"cannot reach {where}: node 0 refused our key: give the same --cluster-key-file on every node"
        if self._failure:
            return f"cannot reach {where}: it ends the connection in the handshake ({self._failure})"
        return f"cannot reach {where}: it answers, and the connection does not come up"
