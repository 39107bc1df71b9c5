"""`xserve status` and `xserve stop` against a process that answers like a supervisor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.cli import instance
from launcher.cli.main import main
from launcher.control import client
from tests.control.conftest import FakeSupervisor, private_places, supervisors

__all__ = ["private_places", "supervisors"]

Make = Callable[..., FakeSupervisor]


def test_status_json_has_exactly_the_documented_fields(supervisors: Make, capsys: pytest.CaptureFixture[str]) -> None:
    one = supervisors()
    assert main(["status", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert list(status) == ["name", "state", "since", "url", "processes"]
    assert status["processes"] == [
        {
            "title": "EngineCore_DP0",
            "role": "engine_core",
            "rank": None,
            "node": 0,
            "pid": one.pid,
            "phase": "ready",
            "since": 1.0,
            "restarts": 0,
        }
    ]


def test_status_for_people(supervisors: Make, capsys: pytest.CaptureFixture[str]) -> None:
    one = supervisors("chat")
    assert main(["status", "--name", "chat"]) == 0
    first, header, row = capsys.readouterr().out.splitlines()
    assert first.startswith("chat: ready for ")
    assert header.split() == ["TITLE", "ROLE", "RANK", "PID", "PHASE", "SINCE"]
    assert row.split()[:4] == ["EngineCore_DP0", "engine_core", str(one.pid), "ready"]


def test_which_one(supervisors: Make, capsys: pytest.CaptureFixture[str]) -> None:
    supervisors("a")
    supervisors("b")
    assert main(["status"]) == 2
    assert "a, b" in capsys.readouterr().err


def test_the_name_may_come_from_the_environment(supervisors: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisors("a")
    supervisors("b")
    with monkeypatch.context() as patch:
        patch.setenv("XSERVE_NAME", "b")
        assert main(["status"]) == 0


def test_stop(supervisors: Make, capsys: pytest.CaptureFixture[str], private_places: Path) -> None:
    one = supervisors("s")
    assert main(["stop", "--timeout", "5"]) == 0
    assert capsys.readouterr().out.startswith(f"stopped s (pid {one.pid}) in ")
    assert one.wait() == 0
    assert main(["stop", "--name", "s"]) == 3
    assert main(["status"]) == 3


def test_a_stop_that_takes_too_long_is_124(
    supervisors: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = supervisors("s", obeys=False)
    with monkeypatch.context() as patch:
        patch.setattr(client, "STOP_GRACE", 0.05)
        assert main(["stop", "--timeout", "0.05"]) == 124
    assert f"pid {one.pid}, is still running" in capsys.readouterr().err


def test_one_that_does_not_answer_is_4(
    supervisors: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisors("s", answers=False)
    with monkeypatch.context() as patch:
        patch.setattr(instance, "ANSWER_SECONDS", 0.1)
        assert main(["status"]) == 4
    assert "does not answer" in capsys.readouterr().err
