from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator

import pytest
import zmq

from launcher.clock import now
from launcher.nodes import reach
from launcher.nodes.follower import Accepted, TimedOut, Unreachable
from launcher.nodes.reach import Found, Names, Probe
from tests.nodes.parties import KEY, LOOPBACKS, Parties, free_port, parties


def look(literal: str, port: int, *, has_key: bool = False) -> tuple[Found, float]:
    began = now()
    probe = Probe(literal, port, began, has_key=has_key)
    try:
        while (found := probe.step(now())) is None:
            assert now() < began + 8
            select.select([], [], [], 0.01)
    finally:
        probe.close()
    return found, now() - began


@contextlib.contextmanager
def deaf() -> Iterator[int]:
    """A port whose first packet nobody answers: its queue of connections is full."""
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for filler in (first, second):
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        select.select([], [first], [], 1)
        yield listener.getsockname()[1]


@contextlib.contextmanager
def another_program(says: bytes = b"") -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    taken.append(connection)
                    connection.sendall(says)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)
            for connection in taken:
                connection.close()


@contextlib.contextmanager
def zmq_server(address: str, *, key: bool) -> Iterator[int]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = context.socket(zmq.ROUTER)
    server.ipv6 = True
    if key:
        server.curve_server = True
        _, server.curve_secretkey = zmq.curve_keypair()
    port = server.bind_to_random_port(f"tcp://[{address}]" if ":" in address else f"tcp://{address}")
    try:
        yield port
    finally:
        server.close(linger=0)
        context.term()


@pytest.mark.parametrize("address", LOOPBACKS)
@pytest.mark.parametrize(
    ("theirs", "ours", "what"),
    [(False, False, "open"), (True, True, "open"), (True, False, "key"), (False, True, "no key")],
)
def test_what_a_node_0_says_first(address: str, theirs: bool, ours: bool, what: str) -> None:
    with zmq_server(address, key=theirs) as port:
        assert look(address, port, has_key=ours)[0].what == what


@pytest.mark.parametrize("address", LOOPBACKS)
def test_nothing_listens(address: str) -> None:
    found, took = look(address, free_port(address))
    assert found.what == "refused"
    assert took < 1


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "CONNECT", 0.5)
    with deaf() as port:
        found, took = look("127.0.0.1", port)
    assert found.what == "no answer"
    assert "firewall" in found.text
    assert 0.4 < took < 2


@pytest.mark.parametrize("says", [b"", b"\xff", b"SSH-2.0-OpenSSH\r\n", b"\xff" * 64, b"\0" * 64])
def test_another_program(monkeypatch: pytest.MonkeyPatch, says: bytes) -> None:
    monkeypatch.setattr(reach, "GREETING", 0.5)
    with another_program(says) as port:
        found, took = look("127.0.0.1", port)
    assert found.what == "another program"
    assert "something else answers there" in found.text
    assert took < 2


def test_a_name_of_no_interface() -> None:
    assert look("fe80::1%nosuch", 1)[0].what == "unreachable"


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    literal = Names("fe80::1%eth0")
    literal.ask(now())
    assert (literal.literals, literal.is_asking) == (("fe80::1%eth0",), False)

    def answer(*args: object, **kwargs: object) -> list[tuple[object, ...]]:
        return [(0, 0, 0, "", ("10.0.0.1", 0)), (0, 0, 0, "", ("10.0.0.1", 0)), (0, 0, 0, "", ("fd00::1", 0, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    names = Names("node0")
    resolve(names)
    assert names.literals == ("10.0.0.1", "fd00::1")

    def fail(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    names.ask(now())
    begin = now()
    while names.is_asking:
        assert now() < begin + 5
        names.step(now())
    assert names.fault == "Name or service not known"
    assert names.literals == ("10.0.0.1", "fd00::1")


def resolve(names: Names) -> None:
    begin = now()
    names.ask(begin)
    while not names.step(now()):
        assert now() < begin + 5


def test_a_resolver_that_hangs_is_said_and_its_late_answer_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: release.wait(10) and [(0, 0, 0, "", ("10.0.0.1", 0))])
    names = Names("node0")
    names.ask(100.0)
    names.ask(105.0)
    assert not names.step(109.0)
    assert names.fault == ""
    assert not names.step(110.5)
    assert names.fault == "the resolver has not answered within 10 s"
    release.set()
    begin = now()
    while not names.step(120.0):
        assert now() < begin + 5
    assert (names.literals, names.fault) == (("10.0.0.1",), "")


def test_each_reason_is_told_in_time() -> None:
    """With the real limits, all at once."""
    with parties() as made, deaf() as deaf_port, another_program() as other_port:
        expected = {
            made.follower(free_port()): "refused: nothing listens there",
            made.follower(deaf_port): "no answer (firewall?)",
            made.follower(other_port): "something else answers there",
            made.follower(1, master_addr="no-such-host.invalid"): "the name 'no-such-host.invalid' does not resolve: ",
        }
        took = made.until(lambda: all(made.of(follower, Unreachable) for follower in expected), 15)
        assert took > 4
        for follower, text in expected.items():
            (told,) = made.of(follower, Unreachable)  # type: ignore[arg-type]
            assert text in told.text  # type: ignore[attr-defined]


def test_the_addresses_of_a_name_are_tried_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.nodes.line._TRY", 0.3)
    monkeypatch.setattr("launcher.nodes.line._AGAIN", 0.1)
    found = [(0, 0, 0, "", (literal, 0)) for literal in ("127.0.0.9", "127.0.0.8", "::1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    port = free_port("::1")
    with parties() as made:
        made.leader(port, master_addr="::1", key=KEY)
        one = made.follower(port, master_addr="node0", key=KEY)
        made.until(lambda: made.of(one, Accepted))
        assert one.address == "::1"


def test_the_source_address_is_the_given_one() -> None:
    port = free_port()
    with parties() as made:
        leader = made.leader(port)
        one = made.follower(port, address="127.0.0.77", iface="lo")
        made.until(lambda: made.of(one, Accepted))
        assert leader.members[1].address == one.address == "127.0.0.77"


def test_the_last_reason_is_in_the_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.nodes.line._AGAIN", 0.1)
    with parties() as made:
        one = made.follower(free_port(), join_timeout=0.6)
        made.until(lambda: made.of(one, TimedOut))
        assert "refused" in made.of(one, TimedOut)[0].text  # type: ignore[attr-defined]
        assert isinstance(made, Parties)
