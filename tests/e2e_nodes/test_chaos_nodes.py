"""`scripts/chaos_nodes`, a few rounds of it: nothing is lost, wrong or left, and the report says what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.e2e_nodes.conftest import MakeNet

CHAOS = Path(__file__).resolve().parents[2] / "scripts" / "chaos_nodes.py"
SEED = 1
"""Its five rounds: a node frozen, an agent killed, a node killed, a cable out, node 0 killed."""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_nothing_is_lost_and_nothing_left(make_net: MakeNet, runtime: Path) -> None:
    make_net(1).close()  # or it is skipped
    out = runtime / "figures.json"
    command = [sys.executable, str(CHAOS), "--rounds", "5", "--seed", str(SEED), "--json", "--out", str(out)]
    environment = {**os.environ, "TMPDIR": str(runtime)}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr.decode()
    found = msgspec.json.decode(done.stdout)
    assert found == msgspec.json.decode(out.read_bytes())
    assert found["faults"] == {}
    assert found["rounds"] == 5
    assert all(goal["ok"] for goal in found["goals"])
    assert found["requests"]["right"] > 20
