"""Who else is on the network: without the key nobody gets in, and no byte of a stranger's is ever unpickled."""

from __future__ import annotations

import os
import pickle
import random
import re
import signal
import socket
from pathlib import Path

import pytest
from _testnet import Testnet

from tests.e2e_nodes.conftest import MakeNet, Start
from tests.e2e_nodes.hosts import PORT, Host, Stream, command_lines, exit_codes, keygen, listeners

REFERENCE = ("--worker", "reference", "--tp", "4", "--nnodes", "2")


def is_told(text: str, secret: bytes) -> bool:
    return any(word in text for word in {secret.decode(errors="replace").strip(), secret.hex()} if word)


@pytest.mark.parametrize("other", ["no key", "another key"])
def test_a_third_node_without_the_key(make_net: MakeNet, start: Start, tmp_path: Path, other: str) -> None:
    net = make_net(3)
    key = keygen(tmp_path / "key")
    flags = (*REFERENCE, "--master-addr", net.ipv4(0))
    known = ("--cluster-key-file", str(key))
    zero = start(net, 0, *flags, "--node-rank", "0", *known)
    wrong = ("--cluster-key-file", str(keygen(tmp_path / "other"))) if other == "another key" else ()
    third = start(net, 2, *flags, "--node-rank", "1", *wrong)
    zero.wait_line(rf"refused.*{re.escape(net.ipv4(2))}", 20)
    one = start(net, 1, *flags, "--node-rank", "1", *known)
    zero.wait_node()
    one.wait_node()
    assert zero.is_right("behind a key", 9)
    third.wait_line(r"key", 15)
    assert third.state != "ready"
    shown = "\n".join(
        [host.output for host in (zero, one, third)]
        + command_lines([pid for host in (zero, one) for pid in host.everybody()])
    )
    assert not is_told(shown, key.read_bytes())
    for host in (zero, one):
        assert "without a key" not in host.output
        for pid in host.everybody():
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
            assert not is_told(environment, key.read_bytes())
    zero.signal(signal.SIGTERM)
    assert exit_codes((zero, one)) == [0, 0], f"{zero.output}\n{one.output}"


def test_without_a_key_there_is_one_warning(net: Testnet, start: Start) -> None:
    flags = (*REFERENCE, "--master-addr", net.ipv4(0))
    zero, one = (start(net, node, *flags, "--node-rank", str(node)) for node in (0, 1))
    zero.wait_node()
    one.wait_node()
    for host in (zero, one):
        assert len(re.findall(r"--cluster-key-file", host.output)) == 1, host.output


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.open, (str(self._path), os.O_CREAT)


_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
_READY = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"


def payloads(bomb: Path, chance: random.Random) -> list[bytes]:
    """As raw bytes, as a frame of ZMQ after its handshake, as HTTP; and noise."""
    pickled = pickle.dumps(Bomb(bomb))
    frame = b"\x00" + bytes([len(pickled)]) + pickled
    long = b"\x02" + (1 << 40).to_bytes(8, "big")
    return [
        pickled,
        _GREETING + _READY + frame,
        _GREETING + _READY + b"\x01\x00" + frame,
        _GREETING + _READY + long + pickled,
        _GREETING[:20],
        b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(pickled) + pickled,
        b"",
        *(chance.randbytes(chance.randint(1, 4000)) for _ in range(5)),
        *(_GREETING + _READY + chance.randbytes(200) for _ in range(5)),
    ]


def throw(net: Testnet, target: tuple[str, int], data: bytes) -> None:
    with net.inside(2):
        try:
            line = socket.create_connection(target, timeout=2)
        except OSError:
            return
    with line:
        line.settimeout(0.2)
        try:
            line.sendall(data)
            while line.recv(4096):
                pass
        except OSError:
            pass  # they may close on us, or say nothing: as good


@pytest.mark.parametrize("with_key", [False, True], ids=["no-key", "key"])
def test_bytes_of_strangers_do_nothing(make_net: MakeNet, start: Start, tmp_path: Path, with_key: bool) -> None:
    net = make_net(3)
    bomb = tmp_path / "boom"
    flags = [*REFERENCE, "--master-addr", net.ipv4(0), "--worker-config", "step_ms=20", "--host", "0.0.0.0"]
    flags += ["--restart", "never"]
    if with_key:
        flags += ["--cluster-key-file", str(keygen(tmp_path / "key"))]
    hosts = [start(net, node, *flags, "--node-rank", str(node)) for node in (0, 1)]
    for host in hosts:
        host.wait_node()
    stream = Stream(hosts[0], "strangers", 300)
    chance = random.Random(6)
    targets = [
        (net.ipv4(node), port)
        for node in (0, 1)
        for address, port in listeners(net, node)
        if not address.startswith("127.")
    ]
    assert (net.ipv4(0), PORT) in targets
    before = memory(hosts)
    for target in targets:
        for data in payloads(bomb, chance):
            throw(net, target, data)
    with net.inside(2):
        half_open = [socket.create_connection((net.ipv4(0), PORT), 2) for _ in range(100)]
    stream.assert_whole(60)
    assert hosts[0].is_right("afterwards", 7)
    assert not bomb.exists()
    for line in half_open:
        line.close()
    assert memory(hosts) < before + (64 << 20)
    assert "Traceback" not in hosts[0].output + hosts[1].output
    assert all(host.process.poll() is None for host in hosts)
    hosts[0].signal(signal.SIGTERM)
    assert exit_codes(hosts) == [0, 0]
    for host in hosts:
        host.assert_nothing_left()


def memory(hosts: list[Host]) -> int:
    """Resident bytes of all processes of the launch."""
    pages = 0
    for host in hosts:
        for pid in host.everybody():
            try:
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except OSError:
                continue
    return pages * os.sysconf("SC_PAGE_SIZE")
