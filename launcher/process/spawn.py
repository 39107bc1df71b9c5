"""How a child comes to be. Each way ends in `child.run_child` with one end of a channel.

fork        a copy of this process; right only while it has one thread and no device context
spawn       a fresh interpreter by exec: nothing inherited but the environment, the path and one descriptor
forkserver  the helper forks it and hands it over (`helper.Helper`)
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Mapping

from launcher.errors import UsageError
from launcher.process import procfs
from launcher.process.child import run_child

_EXEC_LINE = "import sys; sys.path[:] = sys.argv[4:]; from {module} import main; main()"
_CHILD_FD = 3


def fork_child(sock: socket.socket, *, check: bool = True) -> int:
    """Fork; the child runs on `sock` and never returns here. Returns its pid.

    Raises UsageError when this process has other threads: the child could deadlock at its first allocation or
    parallel region.
    """
    if check and len(threads := procfs.thread_names()) > 1:
        raise UsageError(
            f"start method fork is not safe here: this process runs {len(threads)} threads"
            f" ({', '.join(threads[:6])}); use spawn or forkserver"
        )
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # or the child would write our buffered text a second time
    parent = os.getpid()
    arm = threading.current_thread() is threading.main_thread()
    pid = os.fork()
    if pid == 0:
        run_child(sock, parent, arm=arm)
    return pid


def exec_child(
    sock: socket.socket, environment: Mapping[str, str], *, module: str = "launcher.process.exec_child"
) -> int:
    """Start a fresh interpreter on `sock`; returns its pid. All other descriptors of ours are close-on-exec."""
    arm = int(threading.current_thread() is threading.main_thread())
    path = [entry or os.getcwd() for entry in sys.path]
    # -P: what lies in the working directory must not shadow the standard library; the path is ours, as given.
    arguments = [sys.executable, "-P", "-c", _EXEC_LINE.format(module=module)]
    arguments += [str(_CHILD_FD), str(os.getpid()), str(arm), *path]
    return os.posix_spawn(
        sys.executable,
        arguments,
        dict(environment),
        file_actions=[(os.POSIX_SPAWN_DUP2, sock.fileno(), _CHILD_FD)],
        setsigmask=[],
    )
