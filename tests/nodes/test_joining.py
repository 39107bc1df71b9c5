"""Leaders and followers over loopback: joining, refusals, ends."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
import zmq

from launcher.errors import Failure, HostError
from launcher.nodes import follower as follower_module
from launcher.nodes import leader as leader_module
from launcher.nodes.follower import Accepted, Ended, Follower, Lost, Refused, Started, TimedOut, Unreachable
from launcher.nodes.leader import Leader, Mismatch, Ready
from launcher.nodes.messages import CloseGroup, Join, encode
from launcher.nodes.secure import Security
from launcher.nodes.sockets import make_socket
from tests.nodes.parties import KEY, LOOPBACKS, OTHER_KEY, Parties, free_port, group, parties, settings


@pytest.fixture(name="all_of_them")
def fixture_all_of_them() -> Iterator[Parties]:
    with parties() as made:
        yield made


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be reached is told sooner than people need it."""
    monkeypatch.setattr(follower_module, "FIRST_TOLD", 0.5)
    monkeypatch.setattr("launcher.nodes.line._AGAIN", 0.2)


@pytest.mark.parametrize("key", [b"", KEY], ids=["open", "key"])
@pytest.mark.parametrize("address", LOOPBACKS)
def test_nodes_join_start_and_end(all_of_them: Parties, address: str, key: bytes) -> None:
    port = free_port(address)
    given = {"master_addr": address, "nnodes": 3, "key": key}
    first = all_of_them.follower(port, 1, **given)  # the order of starting does not matter
    all_of_them.turn(0.1)
    leader = all_of_them.leader(port, **given)
    second = all_of_them.follower(port, 2, **given)
    leader.open_group(group(7))
    all_of_them.until(lambda: all_of_them.of(first, Started) and all_of_them.of(second, Started))
    ready = all_of_them.of(leader, Ready)
    assert len(ready) == 1
    assert [(m.node_rank, m.host, m.address) for m in ready[0].members[1:]] == [  # type: ignore[attr-defined]
        (1, "host1", address),
        (2, "host2", address),
    ]
    assert leader.missing == ()
    started = all_of_them.of(first, Started)[0].group  # type: ignore[attr-defined]
    assert (started.launch_id, started.generation, started.token) == ("launch", 7, b"token")
    assert (first.address, first.iface, first.generation) == (address, "lo", 7)
    all_of_them.until(lambda: len(first.members) == 3)
    leader.close_group(CloseGroup(7, "stopped", orderly=True), final=True)
    all_of_them.until(lambda: all_of_them.of(first, Ended) and all_of_them.of(second, Ended))
    end = all_of_them.of(first, Ended)[0].end  # type: ignore[attr-defined]
    assert (end.orderly, end.final, end.reason) == (True, True, "stopped")
    assert len(all_of_them.of(first, Accepted)) == len(all_of_them.of(first, Started)) == 1
    assert not leader.dropped + first.dropped + second.dropped


def test_a_failure_travels_with_the_end_of_the_group_and_with_leaving(all_of_them: Parties) -> None:
    port = free_port()
    leader, one = all_of_them.leader(port), all_of_them.follower(port)
    leader.open_group(group(0))
    all_of_them.until(lambda: all_of_them.of(one, Started))
    cause = Failure(title="Worker_TP1", role="worker", kind="raised", headline="ValueError: x", node=1, host="host1")
    one.leave("a worker failed", cause)
    all_of_them.until(lambda: all_of_them.of(leader, leader_module.Lost))
    lost = all_of_them.of(leader, leader_module.Lost)[0]
    assert lost == leader_module.Lost(cause)
    leader.close_group(CloseGroup(0, cause.headline, cause))
    all_of_them.until(lambda: all_of_them.of(one, Ended))  # who is leaving still hears us
    assert all_of_them.of(one, Ended)[0].end.failure == cause  # type: ignore[attr-defined]


def test_a_group_for_nodes_that_are_there_already_and_the_next_one(all_of_them: Parties) -> None:
    port = free_port()
    leader, one = all_of_them.leader(port), all_of_them.follower(port)
    all_of_them.until(lambda: leader.missing == ())
    leader.open_group(group(1))
    all_of_them.until(lambda: all_of_them.of(one, Started))
    leader.open_group(group(2))
    all_of_them.until(lambda: all_of_them.of(one, Ended))
    assert leader.missing == (1,)
    all_of_them.drop(one)
    again = all_of_them.follower(port)
    all_of_them.until(lambda: all_of_them.of(again, Started))
    assert [e.members[1].host for e in all_of_them.of(leader, Ready)] == ["host1"] * 2  # type: ignore[attr-defined]


def test_a_new_agent_of_node_0_takes_its_nodes_back(all_of_them: Parties) -> None:
    port = free_port()
    leader, one = all_of_them.leader(port), all_of_them.follower(port)
    leader.open_group(group(4))
    all_of_them.until(lambda: all_of_them.of(one, Started))
    all_of_them.drop(leader)
    leader = all_of_them.leader(port)
    all_of_them.until(lambda: len(all_of_them.of(one, Accepted)) == 2)
    leader.open_group(group(4))
    all_of_them.until(lambda: all_of_them.of(leader, Ready))
    all_of_them.until(lambda: leader.missing == ())
    assert len(all_of_them.of(one, Started)) == 1
    assert not all_of_them.of(one, Ended) + all_of_them.of(one, Lost)


def test_another_launch_at_the_same_place_ends_the_group(all_of_them: Parties) -> None:
    port = free_port()
    leader, one = all_of_them.leader(port), all_of_them.follower(port)
    leader.open_group(group(0))
    all_of_them.until(lambda: all_of_them.of(one, Started))
    all_of_them.drop(leader)
    all_of_them.leader(port, launch_id="another")
    all_of_them.until(lambda: all_of_them.of(one, Lost))
    assert "was started anew" in all_of_them.of(one, Lost)[0].text  # type: ignore[attr-defined]


def test_a_restarted_agent_of_a_node_ends_the_group(all_of_them: Parties) -> None:
    port = free_port()
    leader, one = all_of_them.leader(port), all_of_them.follower(port)
    leader.open_group(group(0))
    all_of_them.until(lambda: all_of_them.of(one, Started))
    all_of_them.drop(one)
    again = all_of_them.follower(port)
    all_of_them.until(lambda: all_of_them.of(leader, leader_module.Lost))
    failure = all_of_them.of(leader, leader_module.Lost)[0].failure  # type: ignore[attr-defined]
    assert failure.headline == "node 1 (host1) restarted its agent"
    all_of_them.until(lambda: all_of_them.of(again, Accepted))
    assert not all_of_them.of(again, Started)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version": "2"}, "runs xserve 2, node 0"),
        ({"nnodes": 3}, "--nnodes: node 1 (host1) has 3"),
        (
            {"agreement": {"--max-model-len": "2048", "--dtype": "auto"}},
            "--max-model-len: node 1 (host1) has 2048, node 0 has 4096",
        ),
    ],
)
def test_a_node_that_never_fits_is_told_the_same_as_node_0(
    all_of_them: Parties, changes: dict[str, object], text: str
) -> None:
    port = free_port()
    leader, one = all_of_them.leader(port), all_of_them.follower(port, **changes)  # type: ignore[arg-type]
    took = all_of_them.until(lambda: all_of_them.of(one, Refused) and all_of_them.of(leader, Mismatch))
    assert took < 2
    (refused,) = all_of_them.of(one, Refused)
    assert text in refused.reason  # type: ignore[attr-defined]
    assert all_of_them.of(leader, Mismatch)[0].reason == refused.reason  # type: ignore[attr-defined]


def test_two_nodes_with_one_rank(all_of_them: Parties) -> None:
    port = free_port()
    leader, one = all_of_them.leader(port), all_of_them.follower(port)
    leader.open_group(group(0))
    all_of_them.until(lambda: all_of_them.of(one, Started))
    twin = all_of_them.add(Follower(settings(1, port), "another owner", "1", "twin"))
    took = all_of_them.until(lambda: all_of_them.of(twin, Refused))
    assert took < 5
    assert "--node-rank 1 is taken: host1 (127.0.0.1)" in all_of_them.of(twin, Refused)[0].reason  # type: ignore[attr-defined]
    assert all_of_them.of(leader, leader_module.Refused)
    assert not all_of_them.of(leader, leader_module.Lost)
    assert not all_of_them.of(one, Ended)


@pytest.mark.usefixtures("soon")
def test_strangers_are_kept_out_and_named_and_the_true_node_joins(
    all_of_them: Parties, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    leader = all_of_them.leader(port, key=KEY)
    leader.open_group(group(0))
    wrong = all_of_them.follower(port, owner="wrong", key=OTHER_KEY)
    without = all_of_them.follower(port, owner="without")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    third = make_socket(context, zmq.DEALER, Security(b"", 2, 1), server=False, max_message=1 << 20)
    third.connect(f"tcp://127.0.0.1:{port}")
    join = Join(1, 2, 1, "1", "evil", "10.6.6.6", "evil", "evil", settings(1, port).agreement)
    third.send(encode(join))
    all_of_them.until(lambda: all_of_them.of(wrong, Unreachable) and all_of_them.of(without, Unreachable), 15)
    assert "node 0 refused our key" in all_of_them.of(wrong, Unreachable)[0].text  # type: ignore[attr-defined]
    assert "node 0 uses a cluster key and this node has none" in all_of_them.of(without, Unreachable)[0].text  # type: ignore[attr-defined]
    assert leader.missing == (1,)
    one = all_of_them.follower(port, key=KEY)
    all_of_them.until(lambda: all_of_them.of(one, Started))
    lines = [r.message for r in caplog.records if "refused a connection" in r.message]
    assert any("from 127.0.0.1 port" in line for line in lines)
    assert len(lines) < 20
    assert KEY.hex() not in caplog.text
    third.close(linger=0)
    context.term()


@pytest.mark.usefixtures("soon")
def test_a_key_on_the_followers_side_only(all_of_them: Parties) -> None:
    port = free_port()
    all_of_them.leader(port)
    one = all_of_them.follower(port, key=KEY)
    all_of_them.until(lambda: all_of_them.of(one, Unreachable))
    assert "node 0 uses no cluster key" in all_of_them.of(one, Unreachable)[0].text  # type: ignore[attr-defined]


@pytest.mark.usefixtures("soon")
def test_a_key_that_is_mended_on_node_0_lets_the_waiting_node_in(all_of_them: Parties) -> None:
    """ZMQ itself does not come back after a handshake that broke the protocol."""
    port = free_port()
    leader = all_of_them.leader(port)
    one = all_of_them.follower(port, key=KEY)
    all_of_them.until(lambda: all_of_them.of(one, Unreachable))
    all_of_them.drop(leader)
    all_of_them.leader(port, key=KEY)
    all_of_them.until(lambda: all_of_them.of(one, Accepted))


def test_a_node_speaks_for_itself_only(all_of_them: Parties) -> None:
    """With a key the rank is proved: node 2 cannot say `Leaving` for node 1."""
    port = free_port()
    leader = all_of_them.leader(port, key=KEY, nnodes=3)
    one = all_of_them.follower(port, 1, key=KEY, nnodes=3)
    all_of_them.until(lambda: all_of_them.of(one, Accepted))
    liar = all_of_them.follower(port, 2, key=KEY, nnodes=3)
    liar._settings = settings(1, port, nnodes=3, key=KEY)
    all_of_them.until(lambda: leader.dropped["the key of another node"])
    assert leader.missing == (2,)


@pytest.mark.parametrize("key", [b"", KEY], ids=["open", "key"])
def test_a_taken_port_is_explained(key: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(HostError, match=rf"--master-port {port} is taken on 127.0.0.1 by pid \d+ \(.*pytest"):
            Leader(settings(0, port, key=key), "launch", "1")


def test_an_address_that_is_not_ours_is_explained() -> None:
    with pytest.raises(HostError, match=r"cannot listen at 192\.0\.2\.1:"):
        Leader(settings(0, free_port(), master_addr="192.0.2.1"), "launch", "1")


def test_nobody_lets_us_in(all_of_them: Parties) -> None:
    one = all_of_them.follower(free_port(), join_timeout=1.0)
    took = all_of_them.until(lambda: all_of_them.of(one, TimedOut))
    assert 0.9 < took < 3
    assert all_of_them.of(one, TimedOut)[0].text.startswith("not let in within --join-timeout 1 s: ")  # type: ignore[attr-defined]


def test_nodes_that_do_not_come(all_of_them: Parties) -> None:
    leader = all_of_them.leader(free_port(), join_timeout=1.0)
    leader.open_group(group(0))
    all_of_them.until(lambda: all_of_them.of(leader, leader_module.Lost))
    headline = all_of_them.of(leader, leader_module.Lost)[0].failure.headline  # type: ignore[attr-defined]
    assert headline.startswith("node 1 did not join within --join-timeout 1 s; joined: node 0 (")


def test_an_idle_line_costs_no_cpu(all_of_them: Parties) -> None:
    port = free_port()
    leader, one = all_of_them.leader(port, key=KEY), all_of_them.follower(port, key=KEY)
    leader.open_group(group(0))
    all_of_them.until(lambda: all_of_them.of(one, Started))
    turns, end, used = 0, time.monotonic() + 1.2, time.process_time()
    while time.monotonic() < end:
        all_of_them.turn(5)
        turns += 1
    assert turns < 25
    assert time.process_time() - used < 0.1
