"""One number of readers, all transports in turn: forks the readers, times broadcasts, prints JSON. For `bench_queue`.

    python _queue_cell.py '{"readers": 8, "transports": ["xserve", "pipe"], "experiments": [...], "idle_seconds": 10}'

A sample is one broadcast and one acknowledgement from every reader. The transports take turns in rounds, each round
begins with another one, and a reader waits on the transport alone whose turn it is. Times are in µs.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import resource
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import _cell
import _transports as transports
import msgspec
from _figures import pair, percentile

now = time.monotonic_ns
_WARM = 20
"""Samples at the beginning of a round that are not counted (at most a quarter of it)."""


class Experiment(msgspec.Struct):
    name: str
    size: int
    samples: int
    rounds: int
    array: bool = False
    gap: float = 0.0
    """Seconds before each broadcast."""
    only: tuple[str, ...] = ()


class Task(msgspec.Struct):
    readers: int
    transports: tuple[str, ...]
    experiments: tuple[Experiment, ...]
    idle_seconds: float = 0.0


class Figures(msgspec.Struct):
    """Of one experiment and transport."""

    round_trips: list[float] = []
    medians: list[float] = []
    """of each round's round trips"""
    sends: list[float] = []
    one_ways: list[float] = []
    """Until each reader has the object."""
    cpu: float = 0.0
    readers_cpu: float = 0.0
    wall: float = 0.0
    broadcasts: int = 0


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# --- a reader's process ----------------------------------------------------------------------------------------------


def read(rank: int, line: Connection, made: dict[str, transports.Transport]) -> None:
    """Obey the parent: so many messages of a transport; then tell when each came, and the CPU time used."""
    ends = {name: transport.reader_end(rank, line) for name, transport in made.items()}
    gc.disable()
    while (order := line.recv()) is not None:
        name, count, size = order
        receive, acknowledge = ends[name]
        came = [0] * count
        line.send("ready")
        before = cpu_seconds()
        for number in range(count):
            got = receive()
            came[number] = now()
            acknowledge(number)
            if len(got) != size:
                raise ValueError(f"{name}: {len(got)} bytes instead of {size}")
            got = None
        line.send((came, cpu_seconds() - before))


# --- the writer's process --------------------------------------------------------------------------------------------


class Bench:
    def __init__(self, task: Task) -> None:
        self.task = task
        self._made = {name: transports.KINDS[name](task.readers) for name in task.transports}
        self._children = [_cell.fork(functools.partial(read, rank, made=self._made)) for rank in range(task.readers)]
        self._lines = [line for _, line in self._children]
        self._ends = {name: transport.writer_end(self._lines) for name, transport in self._made.items()}
        gc.disable()

    def order(self, name: str, count: int, size: int) -> None:
        for line in self._lines:
            line.send((name, count, size))
        for line in self._lines:
            line.recv()

    def round(self, name: str, experiment: Experiment, payload: Any, figures: Figures) -> None:
        counted = max(1, experiment.samples // experiment.rounds)
        warm = min(_WARM, max(1, counted // 4))
        count = counted + warm
        self.order(name, count, len(payload))
        send, collect = self._ends[name]
        began, sent, done = [0] * count, [0] * count, [0] * count
        gap = experiment.gap
        cpu, wall = cpu_seconds(), now()
        for number in range(count):
            if gap:
                time.sleep(gap)
            began[number] = now()
            send(number, payload)
            sent[number] = now()
            collect()
            done[number] = now()
        cpu, wall = cpu_seconds() - cpu, now() - wall
        trips = [(end - start) / 1e3 for start, end in zip(began, done, strict=True)][warm:]
        figures.round_trips += trips
        figures.medians.append(percentile(trips, 50))
        figures.sends += [(end - start) / 1e3 for start, end in zip(began, sent, strict=True)][warm:]
        for line in self._lines:
            came, used = line.recv()
            figures.one_ways += [(end - start) / 1e3 for start, end in zip(began, came, strict=True)][warm:]
            figures.readers_cpu += used
        figures.cpu += cpu
        figures.wall += wall / 1e9
        figures.broadcasts += count

    def experiment(self, experiment: Experiment) -> dict[str, dict[str, Any]]:
        payload: Any = os.urandom(experiment.size)
        if experiment.array:
            import numpy

            payload = numpy.frombuffer(payload, numpy.uint8).copy()
        names = [name for name in self._made if not experiment.only or name in experiment.only]
        found = {name: Figures() for name in names}
        for number in range(experiment.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                self.round(name, experiment, payload, found[name])
        return {name: summary(figures) for name, figures in found.items()}

    def idle(self, name: str) -> dict[str, float]:
        """CPU seconds of all readers while nothing comes, and how long the first message takes then."""
        self.order(name, 2, 200)
        send, collect = self._ends[name]
        send(0, bytes(200))
        collect()
        time.sleep(self.task.idle_seconds)
        start = now()
        send(1, bytes(200))
        collect()
        first = (now() - start) / 1e3
        return {"cpu_seconds": sum(line.recv()[1] for line in self._lines), "first_us": first}

    def run(self) -> dict[str, Any]:
        result: dict[str, Any] = {"readers": self.task.readers, "experiments": {}, "idle": {}, "memory": {}}
        for experiment in self.task.experiments:
            result["experiments"][experiment.name] = self.experiment(experiment)
            print(f"  {self.task.readers} readers: {experiment.name}", file=sys.stderr)
        for name, transport in self._made.items():
            if self.task.idle_seconds and name in ("xserve", "vllm"):
                result["idle"][name] = self.idle(name)
            memory = transport.memory()
            if memory is not None:
                result["memory"][name] = {"reserved_bytes": memory[0], "resident_bytes": memory[1]}
        return result

    def close(self) -> None:
        for pid, line in self._children:
            line.send(None)
            os.waitpid(pid, 0)
        for transport in self._made.values():
            getattr(transport, "close", lambda: None)()


def summary(figures: Figures) -> dict[str, Any]:
    return {
        "samples": len(figures.round_trips),
        "round_trip_us": pair(figures.round_trips),
        "round_medians_us": figures.medians,
        "send_us": pair(figures.sends),
        "one_way_us": pair(figures.one_ways),
        "cpu_us_per_broadcast": 1e6 * (figures.cpu + figures.readers_cpu) / figures.broadcasts,
        "cores": (figures.cpu + figures.readers_cpu) / figures.wall,
        "readers_cores": figures.readers_cpu / figures.wall,
    }


def main() -> None:
    task = msgspec.json.decode(sys.argv[1], type=Task)
    logging.disable(logging.WARNING)
    _cell.answer(task.transports, lambda: Bench(task))


if __name__ == "__main__":
    main()
