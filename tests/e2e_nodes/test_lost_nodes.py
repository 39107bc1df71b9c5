"""A node that dies, freezes or loses its cable: the others say which and when it was last heard, and end or wait.

A silence lasts ten seconds: several launches, each in a net of its own, are struck at the same time.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from _testnet import Testnet

from tests.conftest import eventually
from tests.e2e.launch import sleep_until
from tests.e2e_nodes.conftest import MakeNet, Start
from tests.e2e_nodes.hosts import NOTICED, SILENCE, Host, Stream, exit_codes, last_lines

STEP_MS = 40


@dataclass
class Pair:
    """A launch over two nodes, ready."""

    net: Testnet
    flags: tuple[str, ...]
    zero: Host
    one: Host

    def host(self, node: int) -> Host:
        return (self.zero, self.one)[node]


def make_pair(make_net: MakeNet, start: Start, *flags: str, fault: str = "") -> Pair:
    net = make_net()
    every = ("--worker", "reference", "--tp", "2", "--nnodes", "2", "--master-addr", net.ipv4(0))
    every = (*every, "--worker-config", f"step_ms={STEP_MS}", *flags)
    zero, one = (start(net, node, *every, "--node-rank", str(node), fault=fault) for node in (0, 1))
    zero.wait_node()
    one.wait_node()
    return Pair(net, every, zero, one)


def kill(pair: Pair, node: int) -> None:
    pair.host(node).strike(signal.SIGKILL)


def freeze(pair: Pair, node: int) -> None:
    pair.host(node).strike(signal.SIGSTOP)


def unplug(pair: Pair, node: int) -> None:
    pair.net.cable(node, there=False)


Blow = Callable[[Pair, int], None]
BLOWS: list[tuple[str, Blow, int]] = [
    ("kill 0", kill, 0),
    ("kill 1", kill, 1),
    ("freeze 0", freeze, 0),
    ("freeze 1", freeze, 1),
    ("unplug 1", unplug, 1),
]


@pytest.mark.timeout(180)
def test_without_restarts_everybody_ends_and_says_who_was_lost(make_net: MakeNet, start: Start) -> None:
    pairs = [make_pair(make_net, start, "--restart", "never") for _ in BLOWS]
    struck = []
    for pair, (_, blow, node) in zip(pairs, BLOWS, strict=True):
        assert pair.zero.is_right()
        blow(pair, node)
        struck.append(time.monotonic())
    for pair, (name, blow, node), moment in zip(pairs, BLOWS, struck, strict=True):
        others = [0, 1] if blow is unplug else [1 - node]
        for other in others:
            host = pair.host(other)
            assert host.wait_exit(max(1.0, moment + NOTICED - time.monotonic())) == 69, f"{name}:\n{host.output}"
            words = last_lines(host, 4)
            lost = 1 - other
            assert f"node {lost}" in words, f"{name}: {words}"
            assert pair.net.ipv4(lost) in words, f"{name}: {words}"
            assert re.search(r"last heard at \d\d:\d\d:\d\d|its connection was closed", words), f"{name}: {words}"
            host.assert_nothing_left()


@pytest.mark.timeout(240)
def test_the_group_comes_back_when_the_node_does_and_no_stream_is_lost(make_net: MakeNet, start: Start) -> None:
    tokens = 150  # six seconds
    cases: list[tuple[str, Blow]] = [("kill 1", kill), ("freeze 1", freeze), ("unplug 1", unplug)]
    pairs = [make_pair(make_net, start) for _ in cases]
    streams = [Stream(pair.zero, name, tokens) for pair, (name, _) in zip(pairs, cases, strict=True)]
    for pair, (_, blow) in zip(pairs, cases, strict=True):
        blow(pair, 1)
    struck = time.monotonic()
    for pair, (name, _) in zip(pairs, cases, strict=True):
        pair.zero.wait_line(r"node 1 .*last heard at", max(1.0, struck + NOTICED - time.monotonic()))
        assert pair.zero.process.poll() is None, f"{name}:\n{pair.zero.output}"
        eventually(lambda pair=pair: pair.zero.get("/readyz")[0] == 503, 5, f"{name}: not ready without node 1")
    again = {
        "kill 1": lambda pair: start(pair.net, 1, *pair.flags, "--node-rank", "1"),
        "freeze 1": lambda pair: pair.one.strike(signal.SIGCONT),
        "unplug 1": lambda pair: pair.net.cable(1, there=True),
    }
    ones = [again[name](pair) or pair.one for pair, (name, _) in zip(pairs, cases, strict=True)]
    for pair, one, stream, (name, _) in zip(pairs, ones, streams, cases, strict=True):
        pair.zero.wait_node(30)
        one.wait_node(30)
        stream.assert_whole(60)
        assert pair.zero.is_right(f"after {name}", 8)
        assert "(restart " not in one.output, f"{name}: a node that was given up counted it as its own\n{one.output}"
        pair.zero.signal(signal.SIGTERM)
    for pair, one in zip(pairs, ones, strict=True):
        assert exit_codes((pair.zero, one)) == [0, 0], f"{pair.zero.output}\n{one.output}"
        one.assert_nothing_left()
        pair.zero.assert_nothing_left()


@pytest.mark.timeout(180)
def test_a_node_0_that_died_is_found_again(make_net: MakeNet, start: Start) -> None:
    pair = make_pair(make_net, start)
    supervisor = pair.one.process.pid
    kill(pair, 0)
    pair.one.wait_line(r"node 0 .*last heard at", NOTICED)
    zero = start(pair.net, 0, *pair.flags, "--node-rank", "0")
    zero.wait_node(30)
    pair.one.wait_node(30)
    assert pair.one.process.pid == supervisor
    assert zero.is_right("found again", 8)
    zero.signal(signal.SIGTERM)
    assert exit_codes((zero, pair.one)) == [0, 0], f"{zero.output}\n{pair.one.output}"
    pair.one.assert_nothing_left()


def test_a_short_silence_is_nothing(make_net: MakeNet, start: Start) -> None:
    """Frozen or unplugged for half of the limit: nobody is lost, and the stream goes on where it was."""
    pairs = [make_pair(make_net, start, "--restart", "never") for _ in range(2)]
    streams = [Stream(pair.zero, f"pause {n}", 60) for n, pair in enumerate(pairs)]
    freeze(pairs[0], 1)
    unplug(pairs[1], 1)
    sleep_until(time.monotonic() + SILENCE / 2)
    pairs[0].one.strike(signal.SIGCONT)
    pairs[1].net.cable(1, there=True)
    for stream, pair in zip(streams, pairs, strict=True):
        stream.assert_whole(30)
        assert pair.zero.stop() == 0
        assert pair.one.wait_exit(15) == 0


def test_an_agent_of_node_0_that_is_killed_costs_nothing(make_net: MakeNet, start: Start) -> None:
    """It holds no worker: it is started again, the others find it, and the group goes on."""
    pair = make_pair(make_net, start)
    workers = pair.one.pids_of("Worker")
    stream = Stream(pair.zero, "agent", 100)
    os.kill(pair.zero.pid_of("NodeAgent_N0"), signal.SIGKILL)
    stream.assert_whole(30)
    sleep_until(time.monotonic() + SILENCE + 2)  # beats that nobody hears would have told by then
    assert pair.zero.is_right()
    assert pair.one.pids_of("Worker") == workers
    assert pair.zero.stop() == 0
    assert pair.one.wait_exit(15) == 0


@pytest.mark.parametrize("victim", ["Worker_DP0_PP0_TP1", "NodeAgent_N1"])
def test_a_process_of_node_1_is_killed(make_net: MakeNet, start: Start, victim: str) -> None:
    """Nobody waits for a silence: the group comes back at once, and the stream goes on."""
    pair = make_pair(make_net, start)
    stream = Stream(pair.zero, victim, 60)
    os.kill(pair.one.pid_of(victim), signal.SIGKILL)
    stream.assert_whole(20)
    assert victim in pair.zero.output if "Worker" in victim else "node 1" in pair.zero.output
    assert victim in pair.one.output
    pair.zero.wait_node(20)
    pair.one.wait_node(20)
    assert pair.zero.is_right("afterwards", 6)
    assert pair.zero.stop() == 0
    assert pair.one.wait_exit(15) == 0


def test_one_of_two_workers_of_node_1_is_killed(make_net: MakeNet, start: Start) -> None:
    """Its neighbour lives: the agent waits for what else may have failed, and is still to tell node 0 what did."""
    pair = make_pair(make_net, start, "--tp", "4")
    stream = Stream(pair.zero, "neighbours", 60)
    os.kill(pair.one.pid_of("Worker_DP0_PP0_TP2"), signal.SIGKILL)
    stream.assert_whole(20)
    pair.zero.wait_line(r"xserve: rank 2 \(Worker_DP0_PP0_TP2\) on node 1 \(node1\), .* died of signal 9", 5)
    assert "restarted its agent" not in pair.zero.output.partition("Worker_DP0_PP0_TP2) on node 1")[0]
    pair.one.wait_node(20)
    assert pair.zero.stop() == 0
    assert pair.one.wait_exit(15) == 0


def test_a_second_ctrl_c_on_node_0_stops_the_other_nodes_too(make_net: MakeNet, start: Start) -> None:
    """It kills all at once, but for the agent, which has a moment to tell them."""
    pair = make_pair(make_net, start)
    stream = Stream(pair.zero, "endless", 2000)
    pair.zero.process.send_signal(signal.SIGINT)
    pair.zero.wait_line("finishing what runs")
    pair.zero.process.send_signal(signal.SIGINT)
    assert pair.zero.wait_exit(10) == 130
    assert pair.one.wait_exit(10) == 0, pair.one.output
    assert "node 0 was stopped: stopping this node too" in pair.one.output
    stream.close()
    for host in (pair.zero, pair.one):
        host.assert_nothing_left()


def test_node_0_is_killed_while_it_drains(make_net: MakeNet, start: Start) -> None:
    """As by `docker stop`, whose patience is short: node 1 was told that an end would come, and waits for nobody."""
    pair = make_pair(make_net, start)
    stream = Stream(pair.zero, "endless", 2000)
    pair.zero.process.send_signal(signal.SIGTERM)
    eventually(lambda: pair.zero.state == "draining", 5)
    pair.zero.strike(signal.SIGKILL)
    assert pair.one.wait_exit(10) == 0, pair.one.output
    stream.close()
    pair.one.assert_nothing_left()


def test_a_forced_stop_of_node_1_is_told_as_a_stop(make_net: MakeNet, start: Start) -> None:
    pair = make_pair(make_net, start)
    stream = Stream(pair.zero, "goes on", 100)
    pair.one.process.send_signal(signal.SIGINT)
    pair.zero.wait_line("node 1 .* is leaving: it is being stopped")
    pair.one.process.send_signal(signal.SIGINT)
    assert pair.one.wait_exit(10) == 130
    pair.zero.wait_line("xserve: node 1 .* is leaving: it is being stopped")
    pair.zero.wait_line("start it there again")
    start(pair.net, 1, *pair.flags, "--node-rank", "1").wait_node()
    stream.assert_whole(30)
    assert pair.zero.stop() == 0


def test_an_engine_core_is_killed(make_net: MakeNet, start: Start) -> None:
    pair = make_pair(make_net, start)
    stream = Stream(pair.zero, "core", 60)
    os.kill(pair.zero.pid_of("EngineCore_DP0"), signal.SIGKILL)
    stream.assert_whole(20)
    pair.one.wait_node(20)
    assert pair.zero.is_right("afterwards", 6)
    assert pair.zero.stop() == 0
    assert pair.one.wait_exit(15) == 0


def test_an_error_of_a_rank_of_node_1_is_told_on_node_0(make_net: MakeNet, start: Start) -> None:
    pair = make_pair(make_net, start, "--restart", "never", fault="step_raise:1@3")
    with pytest.raises((OSError, AssertionError)):
        assert pair.zero.is_right("x", 9)
    assert exit_codes((pair.zero, pair.one), 20) == [1, 1], f"{pair.zero.output}\n{pair.one.output}"
    for host in (pair.zero, pair.one):
        words = last_lines(host)
        assert "rank 1" in words, words
        assert "injected fault step_raise on rank 1" in words
        assert host.output.count("Traceback (most recent call last)") == 1, host.output
        host.assert_nothing_left()
    assert "node1" in last_lines(pair.zero)  # the host's name


def test_a_start_that_fails_on_node_1(make_net: MakeNet, start: Start) -> None:
    net = make_net()
    flags = ("--worker", "reference", "--tp", "4", "--nnodes", "2", "--master-addr", net.ipv4(0))
    zero, one = (start(net, node, *flags, "--node-rank", str(node), fault="init_raise:3") for node in (0, 1))
    assert exit_codes((zero, one), 20) == [1, 1], f"{zero.output}\n{one.output}"
    for host in (zero, one):
        assert "injected fault init_raise on rank 3" in last_lines(host), host.output
        assert "rank 3 (Worker_DP0_PP0_TP3)" in last_lines(host)
        host.assert_nothing_left()


def test_a_hang_on_node_1_is_found(make_net: MakeNet, start: Start) -> None:
    pair = make_pair(make_net, start, "--restart", "never", "--watchdog-timeout", "3", fault="step_hang:1@3")
    with contextlib.suppress(OSError):  # rank 0 may have answered before
        pair.zero.complete("x", 9)
    codes = exit_codes((pair.zero, pair.one), 25)
    assert codes[0] == 1, pair.zero.output
    assert codes[1] in (1, 69), pair.one.output  # who is to blame, a dead core has not always time to say
    assert "rank 1" in last_lines(pair.zero)
    assert "node1" in pair.zero.output


def test_a_supervisor_that_is_killed_on_node_0_is_no_order_to_stop(make_net: MakeNet, start: Start) -> None:
    """Its children see it go, and are gone soon: nothing that they say in that moment may end node 1 for good."""
    pair = make_pair(make_net, start)
    pair.zero.tree()
    os.kill(pair.zero.process.pid, signal.SIGKILL)
    pair.zero.wait_exit(5)
    pair.zero.assert_nothing_left(5)
    pair.one.wait_line(r"node 0 .*last heard at", NOTICED)
    zero = start(pair.net, 0, *pair.flags, "--node-rank", "0")
    zero.wait_node(30)
    pair.one.wait_node(30)
    assert zero.is_right("after the supervisor", 8)
    assert zero.stop() == 0
    assert pair.one.wait_exit(15) == 0
