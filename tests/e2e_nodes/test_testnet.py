"""The nets themselves: what they do is what the other tests rest on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from _testnet import Testnet, namespaces, remove_stale

from tests.conftest import eventually
from tests.e2e_nodes.conftest import MakeNet

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"


def reaches(net: Testnet, address: str, port: int) -> str:
    """What node 1 meets there."""
    with net.inside(1):
        try:
            socket.create_connection((address, port), timeout=0.3).close()
        except TimeoutError:
            return "silence"
        except ConnectionRefusedError:
            return "refused"
    return "there"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["ipv4", "ipv6"])
def test_drops_and_cables(make_net: MakeNet, family: socket.AddressFamily) -> None:
    net = make_net(2, ipv6=True)
    address = net.ipv4(0) if family == socket.AF_INET else net.ipv6(0)
    with net.inside(0):
        listening = [socket.create_server((address, port), family=family) for port in (5000, 5001)]
    with listening[0], listening[1]:
        assert [reaches(net, address, port) for port in (5000, 5001, 5002)] == ["there", "there", "refused"]
        net.drop(0, 5000)
        assert [reaches(net, address, port) for port in (5000, 5001, 5002)] == ["silence", "there", "refused"]
        net.admit(0)
        net.drop(0)
        assert [reaches(net, address, port) for port in (5000, 5002)] == ["silence", "silence"]
        net.admit(0)
        net.cable(1, there=False)
        assert reaches(net, address, 5000) == "silence"
        net.cable(1, there=True)
        eventually(lambda: reaches(net, address, 5000) == "there", 5)


def test_a_node_has_a_name_and_counts_its_bytes(net: Testnet) -> None:
    done = subprocess.run(net.command(1, "hostname"), capture_output=True, text=True, check=True)
    assert done.stdout == "node1\n"
    with net.inside(0), socket.create_server((net.ipv4(0), 0)) as listening:
        with net.inside(1):
            line = socket.create_connection(listening.getsockname())
        taken, _ = listening.accept()
        before = net.sent(1)
        with line, taken:
            line.sendall(bytes(100_000))
            left = 100_000
            while left:
                left -= len(taken.recv(left))
    assert 100_000 <= net.sent(1) - before < 110_000


@pytest.mark.usefixtures("net")
def test_what_a_killed_user_left_is_removed() -> None:
    program = f"import sys; sys.path.append({str(SCRIPTS)!r})\nfrom _testnet import Testnet\nnet = Testnet(2)\n"
    program += "import subprocess\nchild = subprocess.Popen(net.command(1, 'sleep', '600'))\n"
    program += "print(net.prefix, child.pid, flush=True)\ninput()\n"
    user = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert user.stdin is not None
    assert user.stdout is not None
    with user.stdin, user.stdout:
        prefix, child = user.stdout.readline().split()
        assert [name for name in namespaces() if name.startswith(prefix)] != []
        remove_stale()
        assert [name for name in namespaces() if name.startswith(prefix)] != []  # it lives
        user.send_signal(signal.SIGKILL)
        user.wait(10)
    remove_stale()
    assert [name for name in namespaces() if name.startswith(prefix)] == []
    eventually(lambda: not os.path.exists(f"/proc/{child}"), 5, "its processes are gone")


@pytest.mark.usefixtures("net")
def test_by_hand() -> None:
    def testnet(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPTS / "testnet.py"), "--name", f"t{os.getpid()}", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)

    missing = testnet("show")
    assert (missing.returncode, missing.stderr.count("\n")) == (1, 1)
    made = testnet("up", "--ipv6-only", "--second")
    try:
        assert made.returncode == 0, made.stderr
        for rank in (0, 1):
            assert (
                f"exec {rank} -- .venv/bin/xserve launch --worker reference --tp 8 --nnodes 2 --node-rank {rank}"
                in (made.stdout)
            )
        again = testnet("up")
        assert (again.returncode, "already" in again.stderr) == (1, True)
        assert testnet("exec", "1", "--", "sh", "-c", "hostname; exit 7").stdout == "node1\n"
        assert testnet("exec", "1", "--", "sh", "-c", "exit 7").returncode == 7
        assert "fd01::2" in testnet("show").stdout
        assert testnet("cable", "1", "out").returncode == 0
        assert testnet("drop", "0", "29501").returncode == 0
        assert "no node 2" in testnet("exec", "2", "--", "true").stderr
    finally:
        testnet("down")
    assert testnet("show").returncode == 1
