"""What a stop means: drain, budget, the second signal, a hang-up, the control socket."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Callable

import pytest

from tests.conftest import eventually
from tests.e2e.launch import Launch

Start = Callable[..., Launch]


class Request(threading.Thread):
    """One completion in the background."""

    def __init__(self, launched: Launch, tokens: int) -> None:
        super().__init__()
        self.launched, self.tokens = launched, tokens
        self.text: str | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.text = self.launched.complete("drain", self.tokens, timeout=60)
        except Exception as error:
            self.error = error
            if isinstance(error, urllib.error.HTTPError):
                error.close()


def busy(launched: Launch, tokens: int) -> Request:
    """A request that takes `tokens` steps of 20 ms, seen running."""
    request = Request(launched, tokens)
    eventually(lambda: request.error or _inflight(launched), 10, "a request in flight")
    return request


def _inflight(launched: Launch) -> bool:
    for line in launched.get("/metrics")[1].splitlines():
        if not line.startswith("#") and "running" in line and float(line.split()[-1]) > 0:
            return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_runs_is_finished(launch: Start, number: signal.Signals) -> None:
    launched = launch("--tp", "2", "--worker-config", "step_ms=20")
    launched.wait_ready()
    request = busy(launched, 60)
    launched.signal(number)
    eventually(lambda: launched.get("/readyz")[0] != 200, 5)
    with pytest.raises((urllib.error.HTTPError, OSError)) as refused:
        launched.complete("new", 1)
    if isinstance(refused.value, urllib.error.HTTPError):
        with refused.value as error:
            assert error.code == 503
            assert error.headers["Retry-After"]
    assert launched.wait_exit() == 0
    request.join()
    assert request.error is None
    assert request.text is not None
    assert len(request.text.split()) == 60
    assert "cut short" not in launched.output
    launched.assert_nothing_left()


def test_the_budget_cuts_short_and_says_how_many(launch: Start) -> None:
    launched = launch("--tp", "2", "--worker-config", "step_ms=20", "--shutdown-timeout", "2")
    launched.wait_ready()
    requests = [busy(launched, 3000), busy(launched, 3000)]
    begin = time.monotonic()
    assert launched.stop() == 0
    assert time.monotonic() - begin < 4
    for request in requests:
        request.join()
    assert "stopped; cut short: 2 requests" in launched.last_line
    launched.assert_nothing_left()


def test_a_budget_of_nothing_aborts(launch: Start) -> None:
    launched = launch("--tp", "2", "--worker-config", "step_ms=20", "--shutdown-timeout", "0")
    launched.wait_ready()
    request = busy(launched, 3000)
    begin = time.monotonic()
    assert launched.stop() == 0
    assert time.monotonic() - begin < 2
    request.join()
    launched.assert_nothing_left()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_second_signal_forces(launch: Start, number: signal.Signals, code: int) -> None:
    launched = launch("--tp", "2", "--worker-config", "step_ms=20")
    launched.wait_ready()
    request = busy(launched, 3000)
    launched.signal(number)
    eventually(lambda: "finishing what runs" in launched.output, 5)
    begin = time.monotonic()
    launched.signal(number)
    assert launched.wait_exit() == code
    assert time.monotonic() - begin < 2
    request.join()
    launched.assert_nothing_left()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_interrupted_before_ready(launch: Start, number: signal.Signals, code: int, method: str) -> None:
    launched = launch("--tp", "4", "--start-method", method, fault="init_hang:2")
    eventually(lambda: len(launched.pids_of("Worker")) == 4, 20)
    launched.tree()
    launched.signal(number)
    assert launched.wait_exit(10) == code
    launched.assert_nothing_left()


def test_stop_command(launch: Start) -> None:
    launched = launch("--tp", "2", "--name", "mine")
    launched.wait_ready()
    found = launched.status()
    assert found is not None
    assert (found["name"], found["state"]) == ("mine", "ready")
    assert found["url"] == f"http://127.0.0.1:{launched.port}"
    rows = {row["title"]: row for row in found["processes"]}
    assert set(rows) == {"APIServer_0", "EngineCore_DP0", "Worker_DP0_PP0_TP0", "Worker_DP0_PP0_TP1"}
    assert rows["Worker_DP0_PP0_TP1"]["rank"] == 1
    assert rows["Worker_DP0_PP0_TP1"]["pid"] == launched.pid_of("Worker_DP0_PP0_TP1")
    assert set(rows["APIServer_0"]) >= {"title", "role", "rank", "node", "pid", "phase", "since", "restarts"}
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli", "stop", "--name", "mine"],
        env=launched.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert launched.wait_exit(5) == 0
    launched.assert_nothing_left()
    assert launched.status() is None


def test_process_table(launch: Start) -> None:
    """--tp 4 is 6 processes below the supervisor, the helper not counted; names in ps and in comm."""
    launched = launch("--tp", "4")
    launched.wait_ready()
    names = sorted(name for name in launched.tree().values() if name != "xserve::Forkserver")
    workers = [f"xserve::Worker_DP0_PP0_TP{rank}" for rank in range(4)]
    assert names == ["xserve::APIServer_0", "xserve::EngineCore_DP0", *workers]
    core = launched.pid_of("EngineCore_DP0")
    for rank in range(4):
        pid = launched.pid_of(f"Worker_DP0_PP0_TP{rank}")
        with open(f"/proc/{pid}/comm") as file:
            assert file.read().strip() == f"xs:w{rank}.d0p0t{rank}"
        with open(f"/proc/{pid}/stat") as file:
            assert int(file.read().rpartition(")")[2].split()[1]) == core, "a worker is its engine core's child"
    with open(f"/proc/{launched.process.pid}/maps") as file:
        maps = file.read()
    assert "libtorch" not in maps
    assert launched.stop() == 0


def test_hang_up(launch: Start) -> None:
    launched = launch("--tp", "2")
    launched.wait_ready()
    launched.signal(signal.SIGHUP)
    assert launched.wait_exit() == 0
    assert "SIGHUP received" in launched.output
    launched.assert_nothing_left()


def test_an_ignored_hang_up_stays_ignored(launch: Start) -> None:
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launched = launch("--tp", "2")
    finally:
        signal.signal(signal.SIGHUP, old)
    launched.wait_ready()
    launched.signal(signal.SIGHUP)
    assert launched.complete("still here", 2)
    assert launched.process.poll() is None
    assert launched.stop() == 0


@pytest.mark.parametrize("phase", ["starting", "ready", "request"])
def test_ctrl_c_in_a_terminal(launch: Start, phase: str) -> None:
    """One Ctrl-C reaches the supervisor alone (children have sessions of their own): in order, and the prompt back."""
    launched = launch("--tp", "4", "--worker-config", "step_ms=20", fault="init_hang:1" if phase == "starting" else "")
    launched.close()
    launched.process.wait()
    master, slave = pty.openpty()
    fault = {"XSERVE_FAULT": "init_hang:1"} if phase == "starting" else {}
    environment = launched.environment | {"TERM": "xterm"} | fault
    command = [sys.executable, "-m", "launcher.cli", "launch", "--tp", "4", "--port", str(launched.port)]
    command += ["--worker-config", "step_ms=20"]
    launched.process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment, preexec_fn=_own_terminal(slave)
    )
    os.close(slave)
    shown = bytearray()
    reader = threading.Thread(target=_drain, args=(master, shown))
    reader.start()
    try:
        if phase == "starting":
            eventually(lambda: len(launched.pids_of("Worker")) == 4, 20)
            launched.tree()
        else:
            launched.wait_ready()
        request = busy(launched, 50) if phase == "request" else None
        os.write(master, b"\x03")
        assert launched.wait_exit(10) == (130 if phase == "starting" else 0), shown.decode(errors="replace")
        if request is not None:
            request.join()
            assert request.error is None
        launched.assert_nothing_left()
    finally:
        launched.close()
        reader.join(5)
        os.close(master)
    assert b"Worker_DP0_PP0_TP3" in shown


def _own_terminal(slave: int) -> Callable[[], None]:
    def prepare() -> None:
        import fcntl
        import termios

        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    return prepare


def _drain(fd: int, into: bytearray) -> None:
    while True:
        try:
            data = os.read(fd, 4096)
        except OSError:  # EIO: the last user of the terminal is gone
            return
        if not data:
            return
        into += data


def test_status_while_starting_and_probes(launch: Start) -> None:
    launched = launch("--tp", "2", fault="init_hang:1")
    eventually(lambda: launched.get("/livez")[0] == 200, 20)
    eventually(lambda: "Worker_DP0_PP0_TP1: device" in launched.get("/startupz")[1], 20)
    assert launched.get("/startupz")[0] == 503
    assert launched.get("/readyz")[0] == 503
    assert launched.get("/health")[0] == 503
    found = launched.status()
    assert found is not None
    assert found["state"] == "starting"
    phases = {row["title"]: row["phase"] for row in found["processes"]}
    assert phases["Worker_DP0_PP0_TP1"] == "device"
    assert json.dumps(phases)
    launched.signal(signal.SIGTERM)
    assert launched.wait_exit() == 143
