"""The bench's cell runs with every transport that needs no peer, and a plot comes out of it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_small_cell() -> None:
    names = ["xserve", "pipe", "zmq"]
    experiments = [
        {"name": "small", "size": 200, "samples": 20, "rounds": 3},
        {"name": "gap", "size": 2048, "samples": 6, "rounds": 3, "gap": 0.001},
        {"name": "array", "size": 2 << 20, "samples": 3, "rounds": 3, "array": True},
    ]
    task = {"readers": 2, "transports": names, "experiments": experiments, "idle_seconds": 0.1}
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "_queue_cell.py", json.dumps(task)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {name: list(found) for name, found in result["experiments"].items()} == {
        experiment["name"]: names for experiment in experiments
    }
    assert result["experiments"]["small"]["xserve"]["samples"] == 18
    assert result["memory"]["xserve"]["reserved_bytes"] >= result["memory"]["xserve"]["resident_bytes"] > 0


def test_the_plot_is_an_svg_with_a_bar_for_each_value() -> None:
    drawn = load("_plot").bars("A & B", "µs", {"200 B": {"xserve": 5.0, "vLLM": 26.0}, "2 kB": {"xserve": 6.5}})
    root = ElementTree.fromstring(drawn)
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["xserve: 5", "vLLM: 26", "xserve: 6.5"]
