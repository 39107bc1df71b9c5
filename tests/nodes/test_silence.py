"""Processes that are stopped, started again and killed."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
from collections.abc import Iterator

import pytest

from launcher.nodes import leader as leader_module
from launcher.nodes.follower import Accepted, Lost, Started
from tests.nodes.one_end import SILENCE, OneEnd
from tests.nodes.parties import Parties, free_port, group, parties


@pytest.fixture(name="all_of_them")
def fixture_all_of_them() -> Iterator[Parties]:
    with parties() as made:
        yield made


@contextlib.contextmanager
def one_end(role: str, port: int) -> Iterator[OneEnd]:
    made = OneEnd(role, port)
    try:
        yield made
    finally:
        made.close()


def test_a_stopped_node_is_lost_and_fenced_when_it_wakes(all_of_them: Parties) -> None:
    port = free_port()
    leader = all_of_them.leader(port, silence_limit=SILENCE)
    leader.open_group(group(3))
    with one_end("follower", port) as node:
        all_of_them.until(lambda: node.told("Started"))
        all_of_them.turn(0.1)
        os.kill(node.process.pid, signal.SIGSTOP)
        took = all_of_them.until(lambda: all_of_them.of(leader, leader_module.Lost))
        assert SILENCE - 1.5 < took < SILENCE + 2.5
        failure = all_of_them.of(leader, leader_module.Lost)[0].failure  # type: ignore[attr-defined]
        assert re.fullmatch(
            r"node 1 \(host1, 127\.0\.0\.1\) has been silent for [2-4]\.\d s: last heard at \d\d:\d\d:\d\d",
            failure.headline,
        )
        os.kill(node.process.pid, signal.SIGCONT)
        all_of_them.until(lambda: node.told("Ended"))
        assert not node.told("LeaderLost")
    # Its supervisor starts its agent again; the next group has it.
    leader.open_group(group(4))
    again = all_of_them.follower(port, silence_limit=SILENCE)
    all_of_them.until(lambda: all_of_them.of(again, Started))


def test_a_killed_node_is_lost(all_of_them: Parties) -> None:
    port = free_port()
    leader = all_of_them.leader(port, silence_limit=SILENCE)
    leader.open_group(group(3))
    with one_end("follower", port) as node:
        all_of_them.until(lambda: node.told("Started"))
    all_of_them.until(lambda: all_of_them.of(leader, leader_module.Lost))
    failure = all_of_them.of(leader, leader_module.Lost)[0].failure  # type: ignore[attr-defined]
    assert "its connection has closed" in failure.headline


def test_a_stopped_node_0_is_lost_and_one_that_wakes_soon_is_not(all_of_them: Parties) -> None:
    port = free_port()
    with one_end("leader", port) as node0:
        one = all_of_them.follower(port, silence_limit=SILENCE)
        all_of_them.until(lambda: all_of_them.of(one, Started))
        os.kill(node0.process.pid, signal.SIGSTOP)
        with pytest.raises(AssertionError):
            all_of_them.until(lambda: all_of_them.of(one, Lost), SILENCE - 1)
        os.kill(node0.process.pid, signal.SIGCONT)
        with pytest.raises(AssertionError):
            all_of_them.until(lambda: all_of_them.of(one, Lost), 1)
        os.kill(node0.process.pid, signal.SIGSTOP)
        all_of_them.until(lambda: all_of_them.of(one, Lost))
        text = all_of_them.of(one, Lost)[0].text  # type: ignore[attr-defined]
        assert re.fullmatch(
            rf"node 0 \(127\.0\.0\.1:{port}\) has been silent for [2-4]\.\d s: last heard at \d\d:\d\d:\d\d", text
        )


def test_a_node_that_waits_for_its_group_waits_for_a_new_node_0(all_of_them: Parties) -> None:
    port = free_port()
    leader, one = all_of_them.leader(port), all_of_them.follower(port, silence_limit=0.5)
    all_of_them.until(lambda: all_of_them.of(one, Accepted))
    all_of_them.drop(leader)
    with pytest.raises(AssertionError):
        all_of_them.until(lambda: all_of_them.of(one, Lost), 1)
    leader = all_of_them.leader(port, launch_id="next")
    all_of_them.until(lambda: len(all_of_them.of(one, Accepted)) == 2)


def test_our_own_pause_is_not_the_others_silence(all_of_them: Parties) -> None:
    """Both ends were not driven for longer than the limit, and what came meanwhile is read first."""
    port = free_port()
    leader, one = (
        all_of_them.leader(port, silence_limit=SILENCE),
        all_of_them.follower(port, silence_limit=SILENCE),
    )
    leader.open_group(group(0))
    all_of_them.until(lambda: all_of_them.of(one, Started))
    select.select([], [], [], SILENCE + 0.5)  # the pause is what is tried
    with pytest.raises(AssertionError):
        all_of_them.until(lambda: all_of_them.of(one, Lost) + all_of_them.of(leader, leader_module.Lost), 0.5)
