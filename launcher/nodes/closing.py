"""Who was on the other end of a TCP connection that has just been closed, as the kernel remembers it.

ZMQ tells of an accepted connection by its descriptor, and a refused one is closed before anybody can ask who it was.
But the end that closes first keeps the connection for a minute (TIME_WAIT), and its clock runs down: the one that has
the most time left is the newest.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_CLOSING = {"04", "05", "06"}
"""FIN_WAIT1, FIN_WAIT2, TIME_WAIT: we have closed it."""


def last_closed(port: int) -> str:
    """``10.0.0.9 port 41234``, the peer of the newest connection to our `port` that we closed; empty: none is known."""
    newest, peer = -1, ""
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] in _CLOSING and int(fields[1].rpartition(":")[2], 16) == port:
                    left = int(fields[5].partition(":")[2], 16)
                    if left > newest:
                        newest, peer = left, fields[2]
    return _readable(peer) if peer else ""


def _readable(field: str) -> str:
    address, _, port = field.partition(":")
    # The kernel writes each 32-bit word in the machine's own order.
    words = bytes.fromhex(address)
    raw = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    literal = socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
    return f"{literal.removeprefix('::ffff:')} port {int(port, 16)}"
