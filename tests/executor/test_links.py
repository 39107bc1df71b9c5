"""The data link between two ends in one process, and who else may knock."""

from __future__ import annotations

import random
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from launcher.errors import NodeLostError
from launcher.executor.core_link import CoreLink
from launcher.executor.data_link import NodeLink
from launcher.executor.frames import ANSWER, CALL, HEAD, MAGIC, NO_RANK, Lost, Whole, cut
from launcher.nodes.messages import EndGroup, GroupReady, Hello, encode
from launcher.nodes.secure import Security
from tests.conftest import eventually

TOKEN, GENERATION = b"t" * 16, 3


@contextmanager
def core(key: bytes = b"", nodes: tuple[int, ...] = (1,)) -> Iterator[CoreLink]:
    link = CoreLink("127.0.0.1", Security(key, 3, 0), generation=GENERATION, token=TOKEN, nodes=nodes)
    try:
        yield link
    finally:
        link.close()


@contextmanager
def node(
    link: CoreLink, rank: int = 1, token: bytes = TOKEN, generation: int = GENERATION, key: bytes = b""
) -> Iterator[NodeLink]:
    made = NodeLink(link.endpoint, Security(key, 3, rank), Hello(token, generation, rank))
    try:
        yield made
    finally:
        made._why = made._why or "the test is over"  # nothing has to linger
        made.close()


@contextmanager
def stranger(link: CoreLink) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    try:
        socket.connect(link.endpoint)
        yield socket
    finally:
        context.destroy(linger=0)


def welcomed(link: CoreLink, other: NodeLink) -> None:
    eventually(lambda: (link.read(), other.read(), other.welcome)[2])


def next_of(link: CoreLink) -> tuple[int, object]:
    found: list[tuple[int, object]] = []

    def read() -> bool:
        got = link.read()
        if got is not None:
            found.append(got)
        return bool(found)

    eventually(read)
    return found[0]


def next_call(other: NodeLink) -> Whole | EndGroup:
    found: list[Whole | EndGroup] = []

    def read() -> bool:
        got = other.read()
        if got is not None:
            found.append(got)
        return bool(found)

    eventually(read)
    return found[0]


@pytest.mark.parametrize("key", [b"", b"k" * 32], ids=["open", "key"])
def test_both_ways(key: bytes) -> None:
    with core(key) as link, node(link, key=key) as other:
        welcomed(link, other)
        link.send(link.cut((9, b"plan", [memoryview(bytes(3 << 20))])))
        link.send(link.cut((8, b"next", [])))
        eventually(link.flush)
        first, second = next_call(other), next_call(other)
        assert isinstance(first, Whole)
        assert isinstance(second, Whole)
        assert (first.tag, bytes(first.head), len(first.buffers[0])) == (9, b"plan", 3 << 20)
        assert (second.tag, bytes(second.head), second.buffers) == (8, b"next", [])
        other.offer(5, (4, b"answer", []))
        other.say(GroupReady())
        rank, item = next_of(link)
        assert isinstance(item, Whole)
        assert (rank, item.rank, bytes(item.head)) == (1, 5, b"answer")
        assert next_of(link) == (1, GroupReady())
        other.offer_all([(6, (4, b"six", [])), (5, (7, b"five", []))])
        found = [next_of(link)[1]]
        assert link.has_news()  # what is left of the frame
        found.append(next_of(link)[1])
        assert [(w.rank, w.tag, bytes(w.head)) for w in found if isinstance(w, Whole)] == [
            (5, 7, b"five"),
            (6, 4, b"six"),
        ]

        # What was sent before the end is read before the end is told.
        link.send(link.cut((8, b"last", [])))
        link.say(EndGroup("", GENERATION, "over"))
        link.close()
        last, end = next_call(other), next_call(other)
        assert isinstance(last, Whole)
        assert isinstance(end, EndGroup)
        with pytest.raises(NodeLostError, match=r"node 0's engine core is gone \(tcp://127\.0\.0\.1:\d+\)") as error:
            eventually(other.read)
        assert error.value.exit_code == 69


def test_a_node_that_goes_is_told_behind_what_it_said() -> None:
    with core() as link:
        with node(link) as other:
            welcomed(link, other)
            other.offer(5, (4, b"answer", []))
            eventually(lambda: not other.is_held_back)
            eventually(lambda: link.has_news())
        assert isinstance(next_of(link)[1], Whole)
        assert next_of(link) == (1, Lost("its connection was closed"))
        assert link.nodes == set()


def test_who_is_let_in() -> None:
    with core(nodes=(1, 2)) as link:
        with node(link, token=b"u" * 16), node(link, generation=2), node(link, rank=3):
            eventually(lambda: (link.read(), link.dropped.total() == 3)[1])
        with node(link) as first:
            welcomed(link, first)
            with node(link) as again:
                eventually(lambda: (link.read(), link.dropped["second"] == 2)[1])
                assert again.read() is None
                assert not again.welcome
                assert link.nodes == {1}
        assert dict(link.dropped) == {"another group": 2, "second": 2}


def test_strangers_harm_nobody() -> None:
    """Frames of every kind, and bytes of none, while a node is served."""
    choose = random.Random(6)
    good = cut(ANSWER, 5, (4, b"answer", []), 0)[0]
    kinds = [
        lambda: [choose.randbytes(choose.randrange(200))],
        lambda: [encode(GroupReady())],
        lambda: [encode(Hello(b"", 0, 1))[: choose.randrange(30)]],
        lambda: list(good),
        lambda: [HEAD.pack(MAGIC, ANSWER, 0, 4, 5, 0, 0, 1 << 30, 0), bytes(100)],
        lambda: [b"x"] * choose.randrange(1, 9),
        lambda: [b""],
    ]
    with core() as link, node(link) as other, stranger(link) as socket:
        welcomed(link, other)
        for number in range(300):
            socket.send_multipart(choose.choice(kinds)())
            if number % 10 == 0:
                other.offer(5, (4, b"answer", []))
        answers = 0

        def count() -> bool:
            nonlocal answers
            while (got := link.read()) is not None:
                assert got[0] == 1
                answers += isinstance(got[1], Whole)
            return answers == 30 and link.dropped.total() == 300

        eventually(count)
        assert link.nodes == {1}


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([b"junk"], "not ours"),
        ([HEAD.pack(MAGIC, ANSWER, 0, 4, 5, 0, 7, 1, 0), b"x"], "frame 7 came, 0 is missing"),
        ([HEAD.pack(MAGIC, CALL, 0, 4, NO_RANK, 0, 0, 1, 0), b"x"], "a call where answers come"),
        ([b"a", b"b", b"c"], "a message of 4 parts"),
    ],
)
def test_a_node_that_says_what_it_must_not_loses_its_link(parts: list[bytes], why: str) -> None:
    with core() as link, node(link) as other:
        welcomed(link, other)
        other._socket.send_multipart(parts)
        rank, item = next_of(link)
        assert isinstance(item, Lost)
        assert (rank, why in item.why) == (1, True)
        assert link.dropped["malformed"] == 1


def test_a_frame_that_is_too_long_ends_the_connection_unread() -> None:
    with core() as link, node(link) as other:
        welcomed(link, other)
        other._socket.send(bytes(10 << 20))
        assert next_of(link) == (1, Lost("its connection was closed"))


def test_a_node_that_takes_nothing_is_known_and_memory_is_bounded() -> None:
    with core() as link, node(link) as other:
        welcomed(link, other)
        chunk = bytes(4 << 20)
        sent = 0
        while link.flush() and sent < 200:
            link.send(link.cut((9, chunk, [])))
            sent += 1
            select.select([], [], [], 0.01)
        assert 20 < sent < 200  # about twice HWM frames of a MiB
        assert link.laggards() == [1]
        taken = 0
        end = time.monotonic() + 20
        while taken < sent and time.monotonic() < end:
            taken += other.read() is not None
            link.flush()
        assert taken == sent


def test_nobody_there() -> None:
    with core() as link:
        endpoint = link.endpoint
    other = NodeLink(endpoint, Security(b"", 2, 1), Hello(TOKEN, GENERATION, 1))
    try:
        assert other.read() is None
        other._deadline = type(other._deadline).after(0)
        with pytest.raises(NodeLostError, match="no answer within 15 s"):
            other.read()
    finally:
        other.close()
