"""Why node 0 cannot be reached, told apart: a name that does not resolve, nothing that listens, a packet that nobody
answers, another program at that port, a key on one side only.

A `Names` turns the master's name into addresses (in a daemon thread: the resolver has no deadline). A `Probe` is one
plain TCP connection that says the first words of ZMTP and hears the first words of who answers; non-blocking, moved on
by `step`. Its greeting (ZMTP 3, 64 bytes): signature ``FF`` … ``7F`` (10), version (2), mechanism (20), more.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from dataclasses import dataclass
from typing import Literal

from launcher.nodes.addresses import family_of, host_port, is_literal, zone_of

RESOLVE = 10.0
"""Seconds for the resolver."""
CONNECT = 3.0
"""Seconds for the first packet's answer."""
GREETING = 3.0
"""Seconds for the first words of who has taken the connection."""
_HELLO = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03"
"""Signature and major version: from then on a ZMTP 3 peer says its mechanism."""
_SIGNATURE = 10
_MECHANISM = slice(12, 32)

Finding = Literal["refused", "no answer", "unreachable", "another program", "stopped", "no key", "key", "open"]


class Names:
    """The addresses behind a host name or a literal. `ask` starts a question, `literals` and `fault` are its answer."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.literals: tuple[str, ...] = (host,) if is_literal(host) else ()
        self.fault = ""
        """Why there are none (yet), as the end of a sentence; the newest answer's."""
        self._asked_at = 0.0
        self._answer: list[tuple[str, ...] | str] = []
        """Filled once by the thread, which nobody joins: it ends when the resolver has answered."""
        self._thread: threading.Thread | None = None

    @property
    def is_asking(self) -> bool:
        return self._thread is not None

    def ask(self, now: float) -> None:
        """One question at a time: a resolver that hangs is not asked again before it has answered."""
        if self._thread is None and not is_literal(self._host):
            self._answer, self._asked_at = [], now
            self._thread = threading.Thread(target=_look_up, args=(self._host, self._answer), name="names", daemon=True)
            self._thread.start()

    def step(self, now: float) -> bool:
        """Whether an answer has come."""
        if self._thread is None:
            return False
        if not self._answer:
            if now >= self._asked_at + RESOLVE:
                self.fault = f"the resolver has not answered within {now - self._asked_at:.0f} s"
            return False
        self._thread = None
        answer = self._answer[0]
        if isinstance(answer, str):
            self.fault = answer  # what was known before stays: a resolver may be away for a while
            return False
        self.literals, self.fault = answer, ""
        return True


def _look_up(host: str, answer: list[tuple[str, ...] | str]) -> None:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        answer.append(tuple(dict.fromkeys(str(entry[4][0]) for entry in found)))
    except (OSError, UnicodeError) as error:
        answer.append(getattr(error, "strerror", None) or str(error))


@dataclass(frozen=True, slots=True)
class Found:
    what: Finding
    text: str
    """For people: the end of a sentence that begins with who was asked."""


class Probe:
    """One look at an address. `step` until it gives something, then it is closed; at most `CONNECT + GREETING` s."""

    def __init__(self, literal: str, port: int, now: float, *, has_key: bool) -> None:
        self.where = host_port(literal, port)
        self._has_key = has_key
        self._until = now + CONNECT
        self._is_connected = False
        self._heard = b""
        self._found: Found | None = None
        self._socket = socket.socket(family_of(literal), socket.SOCK_STREAM)
        self._socket.setblocking(False)
        try:
            self._socket.connect(_sockaddr(literal, port))
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(_failed(error))

    def step(self, now: float) -> Found | None:
        """Never blocks."""
        if self._found is None:
            try:
                if not self._is_connected:
                    self._connect(now)
                if self._is_connected and self._found is None:
                    self._listen(now)
            except OSError as error:
                self._end(_failed(error) if not self._is_connected else self._strange())
        return self._found

    def _connect(self, now: float) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        if not poll.poll(0):
            if now >= self._until:
                self._end(Found("no answer", "no answer (firewall?): is the machine up, is it the right address?"))
            return
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._end(_failed(OSError(error, os.strerror(error))))
            return
        self._is_connected = True
        self._until = now + GREETING
        self._socket.send(_HELLO)

    def _listen(self, now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            data = self._socket.recv(64 - len(self._heard))
            self._heard += data
            if not data:  # closed
                self._end(self._strange())
                return
        if not (b"\xff" + self._heard[1:9] + b"\x7f").startswith(self._heard[:_SIGNATURE]):
            self._end(self._strange())
        elif len(self._heard) >= _MECHANISM.stop:
            self._end(self._judge(self._heard[_MECHANISM].rstrip(b"\0")))
        elif now >= self._until:
            self._end(self._strange())

    def _judge(self, mechanism: bytes) -> Found:
        if mechanism == b"CURVE" and not self._has_key:
            return Found("key", "node 0 uses a cluster key and this node has none: give the same --cluster-key-file")
        if mechanism == b"NULL" and self._has_key:
            return Found("no key", "node 0 uses no cluster key: give it the same --cluster-key-file")
        if mechanism not in (b"CURVE", b"NULL"):
            return self._strange()
        return Found("open", "it answers")

    def _strange(self) -> Found:
        if self._heard[:_SIGNATURE]:
            return Found("another program", f"something else answers there: it says {self._heard[:32]!r}")
        return Found(
            "another program",
            f"something else answers there, or node 0 is stopped: no word of ours within {GREETING:.0f} s",
        )

    def _end(self, found: Found) -> None:
        self._found = found
        self._socket.close()

    def close(self) -> None:
        self._socket.close()


def _failed(error: OSError) -> Found:
    if isinstance(error, ConnectionRefusedError):
        return Found("refused", "refused: nothing listens there (is node 0 started? is it the right port?)")
    if isinstance(error, TimeoutError):
        return Found("no answer", "no answer (firewall?): is the machine up, is it the right address?")
    return Found("unreachable", f"{(error.strerror or str(error)).lower()} (is it the right address and interface?)")


def _sockaddr(literal: str, port: int) -> tuple[str, int] | tuple[str, int, int, int]:
    if family_of(literal) == socket.AF_INET:
        return literal, port
    zone = zone_of(literal)
    return literal.partition("%")[0], port, 0, socket.if_nametoindex(zone) if zone else 0
