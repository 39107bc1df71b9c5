"""kill -9 of any process: what must go is gone within 2 s, and the last lines say who died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import eventually
from tests.e2e.launch import Launch, start_time

Start = Callable[..., Launch]


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("EngineCore_DP0", "EngineCore_DP0, pid "),
        ("Worker_DP0_PP0_TP2", "rank 2 (Worker_DP0_PP0_TP2), pid "),
        ("APIServer_0", "APIServer_0, pid "),
    ],
)
def test_kill_while_serving(launch: Start, method: str, title: str, words: str) -> None:
    launched = launch("--tp", "4", "--start-method", method, "--restart", "never")
    launched.wait_ready()
    begin = time.monotonic()
    os.kill(launched.pid_of(title), signal.SIGKILL)
    assert launched.wait_exit() == 1
    assert time.monotonic() - begin < 2.5
    launched.assert_nothing_left(within=0.5)
    last = "\n".join(launched.output.strip().splitlines()[-3:])
    assert words in last
    assert "died of signal 9 (SIGKILL)" in last


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
@pytest.mark.parametrize("phase", ["serving", "starting"])
def test_kill_the_supervisor(launch: Start, method: str, phase: str) -> None:
    fault = "init_hang:1" if phase == "starting" else ""
    launched = launch("--tp", "4", "--start-method", method, fault=fault)
    if phase == "serving":
        launched.wait_ready()
    else:
        eventually(lambda: len(launched.pids_of("Worker")) == 4, 20)
    launched.tree()
    launched.process.kill()
    launched.wait_exit()
    launched.assert_nothing_left(within=2.0)
    # The next start takes the same name and directory.
    again = Launch(launched.runtime, "--tp", "1", "--name", "default")
    try:
        again.wait_ready()
        assert again.stop() == 0
    finally:
        again.close()


def test_kill_supervisor_and_helper_together(launch: Start) -> None:
    """Nobody is left to clean up: the processes go all the same, and the next start reclaims the directory."""
    launched = launch("--tp", "2")
    launched.wait_ready()
    helper = launched.pid_of("Forkserver")
    os.kill(helper, signal.SIGSTOP)
    launched.process.kill()
    os.kill(helper, signal.SIGKILL)
    launched.wait_exit()
    eventually(lambda: not [p for p, s in launched.seen.items() if start_time(p) == s], 2)
    again = Launch(launched.runtime, "--tp", "1", "--name", "default")
    try:
        again.wait_ready()
        assert again.stop() == 0
        again.assert_nothing_left()
    finally:
        again.close()


def test_a_dead_helper_is_replaced_and_still_guards(launch: Start) -> None:
    launched = launch("--tp", "2", fault="spawn_child:1")
    launched.wait_ready()
    old = launched.pid_of("Forkserver")
    os.kill(old, signal.SIGKILL)
    eventually(lambda: [p for p in launched.pids_of("Forkserver") if p != old], 10)
    assert launched.get("/readyz")[0] == 200
    eventually(lambda: any("sleep" in name for name in launched.tree().values()), 5)
    launched.process.kill()
    launched.wait_exit()
    launched.assert_nothing_left(within=2.0)


def test_bystanders_live_on(launch: Start) -> None:
    with subprocess.Popen(["sleep", "1000"]) as bystander:
        launched = launch("--tp", "2")
        launched.wait_ready()
        assert launched.stop() == 0
        launched = launch("--tp", "2")
        launched.wait_ready()
        launched.process.kill()
        launched.wait_exit()
        launched.assert_nothing_left()
        assert bystander.poll() is None
        bystander.kill()


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root for a PID namespace")
def test_as_pid_1_it_reaps_strangers(launch: Start, tmp_path: object) -> None:
    """In a PID namespace of its own: orphans of a worker become its children; none stays a zombie."""
    probe = subprocess.run(["unshare", "-rpf", "--mount-proc", "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"no PID namespaces here: {probe.stderr.decode().strip()}")
    program = (
        "import subprocess,sys,os,time,urllib.request\n"
        "os.system('(sleep 0.2; exit 3) &')\n"  # a stranger: its parent, a shell, has ended
        "os.execv(sys.executable,[sys.executable,'-m','launcher.cli','launch','--tp','2','--port','0'])\n"
    )
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    command = ["unshare", "-rpf", "--mount-proc", "--kill-child", sys.executable, "-c", program]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as outer:
        try:
            assert outer.stderr is not None
            for line in outer.stderr:
                if b"ready: reference at" in line:
                    break
            [inner] = children(outer.pid)
            eventually(lambda: not zombies(inner), 5, "no zombie")
            os.kill(inner, signal.SIGTERM)
            assert outer.wait(20) == 0
        finally:
            outer.kill()


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def zombies(parent: int) -> list[str]:
    found = []
    for pid in children(parent):
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        if text.rpartition(")")[2].split()[0] == "Z":
            found.append(text)
    return found
