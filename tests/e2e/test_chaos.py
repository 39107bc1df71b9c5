"""`scripts/chaos`, a few rounds of it: that nothing is lost or left, and that the report says what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

CHAOS = Path(__file__).resolve().parents[2] / "scripts" / "chaos.py"
SEED = 1


def chaos(runtime: Path, *arguments: str) -> dict[str, object]:
    out = runtime / "figures.json"
    command = [sys.executable, str(CHAOS), "--json", "--out", str(out), *arguments]
    environment = {**os.environ, "TMPDIR": str(runtime)}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=110)
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, object] = msgspec.json.decode(done.stdout)
    assert found == msgspec.json.decode(out.read_bytes())
    return found


@pytest.mark.slow
def test_nothing_is_lost_and_nothing_left(runtime: Path) -> None:
    found = chaos(runtime, "--quick", "--rounds", "8", "--seed", str(SEED))
    assert found["rounds"] == 8
    assert found["faults"] == {}
    goals = found["goals"]
    assert isinstance(goals, list)
    assert all(sorted(goal) == ["limit", "name", "ok", "value"] for goal in goals)
    assert len(goals) >= 9
    requests = found["requests"]
    assert isinstance(requests, dict)
    assert requests["right"] > 20
