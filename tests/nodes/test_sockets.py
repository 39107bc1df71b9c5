from __future__ import annotations

import contextlib
import logging
import select
from collections.abc import Iterator

import pytest
import zmq

from launcher.clock import now
from launcher.nodes.closing import last_closed
from launcher.nodes.gate import Gate
from launcher.nodes.secure import Security
from launcher.nodes.sockets import LinkEvent, Watcher, drain, has_input, make_socket, peer_of, user_of
from tests.conftest import eventually
from tests.nodes.parties import KEY, LOOPBACKS, OTHER_KEY

OPEN = Security(b"", 2, 1)
LIMIT = 4096


class Pair:
    """A bound ROUTER and a DEALER that connects to it, both watched."""

    def __init__(self, ours: Security = OPEN, theirs: Security = OPEN, address: str = "127.0.0.1") -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.gate = Gate(self.context, ours)
        self.server = make_socket(self.context, zmq.ROUTER, ours, server=True, max_message=LIMIT)
        self.client = make_socket(self.context, zmq.DEALER, theirs, server=False, max_message=LIMIT)
        self.seen, self.felt = Watcher(self.server), Watcher(self.client)
        where = f"tcp://[{address}]" if ":" in address else f"tcp://{address}"
        self.port = self.server.bind_to_random_port(where)
        self.client.connect(f"{where}:{self.port}")

    def close(self) -> None:
        for watcher in (self.seen, self.felt):
            watcher.close()
        self.server.close()
        self.client.close()
        self.gate.close()
        self.context.term()


@contextlib.contextmanager
def pair(*args: object) -> Iterator[Pair]:
    made = Pair(*args)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def watch(watcher: Watcher, kind: str) -> LinkEvent:
    """By its descriptor, as a poll loop does."""
    poll, end = select.poll(), now() + 5
    poll.register(watcher.fileno(), select.POLLIN)
    while now() < end:
        for event in watcher.events():
            if event.kind == kind:
                return event
        poll.poll(100)
    raise AssertionError(f"no event {kind!r}")


@pytest.mark.parametrize("address", LOOPBACKS)
@pytest.mark.parametrize("key", [b"", KEY], ids=["open", "key"])
def test_up_down_and_who_it_is(address: str, key: bytes) -> None:
    with pair(Security(key, 2, 0), Security(key, 2, 1), address) as made:
        watch(made.seen, "up")
        watch(made.felt, "up")
        made.client.send(b"x")
        eventually(lambda: has_input(made.server))
        ((_, frame),) = drain(made.server)
        assert peer_of(frame) == address
        assert user_of(frame) == ("1" if key else "")
        made.felt.close()
        made.client.close()
        down = watch(made.seen, "down")
        assert down.peer.startswith(f"{address} port ")


def test_every_option() -> None:
    with pair() as made:
        for socket in (made.server, made.client):
            assert socket.getsockopt(zmq.LINGER) == 0
            assert socket.getsockopt(zmq.IPV6) == 1
            assert socket.getsockopt(zmq.MAXMSGSIZE) == LIMIT
            assert socket.getsockopt(zmq.HANDSHAKE_IVL) == 5000
            assert socket.getsockopt(zmq.RECONNECT_IVL) == 100
            assert socket.getsockopt(zmq.IMMEDIATE) == 0
            assert socket.getsockopt(zmq.TCP_KEEPALIVE) == 1
            assert socket.getsockopt(zmq.SNDHWM) == socket.getsockopt(zmq.RCVHWM) == 1000
        with pytest.raises(zmq.ZMQError):
            made.server.send_multipart([b"nobody", b""])


def test_a_frame_that_is_too_long_ends_its_senders_connection() -> None:
    with pair() as made:
        watch(made.seen, "up")
        made.client.send(b"x" * (LIMIT + 1))
        watch(made.felt, "down")
        assert not has_input(made.server)


def test_no_message_is_missed_between_drain_and_wait() -> None:
    """The edge goes with any call on the socket: whoever only polls the descriptor would hang here."""
    with pair() as made:
        poll = select.poll()
        poll.register(made.server.fileno(), select.POLLIN)
        got = 0
        for number in range(300):
            made.client.send(b"x" * (number % 7))
            made.client.send(b"y")
            end = now() + 5
            while got < 2 * (number + 1):
                assert now() < end
                with contextlib.suppress(zmq.ZMQError):
                    made.server.send_multipart([b"nobody", b""])  # takes the edge
                if not has_input(made.server):
                    poll.poll(4000)
                got += len(list(drain(made.server, 1)))
        assert not has_input(made.server)


def test_drain_gives_no_more_than_it_is_asked_for_and_never_blocks() -> None:
    with pair() as made:
        assert list(drain(made.server)) == []
        for _ in range(10):
            made.client.send(b"x")
        got: list[list[zmq.Frame]] = []
        eventually(lambda: has_input(made.server))
        got += drain(made.server, 3)
        assert len(got) <= 3
        eventually(lambda: got.extend(drain(made.server)) or len(got) == 10)


@pytest.mark.parametrize(
    ("theirs", "why"),
    [(OPEN, "one end has a cluster key"), (Security(OTHER_KEY, 2, 1), "its cluster key is another one")],
)
def test_who_was_refused_is_named_now_and_then(theirs: Security, why: str, caplog: pytest.LogCaptureFixture) -> None:
    with pair(Security(KEY, 2, 0), theirs) as made:
        refused = watch(made.seen, "refused")
        assert why in refused.why
        assert made.seen.refused >= 1
        with caplog.at_level(logging.WARNING):
            for moment in (100.0, 100.5, 109.9, 110.0, 110.1):
                made.seen.log_refusals([refused, refused, LinkEvent("down")], moment)
            for moment in (110.5, 111.0):  # somebody else
                made.seen.log_refusals([LinkEvent("refused", "other", "10.0.0.9 port 1")], moment)
        first, second, third = (record.message for record in caplog.records)
        assert first.startswith("refused a connection from 127.0.0.1 port ")
        assert why in first
        assert second.endswith("(5 more since the last such line)")
        assert third.startswith("refused a connection from 10.0.0.9 port 1: other (4 more")


def test_a_node_of_another_launch_with_the_servers_key() -> None:
    """It passes the first word of the handshake, and the gate denies it."""
    with pair(Security(KEY, 2, 0), Security(KEY, 5, 4)) as made:
        assert watch(made.felt, "refused").why == "its key is none of this launch's"
        assert watch(made.seen, "refused").why == "its key is none of this launch's"
        assert made.gate.refused >= 1


def test_the_kernel_knows_nobody_at_a_port_that_was_never_used() -> None:
    assert last_closed(1) == ""


def test_a_watcher_that_nobody_reads_does_not_hang_the_end() -> None:
    made = Pair(Security(KEY, 2, 0), Security(OTHER_KEY, 2, 1))
    eventually(lambda: made.seen.has_input and made.felt.has_input)
    made.close()
