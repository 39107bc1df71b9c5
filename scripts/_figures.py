"""What the benches share: percentiles, goals, facts of the machine, where results go."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.host import read_host


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def pair(values: Sequence[float]) -> dict[str, float]:
    return {"p50": percentile(values, 50), "p99": percentile(values, 99)}


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of each round's own ratio: a machine that is busy for a while weighs on both sides."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def goal(name: str, value: float, limit: float) -> dict[str, Any]:
    """Met when `value` is at most `limit`."""
    return {"name": name, "value": round(value, 4), "limit": limit, "ok": value <= limit}


def facts() -> dict[str, Any]:
    host = read_host()
    return {
        "cpus": host.cpus,
        "cpu_quota": host.cpu_quota,
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_at_start": os.getloadavg()[0],
    }


def show_goals(goals: Sequence[dict[str, Any]]) -> None:
    for one in goals:
        print(f"{'met   ' if one['ok'] else 'MISSED'} {one['name']}: {one['value']:.3f} (at most {one['limit']})")
    print(f"{sum(one['ok'] for one in goals)} of {len(goals)} goals met")


def deliver(result: dict[str, Any], out: str | None, as_json: bool) -> None:
    """To the file, and to stdout when asked."""
    text = json.dumps(result, indent=1)
    if out:
        Path(out).write_text(text + "\n")
        print(f"written: {out}", file=sys.stderr)
    if as_json:
        print(text)
