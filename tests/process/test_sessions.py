"""What children leave behind is ended; nobody else is."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from launcher.clock import Deadline
from launcher.process import procfs, sessions
from launcher.process.nursery import Nursery
from tests.conftest import eventually
from tests.process.conftest import LAUNCH_ID, is_alive


def test_members_of_a_session_and_strays(start: Callable[..., Nursery]) -> None:
    nursery = start("starts_a_shell")
    nursery.wait_ready(10)
    [child] = nursery.children
    assert child.ready_info is not None
    stray = child.ready_info["stray"]
    found = {p.pid for p in sessions.find_members({child.pid: child.start_time}, LAUNCH_ID)}
    assert {child.pid, stray} <= found
    assert len(found) == 4  # the worker, its shell, the shell's sleep, the stray
    nursery.stop(0)
    left = found - {child.pid}
    assert all(is_alive(pid) for pid in left), "the worker's death alone leaves them"
    with (
        subprocess.Popen(["sleep", "1000"]) as bystander,
        subprocess.Popen(["sleep", "1000"], start_new_session=True) as foreign,
    ):
        assert sessions.kill_members({child.pid: child.start_time}, LAUNCH_ID, Deadline.after(5)) == 3
        eventually(lambda: not any(is_alive(pid) for pid in left), 2)
        assert bystander.poll() is None
        assert foreign.poll() is None
        bystander.kill()
        foreign.kill()


def test_a_number_used_again_is_not_ours() -> None:
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as stranger:
        start_time = procfs.start_time(stranger.pid)
        assert sessions.find_members({stranger.pid: start_time - 1}, "") == []
        assert not sessions.signal_process(stranger.pid, start_time - 1, 9)
        assert stranger.poll() is None
        assert sessions.signal_process(stranger.pid, start_time, 9)
    assert not sessions.signal_process(stranger.pid, start_time, 9)
