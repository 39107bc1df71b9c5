"""Crash bundles: complete, private, few, and without secrets."""

from __future__ import annotations

import json
from pathlib import Path

from launcher.control.bundle import KEPT, write_bundle
from launcher.errors import Failure
from launcher.logs import SECRETS


def write(base: Path, number: int = 0) -> Path:
    cause = Failure(title="Worker_1", role="worker", kind="died", headline=f"died of signal 9, round {number}", rank=1)
    other = Failure(title="Core", role="engine_core", kind="peer_lost", headline="lost a worker")
    return write_bundle(
        base,
        "mine",
        cause,
        [other],
        story="the whole story of hunter2hunter2",
        outputs={"Worker_1": ["line one", "line two"], "Core": []},
        facts={"plan": {"name": "mine"}, "processes": [], "notes": ["Core: step 3: 2 requests"]},
    )


def test_both_files(tmp_path: Path) -> None:
    SECRETS.add("hunter2hunter2")
    text = write(tmp_path)
    assert text.stat().st_mode & 0o777 == 0o600
    assert text.parent.stat().st_mode & 0o777 == 0o700
    shown = text.read_text()
    for part in (
        "the whole story of ***",
        "--- last output of Worker_1",
        "line two",
        "step 3: 2 requests",
        "xserve 0.",
    ):
        assert part in shown
    data = json.loads(text.with_suffix(".json").read_text())
    assert data["cause"]["title"] == "Worker_1"
    assert [one["title"] for one in data["follow_ons"]] == ["Core"]
    assert data["last_output"]["Worker_1"] == ["line one", "line two"]
    assert data["plan"] == {"name": "mine"}


def test_the_oldest_go(tmp_path: Path) -> None:
    for number in range(KEPT + 3):
        newest = write(tmp_path, number)
    left = sorted(newest.parent.glob("*.json"))
    assert len(left) == KEPT
    assert len(list(newest.parent.glob("*.txt"))) == KEPT
    assert "round 3" in left[0].read_text()
    assert f"round {KEPT + 2}" in left[-1].read_text()
