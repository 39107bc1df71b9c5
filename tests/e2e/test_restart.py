"""What died comes back, in the order and as often as was said; a stop is a stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.conftest import eventually
from tests.e2e.launch import Launch, start_time
from tests.e2e.test_faults import expected

Start = Callable[..., Launch]
METHODS = ["forkserver", "spawn", "fork"]


def restarts(launched: Launch, title: str) -> int:
    found = launched.status()
    assert found is not None
    return next(int(row["restarts"]) for row in found["processes"] if row["title"] == title)


def wait_whole(launched: Launch, times: int = 1) -> None:
    eventually(lambda: launched.output.count("whole again") >= times, 15, "whole again")
    eventually(lambda: launched.get("/readyz")[0] == 200, 10)
    launched.tree()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("title", ["EngineCore_DP0", "Worker_DP0_PP0_TP2"])
def test_a_core_comes_back_with_all_its_workers(launch: Start, method: str, title: str) -> None:
    launched = launch("--tp", "4", "--start-method", method)
    launched.wait_ready()
    before = {name: pid for pid, name in launched.tree().items()}
    os.kill(before[f"xserve::{title}"], signal.SIGKILL)
    wait_whole(launched)
    after = {name: pid for pid, name in launched.tree().items()}
    assert set(after) == set(before)
    group = [name for name in before if "Worker" in name or "EngineCore" in name]
    assert not {before[name] for name in group} & {after[name] for name in group}, "one for all"
    assert before["xserve::APIServer_0"] == after["xserve::APIServer_0"]
    assert launched.complete("back", 4) == expected("back", 4)
    assert restarts(launched, "EngineCore_DP0") == restarts(launched, "Worker_DP0_PP0_TP0") == 1
    assert restarts(launched, "APIServer_0") == 0
    assert "restarting EngineCore_DP0 now (restart 1 of 5 within 600 s)" in launched.output
    assert launched.stop() == 0
    launched.assert_nothing_left()


@pytest.mark.parametrize("method", METHODS)
def test_an_api_server_comes_back_alone(launch: Start, method: str) -> None:
    launched = launch("--tp", "2", "--start-method", method)
    launched.wait_ready()
    before = {name: pid for pid, name in launched.tree().items()}
    os.kill(before["xserve::APIServer_0"], signal.SIGKILL)
    wait_whole(launched)
    after = {name: pid for pid, name in launched.tree().items()}
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"xserve::APIServer_0"}, "one for one"
    assert launched.complete("back", 4) == expected("back", 4)
    assert launched.stop() == 0
    launched.assert_nothing_left()


def test_both_at_once(launch: Start) -> None:
    launched = launch("--tp", "2")
    launched.wait_ready()
    for title in ("APIServer_0", "EngineCore_DP0"):
        os.kill(launched.pid_of(title), signal.SIGKILL)
    wait_whole(launched)
    assert launched.complete("back", 4) == expected("back", 4)
    assert launched.stop() == 0
    launched.assert_nothing_left()


def test_what_the_dead_worker_had_started_is_ended(launch: Start) -> None:
    launched = launch("--tp", "2", fault="spawn_child:1,once")
    launched.wait_ready()
    sleepers = eventually(lambda: [p for p, name in launched.tree().items() if name.startswith("sleep")], 5)
    assert isinstance(sleepers, list)
    os.kill(launched.pid_of("Worker_DP0_PP0_TP1"), signal.SIGKILL)
    wait_whole(launched)
    assert not [pid for pid in sleepers if start_time(pid)]
    assert launched.stop() == 0
    launched.assert_nothing_left()


def test_a_budget_that_is_spent(launch: Start) -> None:
    launched = launch("--tp", "2", "--max-restarts", "2", fault="step_raise:1")
    launched.wait_ready()

    def provoke() -> bool:
        try:
            launched.complete("x", 1, timeout=2)
        except OSError:
            pass
        return launched.process.poll() is not None

    eventually(provoke, 30, "ended")
    assert launched.process.returncode == 125, launched.output
    assert "restart 2 of 2 within 600 s" in launched.output
    launched.assert_nothing_left()


def test_a_first_start_is_not_repeated_unless_asked(launch: Start) -> None:
    launched = launch("--tp", "2", fault="init_raise:1")
    assert launched.wait_exit() == 1
    assert "restarting" not in launched.output
    launched = launch("--tp", "2", "--restart", "always", "--max-restarts", "2", fault="init_raise:1")
    begin = time.monotonic()
    assert launched.wait_exit() == 125
    assert time.monotonic() - begin > 1, "the second restart comes after a second"
    assert launched.output.count("restarting EngineCore_DP0") == 2
    launched.assert_nothing_left()


def test_always_gets_over_a_failure_that_passes(launch: Start) -> None:
    launched = launch("--tp", "2", "--restart", "always", fault="init_raise:1,once")
    launched.wait_ready()
    assert launched.complete("x", 3) == expected("x", 3)
    assert launched.stop() == 0
    launched.assert_nothing_left()


def test_a_wrong_setting_is_never_tried_again(launch: Start) -> None:
    launched = launch("--restart", "always", "--worker", "json:JSONDecoder")
    assert launched.wait_exit() == 2
    assert "restarting" not in launched.output


def test_a_stop_is_a_stop_in_back_off_too(launch: Start) -> None:
    launched = launch("--tp", "2", "--restart", "always", fault="init_raise:1")
    eventually(lambda: "restarting EngineCore_DP0 in 2 s" in launched.output, 20)
    begin = time.monotonic()
    launched.signal(signal.SIGTERM)
    assert launched.wait_exit() in (0, 143)
    assert time.monotonic() - begin < 1.8
    launched.assert_nothing_left()


@pytest.mark.parametrize("by", ["signal", "xserve stop"])
def test_a_stop_while_the_core_is_away(launch: Start, by: str) -> None:
    launched = launch("--tp", "2", fault="step_raise:1")
    launched.wait_ready()
    eventually(lambda: _hit(launched) or "in 2 s" in launched.output, 20)
    if by == "signal":
        launched.signal(signal.SIGTERM)
    else:
        command = [sys.executable, "-m", "launcher.cli", "stop"]
        subprocess.run(command, env=launched.environment, check=True, timeout=30, capture_output=True)
    assert launched.wait_exit() == 0
    launched.assert_nothing_left()


def _hit(launched: Launch) -> bool:
    try:
        launched.complete("x", 1, timeout=0.5)
    except OSError:
        pass
    return False


def test_an_old_process_that_will_not_go_holds_the_new_one_back(launch: Start) -> None:
    """A rank that ignores everything is killed and reaped before its successor starts."""
    launched = launch("--tp", "2", fault="slow_cleanup:1:60")
    launched.wait_ready()
    old = launched.pid_of("Worker_DP0_PP0_TP1")
    os.kill(launched.pid_of("Worker_DP0_PP0_TP0"), signal.SIGKILL)
    wait_whole(launched)
    assert not start_time(old)
    launched.process.kill()
    launched.wait_exit()
    launched.assert_nothing_left()


def test_many_rounds_leave_no_zombie_and_no_descriptor(launch: Start) -> None:
    launched = launch("--tp", "2", "--max-restarts", "100")
    launched.wait_ready()
    supervisor = launched.process.pid
    counts = []
    for number in range(12):
        os.kill(launched.pid_of("Worker_DP0_PP0_TP1"), signal.SIGKILL)
        eventually(lambda: launched.output.count("restarting EngineCore") > number, 10)  # noqa: B023
        # Back-off grows to seconds; the test is about what is left, so it ends the core before that matters.
        if number >= 3:
            break
        wait_whole(launched, number + 1)
        counts.append(len(os.listdir(f"/proc/{supervisor}/fd")))
        states = [open_stat(pid) for pid in launched.tree()]
        assert "Z" not in states
    assert len(set(counts)) == 1, counts
    assert launched.stop() == 0
    launched.assert_nothing_left()


def open_stat(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_group_comes_back_though_the_helper_went_too(launch: Start, number: signal.Signals) -> None:
    launched = launch("--tp", "2")
    launched.wait_ready()
    helper = launched.pid_of("Forkserver")
    os.kill(helper, number)
    os.kill(launched.pid_of("Worker_DP0_PP0_TP1"), signal.SIGKILL)
    wait_whole(launched)
    assert launched.complete("back", 4) == expected("back", 4)
    assert helper not in launched.tree()
    assert f"Forkserver, pid {helper}, step" in launched.output
    assert launched.stop() == 0
    launched.assert_nothing_left()
