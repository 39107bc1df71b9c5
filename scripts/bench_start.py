"""Launch → ready of eight workers that import torch: ours, plain multiprocessing, torchrun; in one run, interleaved.

    scripts/bench_start [--quick] [--with-peers] [--json] [--out FILE] [--workers N] [--repeat N] [--model DIR] [--tp N]

Every way is timed from the exec of its first process: ours and multiprocessing's until an HTTP probe (``/readyz``)
says 200, torchrun's until each worker has said so. The measure is what nobody can do without: one ``import torch`` in a
fresh interpreter, from exec to exit, its own start included. Memory is PSS while all workers live. The restart is
the time from kill -9 of a worker until its whole group, new, is ready.

Ratios are medians of each round's own ratio, so that a machine that is busy for a while weighs on both sides.

``--with-peers``: a model's launch → first answer at ``--tp`` ranks, ours against vLLM's CPU wheel, which is installed
into an environment of its own in the user's cache (some GB, once).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import _figures
import _peers
from _start_ways import SLOW, WAYS, Start, as_data, our_first_answer, vllm_first_answer

from launcher import envs
from launcher.models.demo import demo_directory, demo_model, is_whole

QUICK_SECONDS = 55.0
"""No way is begun in a further round that would end later than this after the start."""
OURS, ONE_IMPORT, SPAWN = "xserve forkserver", "import torch", "multiprocessing spawn"


def measure(options: argparse.Namespace) -> dict[str, list[Start]]:
    """Way → a start a round. Each round begins with another way."""
    ways: dict[str, Callable[[int], Start]] = WAYS if options.quick else {**WAYS, **SLOW}
    names = list(ways)
    found: dict[str, list[Start]] = {name: [] for name in names}
    for turn in range(options.repeat):
        began = time.monotonic()
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append(ways[name](options.workers))
            print(f"round {turn + 1}: {name}: {found[name][-1].seconds:.2f} s", file=sys.stderr)
        took = time.monotonic() - began
        if time.monotonic() + took > options.until:
            break
    return found


def first_answers(options: argparse.Namespace) -> dict[str, Any]:
    """Launch → first answer of a model, ours and (if it can be had) vLLM's."""
    model = options.model or str(demo_directory(envs.cache_dir()))
    if not options.model and not is_whole(demo_directory(envs.cache_dir())):
        model = str(demo_model(envs.cache_dir(), tiny=True))
    result: dict[str, Any] = {"model": model, "tp": options.tp}
    rounds: dict[str, list[float]] = {"xserve": [], "vllm": []}
    try:
        for _ in range(1 if options.quick else 3):
            rounds["vllm"].append(vllm_first_answer(model, options.tp).seconds)
            rounds["xserve"].append(our_first_answer(model, options.tp).seconds)
            print(
                f"first answer: xserve {rounds['xserve'][-1]:.2f} s, vLLM {rounds['vllm'][-1]:.2f} s", file=sys.stderr
            )
    except _peers.NoPeer as error:
        result["without"] = str(error)
        print(f"without vLLM: {error}", file=sys.stderr)
        rounds["xserve"].append(our_first_answer(model, options.tp).seconds)
    return {**result, "seconds": rounds}


def summarise(found: dict[str, list[Start]], answers: dict[str, Any] | None) -> dict[str, Any]:
    seconds = {name: [start.seconds for start in starts] for name, starts in found.items()}
    pss = {name: statistics.median(s.pss for s in starts) for name, starts in found.items() if starts[0].pss}
    ratios = {
        f"{OURS} over {ONE_IMPORT}": _figures.median_ratio(seconds[OURS], seconds[ONE_IMPORT]),
        **{f"{OURS} over {name}": _figures.median_ratio(seconds[OURS], seconds[name]) for name in pss if name != OURS},
    }
    restart = statistics.median(start.restart / start.seconds for start in found[OURS])
    goals = [
        _figures.goal("launch to ready over one import of torch", ratios[f"{OURS} over {ONE_IMPORT}"], 1.3),
        _figures.goal("launch to ready over multiprocessing's spawn", ratios[f"{OURS} over {SPAWN}"], 1 / 3),
        _figures.goal("memory of a worker over spawn's", pss[OURS] / pss[SPAWN], 0.5),
        _figures.goal("restart of a dead group over its first start", restart, 0.3),
    ]
    if answers and answers["seconds"]["vllm"]:
        both = answers["seconds"]
        goals.append(
            _figures.goal(
                "launch to first answer over vLLM's", _figures.median_ratio(both["xserve"], both["vllm"]), 0.25
            )
        )
    return {
        "goals": goals,
        "ratios": ratios,
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "pss_mib": pss,
        "restart_s": statistics.median(start.restart for start in found[OURS]),
        "first_answer": answers,
        "rounds": {name: as_data(starts) for name, starts in found.items()},
    }


def show(result: dict[str, Any]) -> None:
    print(f"{result['workers']} workers that import torch, {len(result['rounds'][OURS])} round(s)")
    print(f"{'':28}{'ready':>9}{'PSS of a worker':>18}")
    for name, seconds in result["seconds"].items():
        memory = f"{result['pss_mib'][name]:13.0f} MiB" if name in result["pss_mib"] else ""
        print(f"{name:28}{seconds:7.2f} s{memory}")
    print(f"{'restart of a dead group':28}{result['restart_s']:7.2f} s\n")
    _figures.show_goals(result["goals"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], prog="bench_start")
    parser.add_argument("--quick", action="store_true", help="under 60 s: as many rounds as fit")
    parser.add_argument("--with-peers", action="store_true", help="a model's first answer, against vLLM's CPU wheel")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--out", metavar="FILE", help="write the JSON object there, too")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--repeat", type=int, help="rounds")
    parser.add_argument("--model", metavar="DIR", help="for --with-peers; default: the demo model")
    parser.add_argument("--tp", type=int, default=3, help="ranks for --with-peers")
    options = parser.parse_args()
    options.repeat = options.repeat or (2 if options.quick else 5)
    options.until = time.monotonic() + (QUICK_SECONDS if options.quick else 1e9)
    return options


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "?"


def main() -> int:
    options = parse()
    host = _figures.facts()
    found = measure(options)
    answers = first_answers(options) if options.with_peers else None
    versions = {name: _version(name) for name in ("xserve", "torch", "psutil")}
    result = {**summarise(found, answers), "workers": options.workers, "host": host, "versions": versions}
    if not options.json:
        show(result)
    _figures.deliver(result, options.out, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
