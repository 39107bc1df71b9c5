"""Entry of a child made by exec; `spawn.exec_child` writes the command line (FD PPID ARM PATH…)."""

from __future__ import annotations

import socket
import sys
from typing import NoReturn

from launcher.process.child import run_child


def main() -> NoReturn:
    fd, parent_pid, arm = (int(text) for text in sys.argv[1:4])
    run_child(socket.socket(fileno=fd), parent_pid, arm=bool(arm))
