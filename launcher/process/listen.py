"""The HTTP socket: bound and held by the supervisor before anything else is started, and handed down.

Bound first, so that a taken port is told before a weight is loaded; held, so that a restarted API server finds it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat

from launcher.errors import HostError, UsageError
from launcher.process import procfs

_BACKLOG = 2048
"""Connections that may wait while an API server is busy or being restarted; the kernel caps it (somaxconn)."""


def listen_tcp(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one.

    Raises UsageError for an address that does not resolve, HostError naming who holds the port.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(f"--host {host!r} does not resolve: {error.strerror or error}") from error
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the last run may be in TIME_WAIT
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise _explain(error, host, port) from error
    return sock


def _explain(error: OSError, host: str, port: int) -> Exception:
    if error.errno == errno.EADDRINUSE:
        return HostError(
            f"--port {port} is taken on {host}{port_holder(port)}; choose another with --port, or 0 for any"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return UsageError(f"--host {host} is no address of this machine; 127.0.0.1 or 0.0.0.0 always are")
    if error.errno == errno.EACCES:
        return HostError(f"--port {port} needs privileges that this user has not; ports from 1024 on do not")
    return HostError(f"cannot listen on {host} port {port}: {error.strerror or error}")


def port_holder(port: int) -> str:
    """`` by pid 123 (python -m http.server)`` where that can be read."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError, RuntimeError):
        for connection in psutil.net_connections("tcp"):
            here = connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,)
            if here and connection.pid:
                return f" by pid {connection.pid} ({procfs.command_line(connection.pid)[:80]})"
    return ""


def listen_unix(path: str) -> socket.socket:
    """A listening Unix socket with mode 0600 at `path`. A dead one's file is replaced, a live one's is refused."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _clear_stale(path)
        old = os.umask(0o177)  # the file is born private: there is no moment at which others can connect
        try:
            sock.bind(path)
        finally:
            os.umask(old)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise HostError(f"cannot listen on --uds {path}: {error.strerror or error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def _clear_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"--uds {path} exists and is no socket: choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        except OSError:
            pass  # somebody is there, but busy
    raise HostError(f"--uds {path} is taken by a live server; choose another path")
