"""Eight workers that import torch, started the plain ways; the programs that `bench_start` runs beside ours.

    _start_peer.py spawn PORT N      multiprocessing, spawn: N `Process.start()` one after another, nobody waited for
    _start_peer.py serial PORT N     the same, each waited for before the next is started
    _start_peer.py torchrun PORT N   (under torchrun) one worker; says so to the socket that the bench listens at

The first two serve ``/readyz`` on PORT: 503 until every worker has reported, then 200.
"""

from __future__ import annotations

import http.server
import multiprocessing
import os
import socket
import sys
import threading
from multiprocessing.connection import Connection


def work(line: Connection) -> None:
    """Ready once torch is there; stays until the line is closed."""
    import torch

    line.send(torch.__version__)
    try:
        line.recv()
    except EOFError:
        return


class Front(http.server.BaseHTTPRequestHandler):
    ready = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200 if self.ready.is_set() else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Silent."""


def spawn(port: int, count: int, *, serial: bool) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Front)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    context = multiprocessing.get_context("spawn")
    lines = []
    for _ in range(count):
        here, there = context.Pipe()
        context.Process(target=work, args=(there,), daemon=True).start()
        there.close()
        lines.append(here)
        if serial:
            here.recv()
    for line in [] if serial else lines:
        line.recv()
    Front.ready.set()
    sys.stdin.read()  # until the bench has seen enough
    for line in lines:
        line.close()


def torchrun(port: int) -> None:
    """Under torchrun: import torch, report the pid, stay until the bench closes the line."""
    import torch

    assert torch.__version__
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(f"{os.getpid()}\n".encode())
        line.recv(1)


if __name__ == "__main__":
    way, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if way == "torchrun":
        torchrun(port)
    else:
        spawn(port, count, serial=way == "serial")
