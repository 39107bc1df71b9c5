"""The supervisor of one node of several, over processes that play the agents, cores and workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import uuid
from typing import Any, NamedTuple

import pytest


class Ended(NamedTuple):
    outcome: dict[str, Any]
    lines: list[str]

    @property
    def notes(self) -> list[str]:
        return [line.removeprefix("note: ") for line in self.lines if line.startswith("note: ")]

    @property
    def restarts(self) -> list[str]:
        return [note.split()[1] for note in self.notes if note.startswith("restarting ")]

    def said(self, title: str) -> list[str]:
        return [line.partition(": ")[2] for line in self.lines if line.startswith(f"{title}: ")]


def process(title: str, role: str, play: str, workers: int = 0, **fields: Any) -> dict[str, Any]:
    target = "tests.process.agents:"
    children = [
        {"title": f"Worker_DP0_PP0_TP{rank}", "role": "worker", "target": target + "worker", "rank": rank}
        for rank in range(workers)
    ]
    made = {"title": title, "role": role, "target": target + "play", "env": {"PLAY": play}, "children": children}
    return made | fields


def follower(play: str) -> list[dict[str, Any]]:
    return [process("NodeAgent_N1", "node_agent", play, 1, node=1)]


def node_0(core: str, agent: str = "ready", api: str = "ready") -> list[dict[str, Any]]:
    return [
        process("APIServer_0", "api_server", api),
        process("NodeAgent_N0", "node_agent", agent),
        process("EngineCore_DP0", "engine_core", core, 1),
    ]


def supervise(specs: list[dict[str, Any]], **settings: Any) -> Ended:
    asked = {"specs": specs, "launch_id": f"test-{uuid.uuid4().hex}", **settings}
    command = [sys.executable, "-m", "tests.process.supervise", json.dumps(asked)]
    with tempfile.NamedTemporaryFile(prefix="xs-ready-") as ready:
        env = {**os.environ, "READY": ready.name}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    return Ended(json.loads(lines[-1]), lines[:-1])


SERVED = "ready,all-ready"

# --- a lost node -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [follower, node_0])
def test_a_lost_node_ends_a_tree_that_is_not_to_come_back(make: Any) -> None:
    ended = supervise(make(f"join,{SERVED},lose"), policy="never")
    assert ended.outcome["code"] == 69
    assert ended.outcome["headline"].startswith("node 1 (far, 10.0.0.2) has been silent")
    assert ended.restarts == []


def test_a_lost_node_is_waited_for_as_often_as_it_is_lost() -> None:
    """Four times, though no more than three restarts are allowed in all."""
    lost, again = f"join,{SERVED},lose", f"join,{SERVED},stop"
    ended = supervise(node_0(";".join([lost] * 4 + [again])))
    assert ended.outcome["code"] == 0, ended
    assert ended.restarts == ["EngineCore_DP0"] * 4, "the agent and the API server go on"
    assert "restarting EngineCore_DP0 now (it waits for the lost node; not counted)" in ended.notes
    assert ended.notes.count("whole again") == 4


def test_a_node_that_does_not_come_back_ends_the_tree() -> None:
    ended = supervise(follower(f"join,{SERVED},lose;join,lose"))
    assert ended.outcome["code"] == 69
    assert ended.restarts == ["NodeAgent_N1"]


@pytest.mark.parametrize(("policy", "lives"), [("never", 1), ("on-failure", 1), ("always", 3)])
def test_a_node_that_never_came(policy: str, lives: int) -> None:
    """``always`` asks again and again; a wrong setting ends that."""
    ended = supervise(follower("join,lose;join,lose;join,wrong"), policy=policy)
    assert ended.outcome["code"] == (2 if policy == "always" else 69)
    assert len(ended.restarts) == lives - 1


def test_a_node_lost_while_the_workers_load_is_waited_for() -> None:
    ended = supervise(follower(f"join,{SERVED},lose;join,load,lose;join,{SERVED},wrong"))
    assert (ended.outcome["code"], ended.outcome["headline"]) == (2, "--tp 8 here, --tp 4 on node 0")
    assert ended.restarts == ["NodeAgent_N1"] * 2
    assert "whole again" in ended.notes


def test_waiting_for_the_others_is_no_slow_start() -> None:
    ended = supervise(follower(f"long-join,{SERVED},stop"), ready_timeout=1)
    assert ended.outcome["code"] == 0, ended


# --- failures elsewhere ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("act", "words"), [("far", "ValueError: far away"), ("far-hang", "in one call for 30 s")])
@pytest.mark.parametrize("make", [follower, node_0])
def test_a_process_of_another_node_is_the_cause(make: Any, act: str, words: str) -> None:
    ended = supervise(make(f"{SERVED},{act}"), policy="never")
    outcome = ended.outcome
    assert (outcome["code"], outcome["cause"], outcome["host"]) == (1, "Worker_DP0_PP0_TP7", "far")
    assert outcome["headline"] == words
    if act == "far-hang":
        assert "stacks of all processes: Worker_DP0_PP0_TP7 on node 1 is hung" in ended.notes


@pytest.mark.parametrize("act", ["far", "far-hang"])
def test_who_told_of_it_is_started_again(act: str) -> None:
    ended = supervise(node_0(f"{SERVED},{act};{SERVED},stop"))
    assert ended.outcome["code"] == 0, ended
    assert ended.restarts == ["EngineCore_DP0"]
    assert any("(restart 1 of 3" in note for note in ended.notes), "it counts, as here"


def test_node_0s_agent_dies_and_comes_back_alone() -> None:
    ended = supervise(node_0("ready", agent=f"{SERVED},die;{SERVED},stop"))
    assert ended.outcome["code"] == 0, ended
    assert ended.restarts == ["NodeAgent_N0"]


def test_a_followers_agent_goes_with_its_workers() -> None:
    ended = supervise(follower(f"{SERVED},die;{SERVED},stop"))
    assert ended.outcome["code"] == 0, ended
    assert ended.restarts == ["NodeAgent_N1"]
    assert ended.notes.count("Worker_DP0_PP0_TP0 is ready") == 2


# --- stops -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("play", ["join,leave", f"{SERVED},leave", f"{SERVED},lose;join,leave"])
def test_a_launch_that_node_0_ended(play: str) -> None:
    ended = supervise(follower(play))
    assert (ended.outcome["code"], ended.outcome["cause"]) == (0, ""), ended
    assert "node 0 was stopped: stopping this node too" in ended.notes


def test_a_follower_that_is_stopped_has_the_time_to_part() -> None:
    ended = supervise(follower(f"{SERVED},stop,until-drain"))
    assert (ended.outcome["code"], ended.outcome["cause"]) == (0, ""), ended
    assert ended.said("NodeAgent_N1")[-2:] == ["parting", "parted"]


def test_node_0_drains_its_api_server_and_tells_its_agent() -> None:
    ended = supervise(node_0(f"{SERVED},stop"))
    assert ended.outcome["code"] == 0
    told = ended.said("NodeAgent_N0")
    assert told.index("told draining: draining") < told.index("told to drain in True")
    assert "told ready: ready" in told


def test_the_agent_hears_that_it_failed() -> None:
    """Its last word to the other nodes depends on it."""
    ended = supervise(node_0(f"{SERVED},far"), policy="never")
    assert ended.said("NodeAgent_N0")[-1] == "told failed: ValueError: far away"
