"""`scripts/bench_serve` on a tiny model: that it runs, and says what it promises. Not how fast anything is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench_serve.py"


@pytest.mark.slow
def test_one_object_with_goals(tiny_llama: Path, runtime: Path) -> None:
    out = runtime / "figures.json"
    command = [sys.executable, str(BENCH), "--quick", "--json", "--out", str(out), "--model", str(tiny_llama)]
    command += ["--repeat", "1", "--tokens", "4", "--threads", "1"]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr.decode()
    found = msgspec.json.decode(done.stdout)
    assert found == msgspec.json.decode(out.read_bytes())
    assert [sorted(goal) for goal in found["goals"]] == [["limit", "name", "ok", "value"]] * 2
    assert set(found["figures"]) == {"mp", "uni", "generate", "continuous"}
    assert all(value > 0 for figures in found["figures"].values() for value in figures.values())
    assert found["repetitions"] == 1
    assert found["omp_threads"] == 1
    assert found["same_tokens"]
    assert not [path for path in (runtime / "xserve").rglob("*") if path.is_socket() or path.is_file()]
