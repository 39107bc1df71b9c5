"""The socket pair between a child and its parent: whole messages with descriptors, in order, EOF at death.

SOCK_SEQPACKET keeps the message borders and ties descriptors (SCM_RIGHTS) to the message they came with. A message
that would not fit a socket buffer travels in a memfd of its own.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from launcher.clock import Deadline
from launcher.errors import DeadlineError
from launcher.process.reports import DownMessage, UpMessage

_INLINE, _IN_MEMFD = b"\x00", b"\x01"
_MAX_INLINE = 64 * 1024
"""Bytes; the kernel's default socket buffer holds three of these."""
_MAX_FDS = 250
"""The kernel passes at most 253 descriptors in one message (SCM_MAX_FD)."""

_RIGHTS_SPACE = socket.CMSG_SPACE((_MAX_FDS + 1) * array.array("i").itemsize)

In = TypeVar("In")
Out = TypeVar("Out")


def pair() -> tuple[socket.socket, socket.socket]:
    """(parent's end, child's end), both close-on-exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Channel(Generic[Out, In]):
    """One end. Sends `Out`, receives `In`. Not to be shared by threads that receive."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[In]) -> None:
        self._sock = sock
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        sock.setblocking(False)

    def fileno(self) -> int:
        """-1 when closed."""
        return self._sock.fileno()

    def send(self, message: Out, fds: Sequence[int] = (), deadline: Deadline | None = None) -> None:
        """Send `message` with copies of `fds`.

        Raises BrokenPipeError when the other end is gone, DeadlineError when it does not read (default 10 s).
        """
        if len(fds) > _MAX_FDS:
            raise ValueError(f"{len(fds)} descriptors in one message; the kernel passes at most {_MAX_FDS}")
        data = self._encoder.encode(message)
        if len(data) <= _MAX_INLINE:
            self._send(_INLINE + data, fds, deadline or Deadline.after(10))
            return
        memfd = os.memfd_create("message", os.MFD_CLOEXEC)
        try:
            with open(memfd, "wb", closefd=False) as file:
                file.write(data)
            self._send(_IN_MEMFD, [*fds, memfd], deadline or Deadline.after(10))
        finally:
            os.close(memfd)

    def _send(self, data: bytes, fds: Sequence[int], deadline: Deadline) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while True:
            try:
                self._sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                if deadline.expired:
                    raise DeadlineError(f"the other end has not read for {deadline.seconds:.0f} s") from None
                _wait(self._sock, select.POLLOUT, deadline)
            except (ConnectionResetError, BrokenPipeError, ConnectionRefusedError) as error:
                raise BrokenPipeError("the other end is gone") from error

    def recv_nowait(self) -> tuple[In, list[int]] | None:
        """The next message and its descriptors (close-on-exec, now ours); None when there is none yet.

        Raises EOFError when the other end is gone and everything it sent was read.
        """
        try:
            data, fds = self._receive()
        except BlockingIOError:
            return None
        except OSError as error:
            raise EOFError("the other end is gone") from error
        if not data:
            raise EOFError("the other end is gone")
        if data[:1] == _IN_MEMFD:
            with open(fds.pop(), "rb") as file:
                file.seek(0)
                data = _INLINE + file.read()
        return self._decoder.decode(data[1:]), fds

    def _receive(self) -> tuple[bytes, list[int]]:
        try:
            data, rights, _, _ = self._sock.recvmsg(_MAX_INLINE + 1, _RIGHTS_SPACE, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            # It died without having read all that we sent. The kernel tells this once, and before what the other end
            # had said, its failure report above all: that is still there to be read.
            data, rights, _, _ = self._sock.recvmsg(_MAX_INLINE + 1, _RIGHTS_SPACE, socket.MSG_CMSG_CLOEXEC)
        return data, _descriptors(rights)

    def recv(self, deadline: Deadline) -> tuple[In, list[int]]:
        """Like `recv_nowait`, waiting until the deadline (DeadlineError)."""
        while (got := self.recv_nowait()) is None:
            if deadline.expired:
                raise DeadlineError(f"no message within {deadline.seconds:.1f} s")
            _wait(self._sock, select.POLLIN, deadline)
        return got

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()


def _descriptors(rights: list[tuple[int, int, bytes]]) -> list[int]:
    """Not socket.recv_fds: before Python 3.12 it drops its flags, and the descriptors would survive an exec."""
    fds = array.array("i")
    for level, kind, data in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def _wait(sock: socket.socket, events: int, deadline: Deadline) -> None:
    poll = select.poll()
    poll.register(sock, events)
    poll.poll(deadline.remaining_ms())


ParentChannel = Channel[DownMessage, UpMessage]
"""The parent's end: sends down, receives up."""
ChildChannel = Channel[UpMessage, DownMessage]
"""The child's end: sends up, receives down."""


def parent_end(sock: socket.socket) -> ParentChannel:
    return Channel(sock, msgspec.msgpack.Decoder(UpMessage))


def child_end(sock: socket.socket) -> ChildChannel:
    return Channel(sock, msgspec.msgpack.Decoder(DownMessage))
