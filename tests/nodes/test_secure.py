from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import zmq

from launcher.clock import Deadline
from launcher.config import AgentSettings
from launcher.errors import HostError
from launcher.nodes import gate as gate_module
from launcher.nodes.gate import Gate, self_test
from launcher.nodes.secure import DOMAIN, Security
from launcher.nodes.sockets import make_socket
from tests.conftest import eventually
from tests.nodes.parties import KEY, OTHER_KEY, settings

NODES = 3


@contextlib.contextmanager
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield made
    finally:
        made.destroy(linger=0)
        _knocking.clear()


_knocking: list[zmq.Socket[bytes]] = []
"""Kept: a socket that nobody holds is closed."""


def server(made: zmq.Context[zmq.Socket[bytes]], security: Security) -> tuple[zmq.Socket[bytes], int]:
    socket = make_socket(made, zmq.ROUTER, security, server=True, max_message=4096)
    return socket, socket.bind_to_random_port("tcp://127.0.0.1")


def knock(made: zmq.Context[zmq.Socket[bytes]], port: int, security: Security) -> zmq.Socket[bytes]:
    client = make_socket(made, zmq.DEALER, security, server=False, max_message=4096)
    client.connect(f"tcp://127.0.0.1:{port}")
    client.send(b"hello")
    _knocking.append(client)
    return client


def zap_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "zap"]


def test_each_node_of_the_launch_gets_in_by_its_own_key_and_nobody_else() -> None:
    with context() as made:
        security = Security(KEY, NODES, 0)
        gate = Gate(made, security)
        socket, port = server(made, security)
        for rank in range(NODES):
            knock(made, port, Security(KEY, NODES, rank))
            assert socket.poll(5000)
            _, frame = socket.recv_multipart(copy=False)
            assert frame.get("User-Id") == str(rank)
        # Of the same secret, but no node of this launch.
        knock(made, port, Security(KEY, NODES + 1, NODES))
        eventually(lambda: gate.refused, what="a refusal")
        knock(made, port, Security(OTHER_KEY, NODES, 1))
        knock(made, port, Security(b"", NODES, 1))
        knock(made, port, Security(KEY, NODES, 2))
        assert socket.poll(5000)
        assert socket.recv_multipart(copy=False)[1].get("User-Id") == "2"
        assert not socket.poll(200)
        gate.close()
        gate.close()
    assert not zap_threads()


def test_without_a_gate_nobody_gets_in() -> None:
    """ZMQ_ZAP_ENFORCE_DOMAIN: without it, libzmq would let everybody in who knows the server's public key."""
    with context() as made:
        security = Security(KEY, NODES, 0)
        socket, port = server(made, security)
        knock(made, port, security)
        assert not socket.poll(500)
        loose = made.socket(zmq.ROUTER)
        security.server(loose)
        loose.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 0)
        knock(made, loose.bind_to_random_port("tcp://127.0.0.1"), security)
        assert loose.poll(5000), "libzmq has become strict: the comment in secure.py is out of date"


def test_after_close_nobody_new_gets_in_and_who_is_in_stays() -> None:
    with context() as made:
        security = Security(KEY, NODES, 0)
        gate = Gate(made, security)
        socket, port = server(made, security)
        friend = knock(made, port, security)
        assert socket.poll(5000)
        socket.recv_multipart()
        gate.close()
        knock(made, port, security)
        friend.send(b"again")
        assert socket.poll(5000)
        assert socket.recv_multipart()[1] == b"again"
        assert not socket.poll(300)


def test_the_thread_ends_with_its_context() -> None:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gate = Gate(made, Security(KEY, NODES, 0))
    made.term()
    eventually(lambda: not zap_threads(), what="the gate's thread to end")
    gate.close()


def test_one_gate_a_context() -> None:
    with context() as made:
        gate = Gate(made, Security(KEY, NODES, 0))
        with pytest.raises(HostError, match="cannot guard"):
            Gate(made, Security(KEY, NODES, 0))
        gate.close()


def test_without_a_key_there_is_no_gate_and_everybody_gets_in() -> None:
    with context() as made:
        security = Security(b"", NODES, 0)
        assert security.is_open
        gate = Gate(made, security)
        assert not zap_threads()
        self_test(made, security, Deadline.after(0))
        socket, port = server(made, security)
        knock(made, port, Security(b"", NODES, 1))
        assert socket.poll(5000)
        gate.close()


def ask(made: zmq.Context[zmq.Socket[bytes]], *frames: bytes) -> bytes:
    """A request as libzmq makes them; the status that comes back."""
    asker = made.socket(zmq.DEALER)
    asker.connect("inproc://zeromq.zap.01")
    asker.send_multipart(frames)
    assert asker.poll(5000), f"no answer to {frames}"
    answer = asker.recv_multipart()
    asker.close(linger=0)
    assert answer[1] == b"1.0"
    return answer[3]


def test_whatever_it_does_not_understand_is_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    with context() as made:
        security = Security(KEY, NODES, 0)
        gate = Gate(made, security)
        from zmq.utils import z85

        good = [b"", b"1.0", b"7", DOMAIN, b"10.0.0.1", b"", b"CURVE", z85.decode(security._keys[1][0])]
        assert ask(made, *good) == b"200"
        for place, wrong in [
            *[(1, b"2.0"), (3, b"other"), (3, b""), (6, b"NULL"), (6, b"PLAIN"), (6, b"curve")],
            *[(7, b""), (7, b"\0" * 32), (7, good[7] + b"x"), (7, good[7][:31]), (7, security._keys[1][0])],
        ]:
            assert ask(made, *good[:place], wrong, *good[place + 1 :]) == b"400", (place, wrong)
        for malformed in (good[:-1], [*good, b"more"], [b""], [b"", b"1.0"], [b"x", *good[1:]]):
            assert ask(made, *malformed) == b"400", malformed

        def fail(self: object, public: bytes) -> int:
            raise RuntimeError("a bug")

        monkeypatch.setattr(Security, "rank_of", fail)
        assert ask(made, *good) == b"400"
        monkeypatch.undo()
        assert ask(made, *good) == b"200", "it must go on after an exception"
        assert zap_threads()
        gate.close()


def test_self_test_passes_behind_a_gate_and_fails_without() -> None:
    security = Security(KEY, NODES, 1)
    with context() as made:
        gate = Gate(made, security)
        self_test(made, security, Deadline.after(10))
        gate.close()
    with context() as made, pytest.raises(HostError, match="no verdict on the right key"):
        self_test(made, security, Deadline.after(0.3))


def test_self_test_finds_a_gate_that_lets_everybody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    security = Security(KEY, NODES, 0)
    with context() as made:
        monkeypatch.setattr(Gate, "_judge", lambda self, frames: 1)
        gate = Gate(made, security)
        with pytest.raises(HostError, match="does not protect"):
            self_test(made, security, Deadline.after(10))
        gate.close()


def test_self_test_finds_a_server_without_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    security = Security(KEY, NODES, 0)
    with context() as made:
        monkeypatch.setattr(Security, "server", lambda self, socket: None)
        monkeypatch.setattr(Security, "client", lambda self, socket: None)
        gate = Gate(made, security)
        with pytest.raises(HostError, match="does not protect"):
            self_test(made, security, Deadline.after(10))
        gate.close()


def test_keys_are_in_no_repr() -> None:
    security = Security(KEY, NODES, 0)
    shown = f"{security!r} {security}"
    assert "CURVE" in shown
    for public, secret in security._keys:
        assert public.decode() not in shown
        assert secret.decode() not in shown


def test_the_secret_is_in_no_repr_of_the_settings() -> None:
    shown = repr(AgentSettings(nodes=settings(0, 29500, key=KEY)))
    assert "with a key" in shown
    assert repr(KEY)[2:20] not in shown


def test_keys_differ_by_rank_and_secret() -> None:
    pairs = [*Security(KEY, NODES, 0)._keys, *Security(OTHER_KEY, NODES, 0)._keys]
    assert len(set(pairs)) == 2 * NODES
    assert Security(KEY, NODES, 2)._keys == pairs[:NODES]


def test_libzmq_without_curve_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda what: False)
    with pytest.raises(HostError, match="CURVE"):
        Security(KEY, NODES, 0)
    assert Security(b"", NODES, 0).is_open


def test_no_loopback_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with context() as made:
        gate = Gate(made, Security(KEY, NODES, 0))
        socket = made.socket(zmq.ROUTER)
        monkeypatch.setattr(socket, "bind", lambda address: (_ for _ in ()).throw(zmq.ZMQError(zmq.EADDRNOTAVAIL)))
        with pytest.raises(HostError, match="ip link set lo up"):
            gate_module._bind(socket)
        socket.close()
        gate.close()
