"""Every fault of the reference worker at --tp 4 under every start method: words, exit code, nothing left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable

import pytest

from launcher.worker.reference import expected_tokens
from tests.conftest import eventually
from tests.e2e.launch import Launch, processes_with

Start = Callable[..., Launch]
METHODS = ["forkserver", "spawn", "fork"]


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def expected(prompt: str, count: int) -> str:
    return "".join(f"{token} " for token in expected_tokens(list(prompt.encode()), count))


def start(launch: Start, method: str, fault: str, *arguments: str) -> Launch:
    return launch("--tp", "4", "--start-method", method, "--restart", "never", *arguments, fault=fault)


def fails(launched: Launch, code: int = 1) -> str:
    """The launch ends by itself and leaves nothing; the last lines it printed."""
    assert launched.wait_exit() == code, launched.output
    launched.assert_nothing_left()
    output = launched.output
    assert output.count("Traceback (most recent call last)") <= 1, output
    return "\n".join(output.strip().splitlines()[-3:])


def test_init_raise(launch: Start, method: str) -> None:
    launched = start(launch, method, "init_raise:1")
    words = fails(launched)
    assert "rank 1 (Worker_DP0_PP0_TP1), pid " in words
    assert "step device: InjectedError: injected fault init_raise on rank 1" in words
    assert launched.output.count("Traceback (most recent call last)") == 1
    assert "leaked" not in launched.output


def test_init_segv(launch: Start, method: str) -> None:
    launched = start(launch, method, "init_segv:2")
    words = fails(launched)
    assert "rank 2 (Worker_DP0_PP0_TP2), pid " in words
    assert "died of signal 11 (SIGSEGV)" in words
    assert "last output of Worker_DP0_PP0_TP2:" in launched.output
    assert "Fatal Python error: Segmentation fault" in launched.output


def test_init_hang(launch: Start, method: str) -> None:
    launched = start(launch, method, "init_hang:3", "--ready-timeout", "3")
    words = fails(launched)
    assert "rank 3 (Worker_DP0_PP0_TP3)" in words
    assert re.search(r"no progress for \d s in step 'device' \(--ready-timeout 3\)", words), words


def test_import_sleep_too_long(launch: Start, method: str) -> None:
    words = fails(start(launch, method, "import_sleep:0:60", "--ready-timeout", "3"))
    assert "rank 0 (Worker_DP0_PP0_TP0)" in words
    assert "in step 'import' (--ready-timeout 3)" in words


def test_slow_but_with_progress(launch: Start, method: str) -> None:
    launched = start(launch, method, "init_progress:1:5;import_sleep:2:1;init_sleep:0:1", "--ready-timeout", "3")
    launched.wait_ready()
    assert launched.complete("slow", 3) == expected("slow", 3)
    assert launched.stop() == 0
    launched.assert_nothing_left()


def test_killed_while_it_sleeps_in_init(launch: Start, method: str) -> None:
    launched = start(launch, method, "init_sleep:1:60")
    pid = eventually(lambda: [p for p in launched.pids_of("Worker") if p], 20) and eventually(
        lambda: next((r["pid"] for r in status(launched) if r["rank"] == 1 and r["phase"] == "device"), 0), 20
    )
    begin = time.monotonic()
    os.kill(int(str(pid)), signal.SIGTERM)
    words = fails(launched)
    assert time.monotonic() - begin < 5
    assert "rank 1 (Worker_DP0_PP0_TP1)" in words
    assert "died of signal 15 (SIGTERM)" in words


def status(launched: Launch) -> list[dict[str, object]]:
    found = launched.status()
    launched.tree()
    return found["processes"] if found else []


def request_until_it_ends(launched: Launch) -> None:
    """The fault strikes at the first step; whether the client still got an answer is not the question here."""
    launched.wait_ready()
    with contextlib.suppress(OSError):
        launched.complete("x", 3, timeout=10)


def test_step_raise_on_a_rank_that_does_not_reply(launch: Start, method: str) -> None:
    launched = start(launch, method, "step_raise:3")
    request_until_it_ends(launched)
    words = fails(launched)
    assert "rank 3 (Worker_DP0_PP0_TP3), pid " in words
    assert "step serving: InjectedError: injected fault step_raise on rank 3" in words
    assert launched.output.count("Traceback (most recent call last)") == 1


def test_step_segv(launch: Start, method: str) -> None:
    launched = start(launch, method, "step_segv:1")
    request_until_it_ends(launched)
    words = fails(launched)
    assert "rank 1 (Worker_DP0_PP0_TP1), pid " in words
    assert "died of signal 11 (SIGSEGV)" in words


def test_step_hang_is_cut_short_by_a_stop(launch: Start, method: str) -> None:
    launched = start(launch, method, "step_hang:2", "--shutdown-timeout", "2")
    request_until_it_ends(launched)
    begin = time.monotonic()
    assert launched.stop() == 0
    assert time.monotonic() - begin < 5
    assert "stopped; cut short: Worker_DP0_PP0_TP2" in launched.last_line
    launched.assert_nothing_left()


def test_step_sleep(launch: Start, method: str) -> None:
    launched = start(launch, method, "step_sleep:0:0.05")
    launched.wait_ready()
    assert launched.complete("busy", 4) == expected("busy", 4)
    assert launched.stop() == 0
    launched.assert_nothing_left()


def test_slow_cleanup_within_the_budget(launch: Start, method: str) -> None:
    launched = start(launch, method, "slow_cleanup:1:2", "--shutdown-timeout", "20")
    launched.wait_ready()
    assert launched.stop() == 0
    assert "cleanup done" in launched.output
    assert "cut short" not in launched.output
    launched.assert_nothing_left()


def test_slow_cleanup_over_the_budget(launch: Start, method: str) -> None:
    launched = start(launch, method, "slow_cleanup:1:60", "--shutdown-timeout", "3")
    launched.wait_ready()
    begin = time.monotonic()
    assert launched.stop() == 0
    assert 1.5 < time.monotonic() - begin < 5
    assert "cut short: Worker_DP0_PP0_TP1" in launched.last_line
    launched.assert_nothing_left()


@pytest.mark.parametrize("how", ["stop", "kill worker", "kill supervisor"])
def test_what_a_worker_started_goes_too(launch: Start, method: str, how: str) -> None:
    launched = start(launch, method, "spawn_child:1")
    launched.wait_ready()
    mark = f"XDG_RUNTIME_DIR={launched.runtime}"
    eventually(lambda: [p for p in processes_with(mark) if p in launched.tree()], 5)
    assert any("sleep" in name for name in launched.tree().values())
    if how == "stop":
        assert launched.stop() == 0
    elif how == "kill worker":
        os.kill(launched.pid_of("Worker_DP0_PP0_TP1"), signal.SIGKILL)
        assert launched.wait_exit() == 1
    else:
        launched.process.kill()
        launched.wait_exit()
    launched.assert_nothing_left()


def test_oom_is_refused_without_a_limit(launch: Start, method: str) -> None:
    """The fault takes memory until the kernel strikes: only where a control group keeps it from hitting others."""
    launched = start(launch, method, "oom:1")
    request_until_it_ends(launched)
    words = fails(launched)
    assert "rank 1" in words


def test_bad_fault_text(launch: Start) -> None:
    launched = launch("--tp", "2", fault="explode:1")
    assert "XSERVE_FAULT" in fails(launched, 2)
