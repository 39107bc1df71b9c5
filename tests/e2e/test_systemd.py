"""The unit's protocol: READY=1 when the last rank is, STATUS= by phase, STOPPING=1; children know nothing of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

from tests.conftest import eventually
from tests.e2e.launch import Launch


def test_notify_protocol(launch: Callable[..., Launch], runtime: Path) -> None:
    address = runtime / "notify"
    got: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(address))
        manager.settimeout(0.1)
        done = threading.Event()

        def listen() -> None:
            while not done.is_set():
                try:
                    got.append(manager.recv(4096).decode())
                except TimeoutError:
                    continue

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            launched = launch("--tp", "3", env={"NOTIFY_SOCKET": str(address)}, fault="init_progress:2:3")
            eventually(lambda: any("STATUS=Worker_DP0_PP0_TP2: device" in text for text in got), 20)
            assert not any("READY=1" in text for text in got), "not before the last rank"
            assert any(text.startswith("EXTEND_TIMEOUT_USEC=") for text in got)
            launched.wait_ready()
            eventually(lambda: any("READY=1" in text for text in got), 5)
            for pid in launched.tree():
                assert b"NOTIFY_SOCKET" not in Path(f"/proc/{pid}/environ").read_bytes()
            assert launched.stop() == 0
            eventually(lambda: any("STOPPING=1" in text for text in got), 5)
        finally:
            done.set()
            thread.join()
    assert [text for text in got if "READY=1" in text] == ["READY=1\nSTATUS=ready"]
