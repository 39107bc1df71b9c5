"""Launches in places that are usual in containers and on clusters, and break programs that do not expect them."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import eventually
from tests.e2e.launch import Launch

Start = Callable[..., Launch]
REPOSITORY = str(Path(__file__).resolve().parents[2])


def serves(launched: Launch, *, clean: bool = True) -> None:
    """It gets ready, answers, and stops in order."""
    launched.wait_ready()
    assert launched.complete("hi", 3)
    assert launched.stop() == 0, launched.output
    if clean:
        launched.assert_nothing_left()
    assert "Traceback" not in launched.output


def works(*prefix: str) -> bool:
    command = [*prefix, sys.executable, "-c", "import launcher"]
    return subprocess.run(command, capture_output=True, check=False, cwd=REPOSITORY).returncode == 0


AS_NOBODY = ("unshare", "--user", "--map-user=4242", "--map-group=4242")
"""In a namespace of its own: nobody has to be root for it, and a Python that only we may read can still be read."""


def test_a_user_without_a_passwd_entry(launch: Start, runtime: Path) -> None:
    if shutil.which("unshare") is None or not works(*AS_NOBODY):
        pytest.skip("needs user namespaces")
    temporary = runtime / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)
    runtime.chmod(0o755)
    env = {"XDG_RUNTIME_DIR": None, "HOME": None, "USER": None, "LOGNAME": None, "TMPDIR": str(temporary)}
    launched = launch("--tp", "2", env=env, prefix=AS_NOBODY)
    launched.wait_ready()
    directory = temporary / "xserve-4242"
    status = directory.stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (os.getuid(), 0o700), "its own, and closed to others"
    serves(launched, clean=False)
    assert list(directory.rglob("*")) == []


def test_without_a_home(launch: Start) -> None:
    serves(launch("--tp", "2", env={"HOME": None, "USER": None, "LOGNAME": None}))


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_long_tmpdir(launch: Start, runtime: Path, method: str) -> None:
    """A socket's path holds 107 bytes; /tmp is what is left when everything else is longer."""
    long = runtime / ("t" * (150 - len(str(runtime)) - 1))
    long.mkdir()
    assert len(str(long)) == 150
    name = f"edges-{os.getpid()}-{method}"
    env = {"XDG_RUNTIME_DIR": None, "TMPDIR": str(long)}
    serves(launch("--tp", "2", "--start-method", method, "--name", name, env=env), clean=False)


def test_a_long_name(launch: Start) -> None:
    launched = launch("--tp", "2", "--name", "n" * 200)
    launched.wait_ready()
    found = launched.status()
    assert found is not None
    assert found["name"] == "n" * 200
    serves(launched)


def test_a_read_only_root(launch: Start) -> None:
    """Only /run can be written, as in containers started with --read-only --tmpfs /run."""
    script = """set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 none /run
mkdir -m 700 /run/mine
for point in $(awk '{print $5}' /proc/self/mountinfo | sort -u); do
    case $point in /run*|/proc*|/sys*|/dev*) ;; *) mount -o remount,bind,ro "$point" 2>/dev/null || true;; esac
done
if touch /tmp/xs-probe 2>/dev/null; then exit 77; fi
exec "$@"
"""
    prefix = ("unshare", "-m", "bash", "-c", script, "bash")
    if os.getuid() != 0 or not works(*prefix):
        pytest.skip("needs root and mount namespaces")
    serves(launch("--tp", "2", env={"XDG_RUNTIME_DIR": "/run/mine", "HOME": "/nonexistent"}, prefix=prefix))


def test_blanks_and_foreign_letters_in_paths(launch: Start, runtime: Path) -> None:
    place = runtime / "mit Leerzeichen, ü und 木"
    place.mkdir(mode=0o700)
    (place / "eigener_worker.py").write_text(
        "from launcher.worker.reference import ReferenceWorker\nclass Meiner(ReferenceWorker): pass\n"
    )
    env = {"XDG_RUNTIME_DIR": str(place), "PYTHONPATH": f"{place}:{REPOSITORY}"}
    for method in ("forkserver", "spawn"):
        launched = launch("--tp", "2", "--worker", "eigener_worker:Meiner", "--start-method", method, env=env)
        launched.wait_ready()
        assert launched.get("/v1/models")[0] == 200
        assert launched.stop() == 0, launched.output
    assert [str(p) for p in (place / "xserve").rglob("*")] == []


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_closed_standard_descriptors(launch: Start, method: str) -> None:
    """The next file opened would get their numbers, and somebody's print would go into it."""
    launched = launch("--tp", "2", "--start-method", method, prefix=("bash", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "bash"))
    serves(launched)
    assert launched.output == ""


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("ulimit -n 256", "open files: the hard limit is 256, about 128 connections at a time"),
        ("ulimit -Sn 256", "open files: limit raised from 256 to "),
    ],
)
def test_few_descriptors(launch: Start, limit: str, words: str) -> None:
    launched = launch("--tp", "2", prefix=("bash", "-c", f'{limit}; exec "$@"', "bash"))
    launched.wait_ready()
    limits = Path(f"/proc/{launched.pid_of('EngineCore_DP0')}/limits").read_text()
    soft, hard = re.findall(r"Max open files\s+(\d+)\s+(\d+)", limits)[0]
    assert soft == hard
    serves(launched)
    assert words in launched.output


def test_several_at_once(launch: Start) -> None:
    """Nothing that two instances need apart is chosen by chance: names, directories, rendezvous files, ports."""
    launched = [launch("--tp", "2", "--port", "0", env={"XDG_RUNTIME_DIR": None, "TMPDIR": "/tmp"}) for _ in range(4)]
    try:
        for each in launched:
            eventually(lambda each=each: "ready: reference at" in each.output or each.process.poll(), 60, "ready")
        urls = [re.findall(r"ready: reference at (\S+)", each.output) for each in launched]
        assert len({url[0] for url in urls if url}) == 4, [each.output for each in launched]
    finally:
        codes = [each.stop() for each in launched]
    assert codes == [0] * 4


def test_nothing_but_http_is_heard_beyond_loopback(launch: Start) -> None:
    import psutil

    launched = launch("--tp", "2", "--host", "0.0.0.0")
    launched.wait_ready()
    pids = {launched.process.pid, *launched.tree()}
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for pid in pids
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {where for where in listening if where[0] not in ("127.0.0.1", "::1")} == {("0.0.0.0", launched.port)}
    serves(launched)


def test_more_connections_than_descriptors(launch: Start) -> None:
    """What is too much waits or is refused; the server lives, and serves on when there is room again."""
    import socket

    launched = launch("--tp", "2", prefix=("bash", "-c", 'ulimit -n 128; exec "$@"', "bash"))
    launched.wait_ready()
    held = []
    try:
        for _ in range(300):
            held.append(socket.create_connection(("127.0.0.1", launched.port), 5))
            held[-1].sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n")  # unfinished, so that it stays
        assert launched.process.poll() is None
    finally:
        for each in held:
            each.close()
    eventually(lambda: launched.get("/readyz")[0] == 200, 20, "room again")
    assert launched.complete("hi", 3)
    assert len(launched.pids_of("Worker_")) == 2
    assert launched.stop() == 0, launched.output
    launched.assert_nothing_left()
