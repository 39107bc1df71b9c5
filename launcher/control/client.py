"""The control socket's client: blocking, each call under one deadline."""

from __future__ import annotations

import os
import select
import socket
import time

import msgspec

from launcher.clock import Deadline
from launcher.control import run_dir
from launcher.control.protocol import (
    REPLY_BYTES,
    ErrorReply,
    InstanceStatus,
    Reply,
    Request,
    StatusReply,
    StatusRequest,
    StopReply,
    StopRequest,
    decode_reply,
    encode,
)
from launcher.control.run_dir import Instance
from launcher.control.server import peer_credentials
from launcher.errors import CannotTellError, DeadlineError, NotRunningError

STOP_GRACE = 5.0
"""Seconds past the tree's own budget after which a stop has failed."""


def status(instance: Instance, deadline: Deadline) -> InstanceStatus:
    """`NotRunningError` when it is gone, `CannotTellError` when it does not answer."""
    with _connect(instance, deadline) as connection:
        reply = _ask(connection, instance, StatusRequest(), deadline)
    if not isinstance(reply, StatusReply):
        raise _cannot_tell(instance, f"it answered {reply}")
    return reply.status


def stop(instance: Instance, timeout: float | None, answer_within: Deadline) -> int:
    """Ask for a stop and wait until the supervisor is gone; its pid.

    `timeout`: seconds that the tree gets; None: its own ``--shutdown-timeout``. `DeadlineError` when it is still there
    `STOP_GRACE` seconds after them.
    """
    with _connect(instance, answer_within) as connection:
        # The kernel says who listens: a pid out of a file could be another process's by now. The descriptor is opened
        # while the connection stands, so it is surely the process that we talk to.
        pid = peer_credentials(connection)[0]
        try:
            watched = os.pidfd_open(pid)
        except OSError:
            raise NotRunningError(f"instance {instance.name!r} is not running") from None
        try:
            reply = _ask(connection, instance, StopRequest(timeout), answer_within)
            if not isinstance(reply, StopReply):
                raise _cannot_tell(instance, f"it answered {reply}")
            _wait_gone(instance, watched, Deadline.after(reply.budget + STOP_GRACE))
        finally:
            os.close(watched)
    return pid


def _wait_gone(instance: Instance, pidfd: int, deadline: Deadline) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    while not deadline.expired:
        if poll.poll(deadline.remaining_ms(1.0)):
            return
    raise DeadlineError(f"{instance.name!r}, pid {instance.pid}, is still running after {deadline.seconds:g} s")


def _connect(instance: Instance, deadline: Deadline) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        _dial(connection, str(instance.control_socket), deadline)
    except OSError as error:
        connection.close()
        if not run_dir.is_live(instance.control_socket.parent):
            raise NotRunningError(f"instance {instance.name!r} is not running") from error
        raise _cannot_tell(instance, _words(error)) from error
    return connection


def _dial(connection: socket.socket, path: str, deadline: Deadline) -> None:
    while True:
        _limit(connection, deadline)
        try:
            connection.connect(path)
        except BlockingIOError:
            # The backlog is full, and a Unix socket with a time limit does not queue for it (EAGAIN, connect(2)).
            time.sleep(0.01)
        else:
            return


def _ask(connection: socket.socket, instance: Instance, request: Request, deadline: Deadline) -> Reply:
    line = bytearray()
    try:
        _limit(connection, deadline)
        connection.sendall(encode(request))
        while not line.endswith(b"\n"):
            _limit(connection, deadline)
            data = connection.recv(1 << 16)
            if not data:
                raise ConnectionResetError("it closed the connection without an answer")
            line += data
            if len(line) > REPLY_BYTES:
                raise _cannot_tell(instance, "its answer is too long")
        reply = decode_reply(bytes(line))
    except OSError as error:
        if not run_dir.is_live(instance.control_socket.parent):
            raise NotRunningError(f"instance {instance.name!r} is not running") from error
        raise _cannot_tell(instance, _words(error)) from error
    except msgspec.DecodeError as error:
        raise _cannot_tell(instance, f"its answer is not of this version: {error}") from error
    if isinstance(reply, ErrorReply):
        raise _cannot_tell(instance, reply.message)
    return reply


def _limit(connection: socket.socket, deadline: Deadline) -> None:
    remaining = deadline.remaining()
    if remaining <= 0:
        raise TimeoutError
    connection.settimeout(min(remaining, 3600.0))


def _words(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return error.strerror or str(error)


def _cannot_tell(instance: Instance, why: str) -> CannotTellError:
    return CannotTellError(
        f"instance {instance.name!r}, pid {instance.pid}, holds {instance.path} but cannot be asked: {why}; "
        f"look at it with: ps -fp {instance.pid}"
    )
