"""Many restarts of a worker group; what must stay flat over them."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import _chaos_tree as trees
import _figures
from _chaos_arena import BACK_LIMIT, LATE, Arena

from launcher.process import procfs

EVERY = 25
"""Restarts between two looks."""
GROWTH = 2048
"""kB of resident memory that a process may gain over all of it, after a warm-up of a tenth."""
LOOKED_AT = ("Supervisor", "APIServer_0", "Forkserver", "EngineCore_DP0")


def soak(arena: Arena, restarts: int) -> dict[str, Any]:
    """Kill a worker so many times, with no load but the probe; the figures, and ``goals``."""
    arena.end_in_order()
    arena.fresh()
    arena.load.pause(8)
    samples = [look(arena)]
    chance = random.Random(restarts)
    zombies = 0
    for number in range(1, restarts + 1):
        tree = arena.launch.tree()
        victim = tree[chance.choice(sorted(title for title in tree if title.startswith("Worker")))]
        trees.strike(victim, signal.SIGKILL)
        if not trees.until(lambda: back(arena, victim), BACK_LIMIT) or arena.launch.probe(BACK_LIMIT) is None:  # noqa: B023
            arena.fault(LATE, f"soak: restart {number}")
            break
        states = [procfs.read_stat(pid) for pid in trees.descendants(arena.launch.process.pid)]
        zombies += sum(stat is not None and stat.state == "Z" for stat in states)
        if number % EVERY == 0:
            samples.append(look(arena))
            print(f"soak: {number} of {restarts} restarts: {samples[-1]}", file=sys.stderr)
    arena.load.resume()
    return {"restarts": restarts, "samples": samples, "zombies": zombies, "goals": judge(samples, zombies)}


def back(arena: Arena, victim: int) -> bool:
    tree = arena.launch.tree()
    return victim not in tree.values() and len(tree) == len(arena.launch.baseline) - 1


def look(arena: Arena) -> dict[str, dict[str, int]]:
    """Title → descriptors, threads, kB of resident memory, when it has come to rest."""
    trees.until(arena.is_steady, 3)
    pids = {"Supervisor": arena.launch.process.pid, **arena.launch.tree()}
    return {title: figures(pids[title]) for title in LOOKED_AT if title in pids}


def figures(pid: int) -> dict[str, int]:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(fields["Threads"]),
        "kB": int(fields["VmRSS"].split()[0]),
    }


def judge(samples: list[dict[str, dict[str, int]]], zombies: int) -> list[dict[str, Any]]:
    """Against the sample after the warm-up."""
    first, last = samples[min(len(samples) - 1, max(1, len(samples) // 10))], samples[-1]
    goals = [_figures.goal("soak: zombies", zombies, 0)]
    for title in LOOKED_AT:
        for name, limit in (("descriptors", 0), ("threads", 0), ("kB", GROWTH)):
            if title in first and title in last:
                goals.append(
                    _figures.goal(f"soak: {title}: {name} gained", last[title][name] - first[title][name], limit)
                )
    return goals
