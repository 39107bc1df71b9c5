"""Node 0's process of `bench_nodes`: makes all transports, lets them take turns, prints JSON.

    python _nodes_cell.py '{"transports": ["xserve", "vllm"], "namespaces": [...], "experiments": [...], …}'

A sample is one call to all workers on node 1 until the wanted acknowledgements are back, in µs. The transports take
turns in rounds, and each round begins with another one. Between rounds the bytes that node 0 has sent are read.
"""

from __future__ import annotations

import gc
import json
import os
import secrets
import subprocess
import sys
import time
from typing import Any

import _cell
import _nodes_transports as transports
import msgspec
from _figures import pair, percentile

now = time.monotonic_ns
_WARM = 10
"""Samples at the beginning of a round that are not counted."""


class Experiment(msgspec.Struct):
    name: str
    size: int
    samples: int
    rounds: int
    answers: int = transports.ALL
    """The rank that answers."""


class Task(msgspec.Struct):
    transports: tuple[str, ...]
    namespaces: tuple[str, str]
    addresses: tuple[str, str]
    workers: int
    experiments: tuple[Experiment, ...]


class Figures(msgspec.Struct):
    trips: list[float] = []
    medians: list[float] = []
    """of each round"""
    wire: list[float] = []
    """bytes that node 0 sent for one call, of each round"""


class Bench:
    def __init__(self, task: Task) -> None:
        self.task = task
        self._place = transports.Place(task.namespaces, task.addresses)
        key = secrets.token_bytes(32)
        self._made = {name: transports.make(name, self._place, task.workers, key) for name in task.transports}
        for transport in self._made.values():
            transport.connect()
        gc.disable()

    def _sent(self) -> int:
        command = ["ip", "-n", self.task.namespaces[0], "-j", "-s", "link", "show", "dev", "eth0"]
        [info] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        return int(info["stats64"]["tx"]["bytes"])

    def _round(self, name: str, experiment: Experiment, payload: bytes, figures: Figures) -> None:
        call = self._made[name].call
        counted = max(1, experiment.samples // experiment.rounds)
        for number in range(min(_WARM, max(2, counted // 4))):
            call(number, payload, experiment.answers)
        trips = [0.0] * counted
        sent = self._sent()
        for number in range(counted):
            began = now()
            call(number, payload, experiment.answers)
            trips[number] = (now() - began) / 1e3
        figures.wire.append((self._sent() - sent) / counted)
        figures.trips += trips
        figures.medians.append(percentile(trips, 50))

    def experiment(self, experiment: Experiment) -> dict[str, dict[str, Any]]:
        payload = os.urandom(experiment.size)
        names = list(self._made)
        found = {name: Figures() for name in names}
        for number in range(experiment.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                self._round(name, experiment, payload, found[name])
        return {
            name: {
                "samples": len(figures.trips),
                "round_trip_us": pair(figures.trips),
                "round_medians_us": figures.medians,
                "wire_bytes": percentile(figures.wire, 50),
            }
            for name, figures in found.items()
        }

    def run(self) -> dict[str, Any]:
        result = {}
        for experiment in self.task.experiments:
            result[experiment.name] = self.experiment(experiment)
            print(f"  {experiment.name}", file=sys.stderr)
        return result

    def close(self) -> None:
        for transport in self._made.values():
            transport.close()


def main() -> None:
    task = msgspec.json.decode(sys.argv[1], type=Task)
    _cell.answer(task.transports, lambda: Bench(task))


if __name__ == "__main__":
    main()
