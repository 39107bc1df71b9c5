"""The control socket's server: a guest in the supervisor's poll loop. It never blocks and holds no thread.

    server = ControlServer(run_directory.control_socket, handle)
    loop:  poll(server.filenos()); for each ready fd: server.on_event(fd)

What a client can cost us is bounded: `CLIENTS` connections, `REQUEST_BYTES` of input each, one request each, and
`CLIENT_SECONDS` from connecting to having read its reply; whoever is slower, or sends anything but one request line,
is dropped. Beyond `CLIENTS` the oldest is dropped: new ones get in, so that idle connections cannot lock anyone out.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec

from launcher.clock import Deadline
from launcher.control.protocol import REQUEST_BYTES, ErrorReply, Reply, Request, decode_request, encode
from launcher.errors import HostError, XserveError

CLIENTS = 16
CLIENT_SECONDS = 5.0
_UCRED = struct.Struct("3i")
"""struct ucred of unix(7): pid, uid, gid."""

Handler = Callable[[Request], Reply]


class _Client:
    """One connection: first read until a line is there, then write until the reply is out."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.incoming = bytearray()
        self.outgoing: memoryview | None = None
        """None: still reading."""
        self.deadline = Deadline.after(CLIENT_SECONDS)

    @property
    def events(self) -> int:
        return select.POLLIN if self.outgoing is None else select.POLLOUT


class ControlServer:
    """Owns the socket at `path` and its connections until `close`."""

    def __init__(self, path: Path, handler: Handler) -> None:
        """`HostError` when the socket cannot be made. An exception of the handler becomes an `ErrorReply`."""
        self.path = path
        self._handler = handler
        self._clients: dict[int, _Client] = {}
        self._listener = _listen(path)

    def filenos(self) -> dict[int, int]:
        """Descriptors to poll, with their events. Ask before every poll: it also drops who is over time."""
        for fd in [fd for fd, client in self._clients.items() if client.deadline.expired]:
            self._drop(fd)
        return {self._listener.fileno(): select.POLLIN, **{fd: c.events for fd, c in self._clients.items()}}

    def on_event(self, fd: int) -> None:
        """Do what can be done for a ready descriptor. One that is not (or no longer) ours is passed over."""
        if fd == self._listener.fileno():
            self._accept()
        elif (client := self._clients.get(fd)) is not None:
            if client.outgoing is None:
                self._read(client)
            else:
                self._write(client)

    def flush(self) -> None:
        """Send what the sockets take at once: a last try before the process ends."""
        for client in list(self._clients.values()):
            if client.outgoing is not None:
                self._write(client)

    def close(self) -> None:
        """Idempotent. The socket's file goes too, if it is still this one's."""
        if self._listener.fileno() < 0:
            return
        for fd in list(self._clients):
            self._drop(fd)
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def close_in_child(self) -> None:
        """After a fork: close the descriptors and leave the file to its owner."""
        for client in self._clients.values():
            client.connection.close()
        self._clients.clear()
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # gone again, or we are out of descriptors: the loop asks again
        connection.setblocking(False)
        if peer_credentials(connection)[1] not in (os.getuid(), 0):
            connection.close()  # the mode of the socket keeps them out already; some file systems ignore it
            return
        if len(self._clients) >= CLIENTS:
            self._drop(next(iter(self._clients)))  # dicts keep their order: the first is the oldest
        self._clients[connection.fileno()] = _Client(connection)

    def _read(self, client: _Client) -> None:
        try:
            data = client.connection.recv(REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client.connection.fileno())
            return
        client.incoming += data
        line, newline, _ = client.incoming.partition(b"\n")
        if newline:
            client.outgoing = memoryview(encode(self._answer(bytes(line))))
            self._write(client)
        elif len(client.incoming) > REQUEST_BYTES:
            self._drop(client.connection.fileno())

    def _answer(self, line: bytes) -> Reply:
        try:
            return self._handler(decode_request(line))
        except msgspec.DecodeError as error:
            return ErrorReply(f"not a request that this version knows: {error}")
        except XserveError as error:
            return ErrorReply(str(error))
        except Exception as error:
            # The supervisor must outlive any question: the asker is told, the tree goes on.
            return ErrorReply(f"{type(error).__name__}: {error}")

    def _write(self, client: _Client) -> None:
        assert client.outgoing is not None
        try:
            sent = client.connection.send(client.outgoing)
        except BlockingIOError:
            return
        except OSError:
            self._drop(client.connection.fileno())
            return
        client.outgoing = client.outgoing[sent:]
        if not client.outgoing:
            self._drop(client.connection.fileno())

    def _drop(self, fd: int) -> None:
        self._clients.pop(fd).connection.close()


def peer_credentials(connection: socket.socket) -> tuple[int, int, int]:
    """pid, uid and gid of the other side: who connected, or who listens."""
    size = _UCRED.size
    pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid, gid


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        path.unlink(missing_ok=True)  # the caller holds the lock of the directory: what is here is a dead owner's
        listener.bind(str(path))
        # Nobody can connect before listen(), so there is no moment at which the socket is open to others.
        path.chmod(0o600)
        listener.listen(CLIENTS)
    except OSError as error:
        listener.close()
        raise HostError(f"cannot make the control socket {path}: {error.strerror or error}") from error
    return listener
