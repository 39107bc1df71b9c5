"""Hung is told from busy, in both directions; who is hung is named, every stack is shown, and the group comes back."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable

import pytest

from tests.conftest import eventually
from tests.e2e.launch import Launch
from tests.e2e.test_faults import expected
from tests.e2e.test_restart import wait_whole

Start = Callable[..., Launch]


def ask_in_background(launched: Launch, tokens: int = 5) -> list[str]:
    answers: list[str] = []

    def ask() -> None:
        try:
            answers.append(launched.complete("patience", tokens, timeout=40))
        except OSError as error:
            answers.append(f"failed: {error}")

    threading.Thread(target=ask).start()
    return answers


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_a_hung_rank_is_named_and_its_group_comes_back(launch: Start, method: str) -> None:
    launched = launch("--tp", "3", "--start-method", method, "--watchdog-timeout", "2", fault="step_hang:0@2,once")
    launched.wait_ready()
    answers = ask_in_background(launched)
    wait_whole(launched)
    output = launched.output
    assert "rank 0 (Worker_DP0_PP0_TP0), pid " in output
    assert "hung in engine step" in output
    assert "(--watchdog-timeout 2)" in output
    stacks = [line for line in output.splitlines() if "(most recent call first)" in line]
    for title in ("EngineCore_DP0", "APIServer_0", *(f"Worker_DP0_PP0_TP{rank}" for rank in range(3))):
        assert any(line.startswith(f"({title} pid=") for line in stacks), title
    assert "injury.py" in output, "the stack of the hung rank shows where it hangs"
    [bundle] = (launched.runtime / "state").rglob("*.json")
    kept = json.loads(bundle.read_text())
    assert kept["cause"]["title"] == "Worker_DP0_PP0_TP0"
    assert any("injury.py" in line for line in kept["last_output"]["Worker_DP0_PP0_TP0"])
    assert any("EngineCore_DP0: step 2: 1 requests" in note for note in kept["notes"]), kept["notes"]
    assert f"crash bundle: {bundle.with_suffix('.txt')}" in output
    eventually(lambda: answers, 20, "the answer after all")
    assert answers == [expected("patience", 5)]
    assert launched.stop() == 0
    launched.assert_nothing_left()


@pytest.mark.parametrize("title", ["Worker_DP0_PP0_TP1", "EngineCore_DP0", "APIServer_0"])
def test_a_stopped_process_is_hung(launch: Start, title: str) -> None:
    launched = launch("--tp", "2", "--watchdog-timeout", "2")
    launched.wait_ready()
    os.kill(launched.pid_of(title), signal.SIGSTOP)
    if title.startswith("Worker"):
        ask_in_background(launched, 400)  # an idle worker is asked nothing: only a call shows that it is stopped
    wait_whole(launched)
    assert title in launched.output
    assert "cannot show its stack: state T" in launched.output
    assert launched.complete("back", 3) == expected("back", 3)
    assert launched.stop() == 0
    launched.assert_nothing_left()


def test_without_restarts_a_hang_ends_the_tree(launch: Start) -> None:
    launched = launch("--tp", "2", "--watchdog-timeout", "2", "--restart", "never", fault="step_hang:0")
    launched.wait_ready()
    ask_in_background(launched)
    assert launched.wait_exit() == 1
    last = "\n".join(launched.output.strip().splitlines()[-3:])
    assert "rank 0 (Worker_DP0_PP0_TP0), pid " in last
    assert "hung in engine step" in last
    launched.assert_nothing_left()


def test_busy_and_idle_are_not_hung(launch: Start) -> None:
    """Steps of a second each under a limit of two, then nothing at all for longer than the limit."""
    launched = launch("--tp", "2", "--watchdog-timeout", "2", "--worker-config", "step_ms=1000")
    launched.wait_ready()
    assert launched.complete("slow", 4) == expected("slow", 4)
    begin = time.monotonic()
    eventually(lambda: time.monotonic() - begin > 3, 10)
    assert "stacks" not in launched.output
    assert launched.complete("slow", 1) == expected("slow", 1)
    assert launched.stop() == 0


def test_sigquit_shows_stacks_and_goes_on(launch: Start) -> None:
    launched = launch("--tp", "2")
    launched.wait_ready()
    before = launched.tree()
    launched.signal(signal.SIGQUIT)
    eventually(lambda: launched.output.count("(most recent call first)") >= 5, 10, "a stack of each")
    assert launched.complete("still", 3) == expected("still", 3)
    assert launched.tree() == before
    assert launched.stop() == 0


def test_the_stack_of_a_rank_that_does_not_start(launch: Start) -> None:
    launched = launch("--tp", "2", "--ready-timeout", "2", fault="init_hang:1")
    assert launched.wait_exit() == 1
    assert "last output of Worker_DP0_PP0_TP1:" in launched.output
    assert "in init_device" in launched.output
    last = "\n".join(launched.output.strip().splitlines()[-3:])
    assert re.search(r"no progress for \d s in step 'device' \(--ready-timeout 2\)", last), last


def test_health_follows_progress(launch: Start) -> None:
    launched = launch("--tp", "2", "--watchdog-timeout", "0")
    launched.wait_ready()
    assert launched.get("/health")[0] == 200
    core = launched.pid_of("EngineCore_DP0")
    os.kill(core, signal.SIGSTOP)
    eventually(lambda: launched.get("/health")[0] == 503, 8)
    assert launched.get("/livez")[0] == 200
    os.kill(core, signal.SIGCONT)
    eventually(lambda: launched.get("/health")[0] == 200, 8)
    assert launched.stop() == 0


def test_a_stopped_helper_is_replaced(launch: Start) -> None:
    """It is the guard, too: nobody must have to need it before it is missed."""
    launched = launch("--tp", "2", "--watchdog-timeout", "2")
    launched.wait_ready()
    helper = launched.pid_of("Forkserver")
    os.kill(helper, signal.SIGSTOP)
    eventually(lambda: [pid for pid in launched.pids_of("Forkserver") if pid != helper], 15)
    assert f"Forkserver, pid {helper}, step ready: has not answered for " in launched.output
    assert "restarting" not in launched.output
    assert launched.get("/readyz")[0] == 200
    assert launched.stop() == 0
    launched.assert_nothing_left()


def test_who_is_stopped_in_a_start_is_named_not_who_waits_for_it(launch: Start) -> None:
    """The ranks wait for their core at the queues; they are further behind than it is."""
    launched = launch("--tp", "2", "--ready-timeout", "2", fault="init_sleep:*:1")
    core = eventually(lambda: launched.pids_of("EngineCore") if len(launched.pids_of("Worker")) == 2 else [], 20)
    assert isinstance(core, list)
    os.kill(core[0], signal.SIGSTOP)
    assert launched.wait_exit() == 1
    last = "\n".join(launched.output.strip().splitlines()[-3:])
    assert f"EngineCore_DP0, pid {core[0]}, step " in last
    assert "it is stopped (state T, as by SIGSTOP)" in last
    launched.assert_nothing_left()


def test_who_takes_a_hung_ones_place_at_once_is_not_taken_for_hung(launch: Start) -> None:
    launched = launch("--tp", "2", "--watchdog-timeout", "3")  # a quarter of it is longer than a start takes
    launched.wait_ready()
    for number in (1, 2):
        os.kill(launched.pid_of("EngineCore_DP0"), signal.SIGSTOP)
        wait_whole(launched, number)
    begin = time.monotonic()
    eventually(lambda: time.monotonic() - begin > 1.5, 10)
    assert launched.output.count("restarting") == 2
    assert launched.stop() == 0
    launched.assert_nothing_left()
