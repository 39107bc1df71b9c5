from __future__ import annotations

import os
import select
import signal
import socket
from pathlib import Path

import pytest

from launcher.errors import HostError, UsageError
from launcher.process import listen
from launcher.process.sd_notify import Notifier
from launcher.process.signals import SignalPipe


def test_a_taken_port_names_its_holder() -> None:
    with listen.listen_tcp("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(HostError, match=rf"--port {port} is taken on 127\.0\.0\.1 by pid {os.getpid()} "):
            listen.listen_tcp("127.0.0.1", port)


def test_bad_hosts() -> None:
    with pytest.raises(UsageError, match=r"--host 'no\.such\.invalid' does not resolve"):
        listen.listen_tcp("no.such.invalid", 0)
    with pytest.raises(UsageError, match=r"--host 203\.0\.113\.7 is no address of this machine"):
        listen.listen_tcp("203.0.113.7", 0)


def test_ipv6() -> None:
    with listen.listen_tcp("::1", 0) as sock:
        assert sock.family == socket.AF_INET6


def test_unix_socket_is_private_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "http.sock")
    listen.listen_unix(path).close()
    with listen.listen_unix(path):
        assert os.stat(path).st_mode & 0o777 == 0o600
        with pytest.raises(HostError, match="taken by a live server"):
            listen.listen_unix(path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is no socket"):
        listen.listen_unix(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("abstract", [False, True])
def test_notifications(tmp_path: Path, abstract: bool) -> None:
    address = f"@xserve-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + address[1:] if abstract else address)
        manager.settimeout(1)
        notifier = Notifier(address)
        notifier.status("loading\nmodel")
        notifier.status("loading\nmodel")
        notifier.extend_timeout(2.5)
        notifier.ready()
        notifier.stopping()
        notifier.close()
        got = [manager.recv(1000).decode() for _ in range(4)]
    assert got == [
        "STATUS=loading model",
        "EXTEND_TIMEOUT_USEC=2500000",
        "READY=1\nSTATUS=ready",
        "STOPPING=1\nSTATUS=stopping",
    ]


def test_no_manager_is_no_error(tmp_path: Path) -> None:
    for address in (None, "", str(tmp_path / "gone")):
        notifier = Notifier(address)
        notifier.ready()
        notifier.close()


def test_signals_become_bytes() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    pipe = SignalPipe([signal.SIGUSR1, signal.SIGUSR2])
    try:
        assert pipe.read() == []
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
        select.select([pipe], [], [], 5)
        got = pipe.read()
        assert set(got) == {signal.SIGUSR1, signal.SIGUSR2}
    finally:
        pipe.close()
    assert signal.getsignal(signal.SIGUSR1) == before
    pipe.close()
