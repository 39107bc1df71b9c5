"""status and stop against a real process that holds a run directory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.clock import Deadline
from launcher.control import client, run_dir
from launcher.control.run_dir import Instance
from launcher.errors import CannotTellError, DeadlineError, NotRunningError
from tests.control.conftest import FakeSupervisor

Make = Callable[..., FakeSupervisor]


def test_status_comes_from_the_supervisor(supervisors: Make) -> None:
    one = supervisors("s")
    found = client.status(run_dir.find("s"), Deadline.after(5))
    assert (found.name, found.state) == ("s", "ready")
    assert [p.pid for p in found.processes] == [one.pid]


def test_stop_waits_until_the_supervisor_is_gone(supervisors: Make, private_places: Path) -> None:
    one = supervisors("s")
    assert client.stop(run_dir.find("s"), None, Deadline.after(5)) == one.pid
    assert os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    assert one.wait() == 0
    assert list((private_places / "xserve").iterdir()) == []


def test_stop_gives_up_at_its_deadline(supervisors: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisors("deaf", obeys=False)
    with monkeypatch.context() as patch:
        patch.setattr(client, "STOP_GRACE", 0.05)
        with pytest.raises(DeadlineError, match=r"'deaf', pid \d+, is still running"):
            client.stop(run_dir.find("deaf"), 0.05, Deadline.after(5))


def test_a_supervisor_that_does_not_answer_is_told_apart_from_none(supervisors: Make) -> None:
    hung = supervisors("hung", answers=False)
    with pytest.raises(CannotTellError, match=rf"pid {hung.pid}.*does not answer"):
        client.status(run_dir.find("hung"), Deadline.after(0.1))


def test_a_stopped_supervisor_too(supervisors: Make) -> None:
    one = supervisors("t")
    one.kill(signal.SIGSTOP)
    with pytest.raises(CannotTellError, match="does not answer"):
        client.status(run_dir.find("t"), Deadline.after(0.1))
    one.kill(signal.SIGCONT)
    assert client.status(run_dir.find("t"), Deadline.after(5)).state == "ready"


def test_one_that_died_since_is_not_running(supervisors: Make) -> None:
    one = supervisors("gone")
    found = run_dir.find("gone")
    one.kill()
    one.wait()
    for ask in (lambda: client.status(found, Deadline.after(1)), lambda: client.stop(found, None, Deadline.after(1))):
        with pytest.raises(NotRunningError):
            ask()


def test_no_socket_though_live_cannot_be_told(supervisors: Make) -> None:
    one = supervisors("x")
    (one.path / run_dir.CONTROL_SOCKET).unlink()
    with pytest.raises(CannotTellError, match="No such file"):
        client.status(run_dir.find("x"), Deadline.after(1))


def test_nothing_at_all_is_not_running(tmp_path: Path) -> None:
    nobody = Instance(name="n", pid=1, start_time=0, path=str(tmp_path))
    with pytest.raises(NotRunningError):
        client.status(nobody, Deadline.after(1))
