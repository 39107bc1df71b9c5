"""What the user reads when something failed, and the exit code."""

from __future__ import annotations

import io

import pytest

from launcher.cli.report import failure_text, report
from launcher.errors import (
    CannotTellError,
    ChildFailedError,
    DeadlineError,
    Failure,
    HostError,
    InternalError,
    NotRunningError,
    RemoteError,
    UsageError,
    XserveError,
)


def failure(**changes: object) -> Failure:
    known: dict[str, object] = {
        "title": "Worker_DP0_PP0_TP2",
        "role": "worker",
        "kind": "raised",
        "headline": "RuntimeError: boom",
        "step": "model",
        "rank": 2,
        "pid": 77,
    }
    return Failure(**(known | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (HostError("x"), 2),
        (NotRunningError("x"), 3),
        (CannotTellError("x"), 4),
        (DeadlineError("x"), 1),
        (InternalError("x"), 1),
        (XserveError("two\nlines"), 1),
    ],
)
def test_an_error_of_ours_is_one_line(error: XserveError, code: int) -> None:
    stream = io.StringIO()
    assert report(error, stream) == code
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().startswith("xserve: ")


def test_codes_of_the_others() -> None:
    stream = io.StringIO()
    assert report(KeyboardInterrupt(), stream) == 130
    assert report(ZeroDivisionError("odd"), stream) == 1
    assert "ZeroDivisionError: odd" in stream.getvalue()
    assert stream.getvalue().rstrip().splitlines()[-1].startswith("xserve: this is a bug")
    assert report(ChildFailedError(failure()), stream) == 1
    assert report(ChildFailedError(failure(permanent=True)), stream) == 2


def test_follow_ons_then_traceback_then_headline() -> None:
    cause = failure(traceback="Traceback (most recent call last):\n  …\nRuntimeError: boom\n")
    other = failure(title="Worker_DP0_PP0_TP0", rank=0, pid=75, kind="peer_lost", headline="connection\nclosed")
    text = failure_text(cause, (other, other))
    lines = text.splitlines()
    assert (
        lines[:2] == ["xserve: because of it: rank 0 (Worker_DP0_PP0_TP0), pid 75, step model: connection; closed"] * 2
    )
    assert lines[3:6] == ["Traceback (most recent call last):", "  …", "RuntimeError: boom"]
    assert lines[-1] == "xserve: rank 2 (Worker_DP0_PP0_TP2), pid 77, step model: RuntimeError: boom"
    assert text.count("Traceback") == 1


def test_a_hard_death_shows_its_last_output() -> None:
    died = failure(kind="died", headline="died of signal 11 (SIGSEGV)", signal=11, last_output=("one", "two"))
    lines = failure_text(died).splitlines()
    assert lines[1:4] == ["last output of Worker_DP0_PP0_TP2:", "  one", "  two"]
    assert "SIGSEGV" in lines[-2]
    assert lines[-1].startswith("xserve: it crashed in native code")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "timeout"}, "--ready-timeout"),
        (
            {"kind": "died", "signal": 9, "headline": "died of signal 9 (SIGKILL): out of memory (…)"},
            "--kv-cache-memory",
        ),
        ({"kind": "died", "signal": 9}, "killed"),
        ({"kind": "died", "exit_code": 3}, "without a word"),
        ({"kind": "peer_lost"}, "other end"),
        ({"kind": "raised"}, "RuntimeError: boom"),
    ],
)
def test_advice(changes: dict[str, object], words: str) -> None:
    assert words in failure_text(failure(**changes)).splitlines()[-1]


def test_a_remote_error_shows_the_remote_traceback_first() -> None:
    stream = io.StringIO()
    report(RemoteError("ValueError: bad", type_name="ValueError", remote_traceback="Traceback: far away"), stream)
    assert stream.getvalue() == "Traceback: far away\n\nxserve: ValueError: bad\n"
