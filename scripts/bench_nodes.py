"""A plan from node 0 to eight workers on node 1 and their acknowledgements, against vLLM's MessageQueue, in one run.

    scripts/bench_nodes [--with-peers] [--quick] [--json] [--out FILE]

The nodes are network namespaces with a veth pair each (`scripts/testnet`): as root. Ours is what a launch has:
executor, data link, the node agent's relay, rings, workers; without and with a cluster key. vLLM's is one
TCP subscription for each remote worker and one queue back from each, as its executor makes them, which knows no keys.
A sample is one call and the acknowledgements: of all eight, or of one rank, as a step has it. Transports take turns in
rounds; a ratio is the median of the rounds' own ratios. Bytes are those that node 0's interface has sent for one call.

Namespaces on one machine share its CPUs and have no wire: what is compared is the work, not the network's own time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import _figures
import _peers
import msgspec
from _nodes_cell import Experiment, Task
from _testnet import NoNet, Testnet

WORKERS = 8
SIZES = {"2 kB": 2048, "32 kB": 32 << 10, "1 MiB": 1 << 20}
LAST = WORKERS - 1
OURS = ("xserve", "xserve with key")
Results = dict[str, dict[str, Any]]


def experiments(quick: bool) -> tuple[Experiment, ...]:
    found = []
    for label, size in SIZES.items():
        samples = (100 if quick else 400) if size >= 1 << 20 else (500 if quick else 3000)
        found.append(Experiment(f"{label}, all answer", size, samples, 5 if quick else 10))
        if not quick or size == SIZES["32 kB"]:
            found.append(Experiment(f"{label}, one answers", size, samples, 5 if quick else 10, answers=LAST))
    return tuple(found)


def run_cell(python: str, task: Task) -> Results:
    environment = _peers.environment()
    environment["PATH"] = os.pathsep.join([environment["PATH"], "/usr/sbin", "/sbin"])  # where ip is
    script = Path(__file__).with_name("_nodes_cell.py")
    environment["PYTHONPATH"] += f"{os.pathsep}{script.parent}"  # for the workers, which are started anew
    command = [python, str(script), msgspec.json.encode(task).decode()]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise SystemExit(f"bench_nodes: exit code {done.returncode}; see above")
    found: Results = json.loads(done.stdout)
    return found


def ratio(results: Results, experiment: str, ours: str) -> float | None:
    """Ours over vLLM's, p50; None: vLLM was not measured."""
    found = results[experiment]
    if "vllm" not in found:
        return None
    return _figures.median_ratio(found[ours]["round_medians_us"], found["vllm"]["round_medians_us"])


def goals(results: Results) -> list[dict[str, Any]]:
    found = []
    for label, size in SIZES.items():
        name = f"{label}, all answer"
        if size < 32 << 10:
            continue
        for ours, limit in zip(OURS, (0.5, 1.0), strict=True):
            value = ratio(results, name, ours)
            if value is not None:
                found.append(_figures.goal(f"round trip p50 of {ours} over vLLM's, {name}", value, limit))
            wire = results[name][ours]["wire_bytes"] / size
            found.append(_figures.goal(f"bytes sent per byte of the plan, {ours}, {label}", wire, 1.1))
    return found


def show(results: Results) -> None:
    print(f"{'call, 8 workers':24}{'':18}{'round trip µs, p50':>20}{'p99':>10}{'bytes sent':>14}{'ours/vLLM':>11}")
    for experiment, by_name in results.items():
        for name, one in by_name.items():
            trip = one["round_trip_us"]
            times = ratio(results, experiment, name) if name in OURS else None
            last = f"{times:11.3f}" if times is not None else ""
            print(f"{experiment:24}{name:18}{trip['p50']:20.0f}{trip['p99']:10.0f}{one['wire_bytes']:14,.0f}{last}")


def compare(options: argparse.Namespace) -> dict[str, Any]:
    python, names, note = sys.executable, OURS, "without vLLM: give --with-peers"
    if options.with_peers:
        try:
            python, names, note = _peers.peer_python("executor"), (*OURS, "vllm"), ""
        except _peers.NoPeer as error:
            note = str(error)
    if note:
        print(f"bench_nodes: {note}", file=sys.stderr)
    host = _figures.facts()
    with Testnet(2) as net:
        namespaces = (net.namespace(0), net.namespace(1))
        addresses = (net.ipv4(0), net.ipv4(1))
        results = run_cell(python, Task(names, namespaces, addresses, WORKERS, experiments(options.quick)))
    if not options.json:
        show(results)
    return {"goals": goals(results), "host": host, "note": note, "workers": WORKERS, "results": results}


def main() -> int:
    parser = argparse.ArgumentParser("bench_nodes", description="A plan to another node, against vLLM, in one run.")
    parser.add_argument("--with-peers", action="store_true", help="get vLLM's MessageQueue and compare with it")
    parser.add_argument("--quick", action="store_true", help="fewer samples: under a minute")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--out", metavar="FILE", help="write the results as JSON")
    options = parser.parse_args()
    try:
        result = compare(options)
    except NoNet as error:
        print(f"bench_nodes: {error}", file=sys.stderr)
        return 1
    _figures.deliver(result, options.out, options.json)
    if not options.json:
        _figures.show_goals(result["goals"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
