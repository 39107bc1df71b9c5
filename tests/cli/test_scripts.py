"""The scripts that a newcomer meets first, and the systemd unit."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import eventually

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ["scripts/setup", "scripts/run", "scripts/test", "scripts/check", ".ci/run"]
SCRIPTS += ["scripts/testnet", "scripts/bench_nodes", "scripts/chaos_nodes"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_executable_and_parse(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / script], check=True, timeout=30)


# --- setup, in a copy of its own with a stand-in for Python


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/setup", tmp_path / "scripts/setup")
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    native = Path("launcher/ipc/_native.c")
    (tmp_path / native).parent.mkdir(parents=True)
    shutil.copy(ROOT / native, tmp_path / native)
    return tmp_path


def stand_in(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def setup(copy: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [copy / "scripts/setup"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def write_stamp(copy: Path) -> None:
    """What `scripts/setup` writes when it is done, for the stand-in's version."""
    digest = hashlib.sha256(f"{copy}\nPython 3.12.0\n".encode())
    for file in ("pyproject.toml", "scripts/setup", "launcher/ipc/_native.c"):
        digest.update((copy / file).read_bytes())
    (copy / ".venv/.setup").write_text(digest.hexdigest() + "\n")


def test_setup_says_which_python_it_needs(copy: Path) -> None:
    old = stand_in(copy / "old", "exit 1")
    done = setup(copy, PYTHON=str(old))
    assert done.returncode == 1
    assert done.stderr == f"setup: PYTHON={old} is no Python of 3.11 or later\n"
    # Nothing on PATH but what the script itself needs.
    tools = copy / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "readlink", "sha256sum", "cut", "cat", "flock", "rm", "env"):
        (tools / name).symlink_to(shutil.which(name) or pytest.fail(f"no {name}"))
    done = setup(copy, PATH=str(tools))
    assert done.returncode == 1
    assert "no Python of 3.11 or later" in done.stderr
    assert done.stderr.count("\n") == 1


def test_setup_says_when_the_venv_module_is_missing(copy: Path) -> None:
    bare = stand_in(copy / "python", 'case "$2" in *ensurepip*) exit 1;; esac')
    done = setup(copy, PYTHON=str(bare))
    assert done.returncode == 1
    assert "apt-get install python3-venv" in done.stderr


def test_setup_does_nothing_when_all_is_up_to_date(copy: Path) -> None:
    stand_in(copy / ".venv/bin/python", "echo Python 3.12.0")
    write_stamp(copy)
    done = setup(copy)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (copy / "pyproject.toml").write_text("changed")
    assert setup(copy, PYTHON="/bin/false").stderr != ""


def test_two_setups_at_once_become_one(copy: Path) -> None:
    stand_in(copy / ".venv/bin/python", "echo Python 3.12.0")
    with (copy / "scripts/setup").open() as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        second = subprocess.Popen([copy / "scripts/setup"], stderr=subprocess.PIPE, text=True)
        assert second.stderr is not None
        assert "another setup is running" in second.stderr.readline()
        write_stamp(copy)
    assert second.wait(10) == 0
    second.stderr.close()


# --- run


@pytest.fixture
def private_runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="xs-", dir="/tmp") as folder, monkeypatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        patch.delenv("RUNTIME_DIRECTORY", raising=False)
        yield


Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run() -> Iterator[Run]:
    """Starts scripts/run.py (its environment is made already: it is this one); ends what a failed test leaves."""
    made: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "scripts/run.py", *arguments]
        pipe = subprocess.PIPE
        made.append(subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True))
        return made[-1]

    yield start
    for one in made:
        if one.poll() is None:
            one.kill()
            one.wait(10)
        if one.stdout is not None:
            one.stdout.close()


def read_until_serving(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    text = ""
    for line in started.stdout:
        text += line
        if line.startswith("serving until"):
            return text
    raise AssertionError(f"ended with {started.wait(10)}:\n{text}")


REFERENCE = ("--worker", "reference", "--tp", "2")


@pytest.mark.usefixtures("private_runtime")
def test_run_once_asks_shows_and_stops(run: Run) -> None:
    with socket.socket() as holder:
        try:
            holder.bind(("127.0.0.1", 8000))
            holder.listen()
        except OSError:
            pass  # somebody else has it: as good
        done = run("--once", *REFERENCE)
        text, _ = done.communicate(timeout=90)
    assert done.returncode == 0, text
    assert "port 8000 is taken: using a free one" in text
    assert re.search(r"^reference: (\d+ ){48}", text, re.MULTILINE), text
    assert re.search(r"xserve::Supervisor  pid (\d+)", text)
    assert "xserve::Worker_DP0_PP0_TP1" in text
    assert "\n  curl -N -H " in text
    pids = [int(pid) for pid in re.findall(r"  pid (\d+)", text)]
    assert len(pids) >= 5
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids), 5, "nothing is left")


@pytest.mark.usefixtures("private_runtime")
def test_the_curl_line_works_and_ctrl_c_stops_in_order(run: Run) -> None:
    started = run(*REFERENCE, "--port", "0")
    text = read_until_serving(started)
    curl = next(line.strip() for line in text.splitlines() if line.startswith("  curl "))
    if shutil.which("curl"):
        answer = subprocess.run(
            curl.replace('"stream"', '"max_tokens": 3, "stream"'), shell=True, capture_output=True, timeout=60
        )
        assert answer.stdout.rstrip().endswith(b"data: [DONE]")
    started.send_signal(signal.SIGINT)
    rest, _ = started.communicate(timeout=60)
    assert started.returncode == 0, rest
    assert "stopped" in rest


@pytest.mark.usefixtures("private_runtime")
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--tpp", "2"], 2, "unknown flag --tpp: did you mean --tp?"),
        (["--tp", "0"], 2, "--tp 0 is out of range"),
        (["--model", "/nonexistent/model"], 2, "/nonexistent/model"),
    ],
)
def test_run_fails_clearly(run: Run, arguments: list[str], code: int, words: str) -> None:
    failed = run("--once", *arguments)
    text, _ = failed.communicate(timeout=60)
    assert failed.returncode == code, text
    assert words in text
    assert "Traceback" not in text


@pytest.mark.usefixtures("private_runtime")
def test_when_run_is_killed_nothing_is_left(run: Run) -> None:
    started = run(*REFERENCE, "--port", "0")
    pids = [int(pid) for pid in re.findall(r"  pid (\d+)", read_until_serving(started))]
    assert len(pids) >= 5
    started.kill()
    started.wait(10)
    eventually(lambda: not any(lives(pid) for pid in pids), 15, "nothing is left")


def lives(pid: int) -> bool:
    """A zombie does not: whoever is PID 1 here may take its time to reap it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- systemd


UNIT = ROOT / "systemd/xserve@.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_the_unit_is_valid(tmp_path: Path) -> None:
    stub = stand_in(tmp_path / "xserve", "exit 0")
    unit = tmp_path / "xserve@test.service"
    unit.write_text(UNIT.read_text().replace("/usr/local/bin/xserve", str(stub)))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_unit_says_what_the_supervisor_relies_on() -> None:
    text = UNIT.read_text()
    for line in (
        "Type=notify",
        "NotifyAccess=main",
        "KillMode=mixed",
        "EnvironmentFile=-/etc/xserve/%i.env",
        "RuntimeDirectory=xserve/%i",
        "Restart=on-failure",
        "RestartPreventExitStatus=2 125",
    ):
        assert f"\n{line}\n" in text
    stop = re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert stop is not None
    assert int(stop[1]) > 30 + 5, "above --shutdown-timeout, with room for the end"
