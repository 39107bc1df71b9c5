"""Tell systemd (sd_notify(3)). Datagrams to NOTIFY_SOCKET; without one, nothing happens."""

from __future__ import annotations

import contextlib
import socket


class Notifier:
    """`address`: the value of NOTIFY_SOCKET, a path or ``@name`` in the abstract namespace; None: a no-op."""

    def __init__(self, address: str | None) -> None:
        self._socket: socket.socket | None = None
        self._last_status = ""
        if address:
            self._address = "\0" + address[1:] if address.startswith("@") else address
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def ready(self) -> None:
        """READY=1: the last rank is ready."""
        self._send("READY=1\nSTATUS=ready")

    def status(self, text: str) -> None:
        """STATUS=: one line for `systemctl status`; repeated ones are not sent."""
        if text != self._last_status:
            self._last_status = text
            self._send("STATUS=" + text.replace("\n", " "))

    def extend_timeout(self, seconds: float) -> None:
        """EXTEND_TIMEOUT_USEC=: the start goes on. Only to be called on progress."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1_000_000)}")

    def stopping(self) -> None:
        self._send("STOPPING=1\nSTATUS=stopping")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, text: str) -> None:
        if self._socket is not None:
            # A service manager that is away or slow must not stop us: it has its own timeouts.
            with contextlib.suppress(OSError):
                self._socket.sendto(text.encode(), self._address)
