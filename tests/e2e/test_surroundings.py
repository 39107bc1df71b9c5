"""What a launch must bear from outside: a small /dev/shm, readers of its output that go away, control groups."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import eventually
from tests.e2e.launch import Launch, start_time
from tests.e2e.test_edges import works
from tests.e2e.test_faults import expected
from tests.e2e.test_restart import restarts

Start = Callable[..., Launch]
V1_GROUPS = Path("/sys/fs/cgroup/pids")
V2_GROUPS = Path("/sys/fs/cgroup")


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_small_dev_shm(launch: Start, method: str) -> None:
    """Rings are memory without a name: whatever the size of /dev/shm, nothing in it is needed, used or left."""
    script = 'mount -t tmpfs -o size=64k none /dev/shm && head -c 60k /dev/zero > /dev/shm/others && exec "$@"'
    prefix = ("unshare", "-m", "bash", "-c", script, "bash")
    if not works(*prefix):
        pytest.skip("needs root and mount namespaces")
    launched = launch("--tp", "2", "--start-method", method, prefix=prefix)
    launched.wait_ready()
    prompt = "x" * 3000
    assert launched.complete(prompt, 50) == expected(prompt, 50)
    os.kill(launched.pid_of("Worker_DP0_PP0_TP1"), signal.SIGKILL)
    eventually(lambda: "whole again" in launched.output, 15)
    assert launched.complete(prompt, 50) == expected(prompt, 50)
    assert os.listdir(f"/proc/{launched.process.pid}/root/dev/shm") == ["others"]
    assert launched.stop() == 0
    launched.assert_nothing_left()


@pytest.fixture
def group() -> Iterator[Path]:
    """A new control group. Asked for before `launch`, so that it is taken away after all of its members."""
    top = V1_GROUPS if V1_GROUPS.is_dir() else V2_GROUPS
    group = top / f"xserve-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a control group: {error.strerror}")
    try:
        yield group
    finally:
        eventually(lambda: not (group / "cgroup.procs").read_text(), 5, "nobody in it")
        group.rmdir()


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_nobody_leaves_the_control_group(group: Path, launch: Start, method: str) -> None:
    """What the tree starts, over a restart too, is in the job's group, and so is what its workers start."""
    launched = launch(
        "--tp", "2", "--start-method", method, fault="spawn_child:1",
        prefix=("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"),
    )  # fmt: skip
    launched.wait_ready()
    os.kill(launched.pid_of("Worker_DP0_PP0_TP0"), signal.SIGKILL)
    eventually(lambda: "whole again" in launched.output, 15)
    eventually(lambda: any("sleep" in name for name in launched.tree().values()), 5)
    inside = {int(line) for line in (group / "cgroup.procs").read_text().split()}
    assert {launched.process.pid, *launched.tree()} <= inside
    for pid in inside:  # as a cluster's manager ends a job
        with contextlib.suppress(ProcessLookupError):  # gone with its parent
            os.kill(pid, signal.SIGKILL)
    launched.wait_exit()
    eventually(lambda: not any(start_time(pid) for pid in inside), 2, "all are gone")


def into(path: str, *, before: str = "") -> tuple[str, ...]:
    """A prefix that leads the output to `path`."""
    return ("setsid", "sh", "-c", f'{before} exec "$@" > {path} 2>&1', "sh")


def test_a_terminal_that_goes_away(launch: Start) -> None:
    """Started so that it outlives its session: no write to the terminal that is gone stops it, nor holds it up."""
    master, slave = pty.openpty()
    launched = launch("--tp", "2", prefix=into(os.ttyname(slave), before='trap "" HUP;'))
    launched.wait_ready()
    os.close(slave)
    os.close(master)
    gets_over_a_death(launched)


@pytest.fixture
def pipe(runtime: Path) -> Path:
    os.mkfifo(runtime / "pipe")
    return runtime / "pipe"


def test_a_reader_of_the_log_that_goes_away(launch: Start, pipe: Path) -> None:
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    launched = launch("--tp", "2", prefix=into(str(pipe)))
    launched.wait_ready()
    os.close(reading)
    gets_over_a_death(launched)


def test_a_reader_of_the_log_that_stops_reading(launch: Start, pipe: Path) -> None:
    """A pipe that is full holds nobody up."""
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    launched = launch("--tp", "2", prefix=into(str(pipe)))
    launched.wait_ready()
    writing = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x")
    os.close(writing)
    gets_over_a_death(launched)
    os.close(reading)


def gets_over_a_death(launched: Launch) -> None:
    os.kill(launched.pid_of("Worker_DP0_PP0_TP1"), signal.SIGKILL)
    eventually(lambda: restarts(launched, "EngineCore_DP0") == 1, 15, "started again")
    eventually(lambda: launched.get("/readyz")[0] == 200, 15)
    assert launched.complete("still here", 3) == expected("still here", 3)
    assert launched.stop() == 0
    launched.assert_nothing_left()
