"""Kill, stop and starve every process of a launch, under load; count what is left behind, lost or wrong.

    scripts/chaos [--quick | --full] [--rounds N] [--seed N] [--only TEXT] [--model tiny | DIR] [--tp N]
                  [--soak N] [--json] [--out FILE]

A launch of the reference worker at ``--tp 4`` (``--model tiny``: a tiny Llama at ``--tp 2``) answers some 20 requests
at a time without a pause, most of them streams, each compared to the last token. Each round strikes one process at a
random moment. 20 rounds with ``--quick``, 200 by default, 1,000 and a soak with ``--full``; the soak alone is
``--rounds 0 --soak 500``. The seed makes the choice and the delays; what they hit depends on the machine too.

==============================  ==================  =======  ==========================================================
victim                          blow                phase    what must happen
==============================  ==================  =======  ==========================================================
worker, engine core             KILL SEGV OOM       serving  the group comes back; no request is lost
worker, engine core             STOP                serving  the watchdog finds it (2 s), then the same
API server                      KILL SEGV OOM STOP  serving  it comes back alone; what it held closes within 2 s of its
                                                             death; what waits in the socket's queue is answered
helper                          KILL SEGV OOM       serving  no request notices; there is a new one
helper                          STOP, then a worker serving  the group comes back all the same, with no request lost
                                is killed
supervisor                      KILL SEGV OOM       serving  everything is gone within 2 s, connections too; a launch of
                                STOP + KILL                  the same name starts
any                             STOP, soon CONT     any      a pause: nobody is replaced for it, no request is lost
any                             KILL SEGV STOP      restart  (a group is coming back from another blow) the same as
                                                             while serving
any but the supervisor          KILL SEGV STOP      start    ``--restart on-failure``: exit 1 within 2 s (STOP: of being
                                                             found), nothing left, or it comes up all the same;
                                                             ``always``: it comes up
supervisor                      KILL SEGV           start    everything is gone within 2 s
                                STOP + KILL         drain
helper                          KILL SEGV STOP      drain    what runs is finished; exit 0
any other                       KILL SEGV STOP      drain    the tree is gone within the stop's budget; exit 0 or 1
==============================  ==================  =======  ==========================================================

Always: the log calls nobody the cause that was not struck, and names who was; processes, descriptors of every process,
/dev/shm and the launch's directories are as they were (``spawn_child`` is on, so a worker has children of its own).
Chaos is a subreaper: whatever loses its parent becomes its child, and so is seen. A request that was turned away (503
with Retry-After, nobody at the port) has not been accepted, and is sent again.

One thing may be left: the run directory of a supervisor that is killed while it has no helper, in the first moments of
a start and the last of a stop. The next launch of that name takes it over, which is what the next round looks at.

OOM needs the memory controller of cgroup v1 and the right to make a group; elsewhere the report says it was left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _chaos_soak
import _figures
from _chaos_arena import FAULTS, SHUTDOWN
from _chaos_blows import SERVING, WORKER, Cell, deck
from _chaos_load import Load, Question
from _chaos_rounds import READY_TIMEOUT, WATCHDOG, Rounds

from launcher.process import kernel
from launcher.worker.reference import expected_tokens

CONCURRENT = 20
STEP_MS = 10
MOST_TOKENS = 60
ANSWER_GOAL = 4.0
"""Seconds from the kill of a worker to the next answer."""
COMMON = (
    f"--served-model-name chaos --restart-backoff 0 --shutdown-timeout {SHUTDOWN:g} --max-restarts 100000"
    f" --watchdog-timeout {WATCHDOG:g}"
).split()
HARD = ("KILL", "SEGV", "OOM")


def reference_question(chance: random.Random) -> Question:
    prompt = f"chaos {chance.getrandbits(40):x}"
    count = chance.randint(1, MOST_TOKENS)
    answer = "".join(f"{token} " for token in expected_tokens(list(prompt.encode()), count))
    return Question(prompt, count, answer, streams=chance.random() < 0.8)


def known_questions(port: int) -> Callable[[random.Random], Question]:
    """Of a model: a few prompts, whose answers are those of an undisturbed run."""
    known: list[tuple[str, int, str]] = []
    for number in range(12):
        prompt, count = f"a story of {number * 7919} sheep", 4 + number * 4
        body = json.dumps({"model": "chaos", "prompt": prompt, "max_tokens": count, "temperature": 0}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            known.append((prompt, count, json.load(answer)["choices"][0]["text"]))

    def make(chance: random.Random) -> Question:
        return Question(*chance.choice(known), streams=chance.random() < 0.8)

    return make


def make_tiny(directory: Path) -> str:
    """In a process of its own: this one needs no torch."""
    program = f"from launcher.models.tiny import make_tiny; make_tiny({str(directory)!r})"
    subprocess.run([sys.executable, "-c", program], check=True, stdout=sys.stderr)
    return str(directory)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Run:
    """One run of chaos, in a directory that is removed when there was no fault."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.directory = Path(tempfile.mkdtemp(prefix="xschaos"))
        self._port = free_port()
        variables = {"XSERVE_FAULT": "spawn_child:1"}
        if options.model:
            model = make_tiny(self.directory / "model") if options.model == "tiny" else options.model
            arguments = ["--model", model, "--tp", str(options.tp or 2), "--dtype", "float32", "--ready-timeout", "60"]
            variables = {}
        else:
            arguments = ["--tp", str(options.tp or 4), "--worker-config", f"step_ms={STEP_MS}"]
            arguments += ["--ready-timeout", f"{READY_TIMEOUT:g}"]
        self.load = Load(self._port, CONCURRENT, options.seed, lambda chance: self._make(chance))
        self.arena = Rounds(self.directory, self._port, [*arguments, *COMMON], self.load, options.seed, variables)
        if options.model:
            self.arena.quiet_limit = 90.0
        self._make: Callable[[random.Random], Question] = reference_question

    def play(self) -> int:
        """The rounds; how many there were."""
        options, arena = self.options, self.arena
        arena.come_up()
        if options.model:
            self._make = known_questions(self._port)
        self.load.start()
        arena.settle()
        chance = random.Random(options.seed)
        cells: list[Cell] = []
        played = 0
        for number in range(1, options.rounds + 1):
            if time.monotonic() > options.until:
                break
            if not cells:
                cells = [c for c in deck(quick=options.quick, oom=not arena.memory.note) if options.only in str(c)]
                chance.shuffle(cells)
                if not cells:
                    raise SystemExit(
                        f"chaos: --only {options.only!r}: no round is called so, as in {Cell(SERVING, WORKER, 'KILL')}"
                    )
            cell = cells.pop()
            print(f"round {number} of {options.rounds}: {cell}", file=sys.stderr)
            arena.play(number, cell)
            played = number
        return played

    def close(self) -> None:
        arena = self.arena
        self.load.resume()
        try:
            if arena.launch.alive:
                arena.end_in_order()
        finally:
            if arena.launch.alive:
                arena.launch.end()
            self.load.close()
            arena.memory.close()
        if not any(arena.faults.values()):
            shutil.rmtree(self.directory, ignore_errors=True)


def others_at_work() -> str:
    """A reason to doubt the times: chaos alone keeps about one and a half CPUs busy."""
    load, cpus = os.getloadavg()[1], len(os.sched_getaffinity(0))
    return f"the load was {load:.1f} on {cpus} CPUs: what took too long may have had to wait" if load > 2 * cpus else ""


def figures(run: Run, played: int, soak: dict[str, Any] | None) -> dict[str, Any]:
    arena, counts = run.arena, run.load.counts
    goals = [_figures.goal(name, len(arena.faults[name]), 0) for name in FAULTS]
    back = {}
    for cell, values in sorted(arena.times.items()):
        back[f"{cell[0]}, {cell[1]}, {cell[2]}"] = {"count": len(values), **_figures.pair(values)}
    groups = [t for c, v in arena.times.items() if c[0] == SERVING and c[1] != "supervisor" and c[2] in HARD for t in v]
    workers = [t for c, v in arena.times.items() if c[:2] == (SERVING, WORKER) and c[2] in HARD for t in v]
    cold = statistics.median(arena.cold)
    if workers:
        goals.append(
            _figures.goal("kill of a worker → answering again, p99, s", _figures.percentile(workers, 99), ANSWER_GOAL)
        )
    if groups:
        goals.append(
            _figures.goal("kill → answering again over a cold start, p50", statistics.median(groups) / cold, 1)
        )
    if soak is not None:
        goals += soak.pop("goals")
    return {
        "goals": goals,
        "rounds": played,
        "void": arena.void,
        "seed": run.options.seed,
        "back_s": {
            "all hard deaths while serving": {"count": len(groups), **(_figures.pair(groups) if groups else {})},
            **back,
        },
        "cold_start_s": {"count": len(arena.cold), **_figures.pair(arena.cold)},
        "requests": {
            "right": counts.right,
            "ended with the process that held them": counts.excused,
            "turned away and sent again": counts.turned_away,
            "keep-alive comments": counts.replayed_comments,
        },
        "faults": {name: lines for name, lines in arena.faults.items() if lines},
        "note": "; ".join(filter(None, (arena.memory.note, others_at_work()))),
        "soak": soak,
        "host": _figures.facts(),
    }


def show(result: dict[str, Any]) -> None:
    print(f"{result['rounds']} rounds, seed {result['seed']}; {result['requests']}")
    print(f"{'blow → answering again':44}{'count':>6}{'p50 s':>8}{'p99 s':>8}")
    cold = {"cold start: launch → first answer": result["cold_start_s"]}
    for name, one in {**result["back_s"], **cold}.items():
        if one["count"]:
            print(f"{name:44}{one['count']:6}{one['p50']:8.2f}{one['p99']:8.2f}")
    if result["note"]:
        print(result["note"])
    _figures.show_goals(result["goals"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], prog="chaos")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="20 rounds, at most some 75 s")
    size.add_argument("--full", action="store_true", help="1,000 rounds, and a soak of 500 restarts")
    parser.add_argument("--rounds", type=int, help="how many; 0: none")
    parser.add_argument("--soak", type=int, metavar="N", help="restarts of the soak; 0: none")
    parser.add_argument("--seed", type=int, help="default: of the clock")
    parser.add_argument("--only", metavar="TEXT", default="", help="only rounds with this in their name")
    parser.add_argument("--model", help="tiny, or a directory; default: the reference worker")
    parser.add_argument("--tp", type=int, help="default: 4, with a model 2")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--out", metavar="FILE", help="write the JSON object there, too")
    options = parser.parse_args()
    if options.rounds is None:
        options.rounds = 20 if options.quick else 1000 if options.full else 200
    if options.soak is None:
        options.soak = 500 if options.full else 0
    if options.seed is None:
        options.seed = int(time.time())
    options.until = time.monotonic() + 75 if options.quick else float("inf")
    return options


def main() -> int:
    options = parse()
    kernel.become_subreaper()
    print(f"seed {options.seed}, pid {os.getpid()}", file=sys.stderr)
    run = Run(options)
    soak = None
    try:
        played = run.play()
        if options.soak:
            soak = _chaos_soak.soak(run.arena, options.soak)
    finally:
        run.close()
    result = figures(run, played, soak)
    _figures.deliver(result, options.out, options.json)
    if not options.json:
        show(result)
    if result["faults"]:
        print(f"logs: {run.directory}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
