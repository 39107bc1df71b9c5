"""Whatever comes over the network: nothing raises, what is dropped is counted, memory stays flat."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import tracemalloc
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.clock import now
from launcher.nodes import messages
from launcher.nodes.agreement import Ours
from launcher.nodes.follower import Accepted, Follower, Started
from launcher.nodes.leader import Leader, Lost, Ready
from launcher.nodes.membership import Membership
from launcher.nodes.messages import MAGIC, MAX_CONTROL, PROTOCOL, Member, Reader, WireError, encode
from launcher.nodes.secure import Security
from launcher.nodes.sockets import make_socket
from tests.nodes.parties import Parties, free_port, group, parties
from tests.nodes.parties import settings as node_settings

UNIONS = {
    "FromFollower": messages.FromFollower,
    "FromLeader": messages.FromLeader,
    "FromCore": messages.FromCore,
    "FromAgent": messages.FromAgent,
    "OnData": messages.OnData,
    "ToData": messages.ToData,
}
WORDS = [
    messages.Join(1, 2, PROTOCOL, "1", "host", "10.0.0.2", "owner", "life", {"--a": "b"}),
    messages.Beat(1, "life", 3, 4, "phase"),
    messages.Leaving(1, "life", 4, "why"),
    messages.Accepted("launch", "life", (Member(0, "h", "a"),)),
    messages.Refused("life", "why"),
    messages.LeaderBeat("launch", 3, (Member(0, "h", "a"),)),
    messages.StartGroup("launch", 1, b"t", "tcp://127.0.0.1:1", "127.0.0.1", 2),
    messages.EndGroup("launch", 1, "why"),
    messages.OpenGroup(1, b"t", "e", "h", 2),
    messages.GroupWaiting(1, (), (1,)),
    messages.Hello(b"t", 1, 1),
    messages.Places((messages.Place(1, 2, 0.5, False),)),
]
GOOD = [encode(word) for word in WORDS]


@st.composite
def mangled(draw: st.DrawFn) -> bytes:
    """A good frame that was cut, lengthened, changed, or is of another version."""
    frame = draw(st.sampled_from(GOOD))
    kind = draw(st.sampled_from(["as it is", "cut", "longer", "flipped", "version", "deep", "wrong types"]))
    if kind == "cut":
        return frame[: draw(st.integers(0, len(frame) - 1))]
    if kind == "longer":
        return frame + draw(st.binary(min_size=1, max_size=40))
    if kind == "flipped":
        at = draw(st.integers(0, len(frame) - 1))
        return frame[:at] + bytes([frame[at] ^ draw(st.integers(1, 255))]) + frame[at + 1 :]
    if kind == "version":
        return b"XSN" + bytes([draw(st.integers(0, 255))]) + frame[4:]
    if kind == "deep":
        return MAGIC + b"\x91" * draw(st.integers(1, 3000))
    if kind == "wrong types":
        fields = msgspec.msgpack.decode(frame[4:])
        key = draw(st.sampled_from(sorted(fields)))
        fields[key] = draw(st.one_of(st.none(), st.integers(-(2**63), 2**64 - 1), st.text(max_size=9), st.binary()))
        return MAGIC + msgspec.msgpack.encode(fields)
    return frame


anything = st.one_of(st.binary(max_size=200), st.binary(max_size=100).map(lambda b: MAGIC + b), mangled())


@pytest.mark.parametrize("name", sorted(UNIONS))
@settings(max_examples=300, deadline=None)
@given(frame=anything)
def test_every_reader(name: str, frame: bytes) -> None:
    reader = Reader(UNIONS[name])
    try:
        word = reader.read(frame)
    except WireError:
        assert reader.dropped.total() == 1
    else:
        assert isinstance(word, UNIONS[name])  # type: ignore[arg-type]
        assert not reader.dropped


def test_an_oversized_frame_is_not_even_decoded() -> None:
    reader = Reader(messages.FromFollower, limit=1000)
    with pytest.raises(WireError, match="oversized"):
        reader.read(encode(messages.Refused("x" * 1000, "")))
    assert reader.dropped == {"oversized": 1}


small = st.integers(-2, 3)
word = st.sampled_from(["life", "next", "owner", "launch", "other", ""])
events = st.one_of(
    st.builds(
        messages.Join,
        node_rank=small,
        nnodes=st.sampled_from([3, 3, 3, 2]),
        protocol=st.sampled_from([PROTOCOL, PROTOCOL, 99]),
        version=st.just("1"),
        host=st.text(max_size=3),
        address=word,
        owner=word,
        incarnation=word,
        agreement=st.just({}),
        generation=small,
        launch_id=word,
    ),
    st.builds(messages.Beat, node_rank=small, incarnation=word, number=st.integers(-1, 30), generation=small),
    st.builds(messages.Leaving, node_rank=small, incarnation=word, number=st.integers(-1, 30), reason=word),
    st.tuples(st.sampled_from(["open", "close", "tick", "gone"]), small),
)


@settings(max_examples=300, deadline=None)
@given(story=st.lists(st.tuples(events, st.floats(0, 30)), max_size=40))
def test_the_table_takes_every_story(story: list[tuple[object, float]]) -> None:
    table = Membership(
        Ours(Member(0, "head", "a"), 3, "1", {}),
        "launch",
        silence_limit=10,
        join_timeout=60,
        time_of_day=lambda at: f"{at:.1f}",
    )
    at = 0.0
    for event, later in story:
        at += later
        match event:
            case messages.Join():
                table.join(b"p", "", event, at)
            case messages.Beat():
                table.beat(b"p", event, at)
            case messages.Leaving():
                table.leaving(event, at)
            case ("open", generation):
                table.open(max(0, generation), at)
            case ("close", generation):
                table.close(generation)
            case ("gone", rank):
                table.gone(1 + rank % 2)
            case _:
                table.tick(at)
        assert not table.is_complete or table.wanted >= 0
        assert {member.node_rank for member in table.members} >= {0}
        assert set(table.missing) <= {1, 2}
        for rank in (1, 2):
            assert len(table.node(rank).past) <= 32


# --- floods ----------------------------------------------------------------------------------------------------------

FRAMES = 20_000
IDENTITIES = 50
GROWTH = 2 << 20
"""Bytes."""


@contextlib.contextmanager
def raw_clients(port: int) -> Iterator[list[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = []
    for _ in range(IDENTITIES):
        client = make_socket(context, zmq.DEALER, Security(b"", 2, 1), server=False, max_message=2 * MAX_CONTROL)
        client.connect(f"tcp://127.0.0.1:{port}")
        made.append(client)
    try:
        yield made
    finally:
        for client in made:
            client.close(linger=0)
        context.term()


def garbage(dice: random.Random, number: int) -> list[bytes]:
    frame = dice.choice(GOOD)
    unknown = messages.Beat(1, f"{number}", number)
    stranger = messages.Join(1, 2, PROTOCOL, "1", f"h{number}", "", f"o{number}", f"i{number}", {f"--{number}": "x"})
    return dice.choice(
        [
            [dice.randbytes(dice.randrange(60))],
            [MAGIC + dice.randbytes(dice.randrange(60))],
            [frame[: dice.randrange(len(frame))]],
            [b"XSN\x09" + frame[4:]],
            [frame, frame],
            [b""],
            [encode(unknown)],
            [encode(stranger)],
            [encode(messages.Beat(dice.randrange(-5, 99), "x", 1))],
            [encode(messages.Leaving(1, "x", 1, "y" * 100))],
        ]
    )


def flood(made: Parties, leader: Leader, clients: list[zmq.Socket[bytes]], frames: list[list[bytes]]) -> None:
    end, left = now() + 60, iter(frames)
    while batch := list(itertools.islice(left, 10 * len(clients))):
        assert now() < end
        for number, words in enumerate(batch):
            clients[number % len(clients)].send_multipart(words)
        for client in clients:
            while client.poll(0):
                client.recv_multipart()
        made.turn(0)
        for told in made.told.values():
            del told[:-20]
    made.until(lambda: leader.until_timer(now()) > 0)


def test_a_flood_of_strangers_costs_no_memory_and_no_node() -> None:
    port = free_port()
    with parties() as made, raw_clients(port) as clients:
        leader = made.leader(port, launch_id="the real one")
        one = made.follower(port)
        leader.open_group(group(0))
        made.until(lambda: made.of(one, Started) and made.of(leader, Ready))
        dice = random.Random(0)
        frames = [garbage(dice, number) for number in range(FRAMES)]
        flood(made, leader, clients, frames[: FRAMES // 10])
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            dropped = leader.dropped.total()
            flood(made, leader, clients, frames)
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] - before < GROWTH
        finally:
            tracemalloc.stop()
        assert leader.dropped.total() - dropped > FRAMES // 3
        assert len(leader.dropped) < 30
        assert leader.missing == ()
        assert not made.of(leader, Lost)
        assert one.generation == 0


def test_a_follower_takes_whatever_node_0_says() -> None:
    port, turns = free_port(), itertools.count()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    fake = make_socket(context, zmq.ROUTER, Security(b"", 2, 0), server=True, max_message=MAX_CONTROL)
    fake.bind(f"tcp://127.0.0.1:{port}")
    try:
        with parties() as made:
            follower: Follower = made.follower(port)
            made.until(lambda: fake.poll(0))
            peer, _ = fake.recv_multipart()

            @settings(max_examples=150, deadline=None)
            @given(frames=st.lists(st.lists(anything, min_size=1, max_size=3), min_size=1, max_size=20))
            def one_story(frames: list[list[bytes]]) -> None:
                for frame in frames:
                    fake.send_multipart([peer, *frame])
                # The last is one that it understands, so that all before it were read.
                end = f"end {next(turns)}"
                fake.send_multipart(
                    [peer, encode(messages.Accepted("launch", follower._incarnation, (Member(0, end, ""),)))]
                )
                made.until(lambda: any(member.host == end for member in follower.members))
                assert set(follower.dropped) <= {
                    *("malformed", "not ours", "other version", "not for us", "oversized"),
                    *("a number that does not ascend", "a second group"),
                }

            one_story()
    finally:
        fake.close(linger=0)
        context.term()


def test_what_was_said_before_is_not_believed_again() -> None:
    """Without a key everybody can repeat what a node has said; its number gives it away."""
    port = free_port()
    with parties() as made, raw_clients(port) as clients:
        leader = made.leader(port)
        one = made.follower(port)
        leader.open_group(group(0))
        made.until(lambda: made.of(one, Started) and made.of(leader, Ready))
        made.until(lambda: one._number >= 2)
        beat = messages.Beat(1, one._incarnation, 1, 0)
        for client in clients:
            client.send(encode(beat))
        made.until(lambda: leader.dropped["a number that does not ascend"] == IDENTITIES)
        assert not made.of(leader, Lost)
        assert made.of(one, Accepted)
        assert leader.missing == ()
        assert node_settings(1, port).node_rank == 1
