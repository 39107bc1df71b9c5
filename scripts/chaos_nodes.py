"""Kill, freeze and unplug the nodes of a launch under load, at random moments; count what is lost, wrong or left.

    scripts/chaos_nodes [--quick] [--rounds N] [--nodes N] [--seed N] [--only TEXT] [--key] [--json] [--out FILE]

The nodes are network namespaces (`scripts/testnet`): as root. A launch of the reference worker, two ranks on each node,
answers some ten requests at a time without a pause, most of them streams, each compared to the last token.

==================  ================================  =================================================================
blow                to whom                           what must happen
==================  ================================  =================================================================
KILL                every process of a node           the node is started again, as by its operator: the group is back
FREEZE, for ≤ 13 s  every process of a node           up to 10 s: nothing; longer: lost, and back after SIGCONT
UNPLUG, for ≤ 13 s  a node's cable                    the same
AGENT WORKER CORE   one process, killed               back at once; of node 0's agent nobody notices
==================  ================================  =================================================================

Always: no request is lost or wrong (those that node 0's API server held when it was killed end with it), no launch ends
that was not killed, answers come again within 30 s, nothing is left outside the trees. The seed makes the choice and
the delays; what they hit depends on the machine too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import _chaos_tree as trees
import _figures
from _chaos_load import CLOSE_LIMIT, Load, Window
from _chaos_tree import Launch, until
from _testnet import NoNet, Testnet, inside
from chaos import reference_question

from launcher.process import kernel, procfs

PORT = 8000
CONCURRENT = 10
STEP_MS = 10
SILENCE = 10.0
"""Seconds after which a silent node is lost."""
LONGEST = 13.0
"""Seconds of a freeze. A stream counts as lost after 20 s without a byte."""
BACK_LIMIT = 30.0
FAULTS = ("requests lost", "requests wrong", "connections closed late", "launches that ended", "not back", "orphans")
WHOLE, SINGLE = ("KILL", "FREEZE", "UNPLUG"), ("AGENT", "WORKER", "CORE")


class Cell(NamedTuple):
    blow: str
    node: int

    def __str__(self) -> str:
        return f"{self.blow} node {self.node}"


class NodeLoad(Load):
    """From a program on node 0."""

    namespace = ""

    async def _main(self) -> None:
        with inside(self.namespace):
            await super()._main()


class Run:
    def __init__(self, options: argparse.Namespace, net: Testnet) -> None:
        self.options, self.net = options, net
        self.directory = Path(tempfile.mkdtemp(prefix="xschaos"))
        self.chance = random.Random(options.seed)
        self.faults: dict[str, list[str]] = {name: [] for name in FAULTS}
        self.back: dict[str, list[float]] = {}
        self.label = "start"
        self._number = 0
        self.load = NodeLoad(PORT, CONCURRENT, options.seed, reference_question)
        self.load.namespace = net.namespace(0)
        flags = (
            f"--tp {2 * net.nodes} --nnodes {net.nodes} --master-addr {net.ipv4(0)} --worker-config step_ms={STEP_MS}"
        )
        flags += " --served-model-name chaos --restart-backoff 0 --max-restarts 100000 --shutdown-timeout 8"
        self._flags = flags.split()
        if options.key:
            key = self.directory / "key"
            key.write_text(os.urandom(32).hex() + "\n")
            key.chmod(0o600)
            self._flags += ["--cluster-key-file", str(key)]
        self.launches = [self.begin(node) for node in range(net.nodes)]

    def begin(self, node: int) -> Launch:
        self._number += 1
        command = trees.command_line(PORT, [*self._flags, "--node-rank", str(node)])
        place = self.directory / f"node{node}"
        place.mkdir(exist_ok=True)
        return Launch(place, self._number, PORT, self.net.command(node, *command))

    def fault(self, kind: str, text: str) -> None:
        line = f"{self.label}: {text}"
        self.faults[kind].append(line)
        print(f"FAULT {kind}: {line}", file=sys.stderr)

    def answers(self, limit: float) -> float | None:
        """The moment at which a request that is sent now is answered; None: not within the limit."""
        with self.net.inside(0):
            return self.launches[0].probe(limit)

    # --- rounds

    def deck(self) -> list[Cell]:
        cells = [Cell(blow, node) for blow in WHOLE for node in range(self.net.nodes)]
        cells += [Cell("AGENT", 0), Cell("CORE", 0), Cell("WORKER", 0)]
        cells += [Cell(blow, node) for blow in ("AGENT", "WORKER") for node in range(1, self.net.nodes)]
        return [cell for cell in cells if self.options.only in str(cell)]

    def play(self, cell: Cell) -> None:
        counts = self.load.counts
        lost, wrong = len(counts.lost), len(counts.wrong)
        time.sleep(self.chance.uniform(0.0, 1.0))
        moment = time.monotonic()
        {"KILL": self._kill, "FREEZE": self._freeze, "UNPLUG": self._unplug}.get(cell.blow, self._one)(cell)
        undone = time.monotonic()
        answered = self.answers(BACK_LIMIT)
        if answered is None:
            self.fault("not back", f"no answer within {BACK_LIMIT:g} s after {undone - moment:.1f} s")
        else:
            self.back.setdefault(cell.blow, []).append(answered - undone)
        for node, launch in enumerate(self.launches):
            if not launch.alive:
                self.fault("launches that ended", f"node {node}: {launch.process.returncode} [{launch.log}]")
                self.launches[node] = self.begin(node)
        self.load.late(time.monotonic())
        found = [("requests lost", counts.lost[lost:]), ("requests wrong", counts.wrong[wrong:])]
        for kind, texts in [*found, ("connections closed late", counts.closed_late)]:
            for text in texts:
                self.fault(kind, text)
        counts.closed_late.clear()
        self._no_strangers({launch.process.pid for launch in self.launches})

    def _no_strangers(self, known: set[int]) -> None:
        if not until(lambda: not trees.strangers(known), 2):
            found = trees.strangers(known)
            self.fault("orphans", f"{found}")
            trees.kill_strangers(found)

    def everybody(self, node: int) -> list[int]:
        """The supervisor first: nobody is left to clean up."""
        pid = self.launches[node].process.pid
        return [pid, *trees.descendants(pid)]

    def _kill(self, cell: Cell) -> None:
        window = Window(time.monotonic())
        if cell.node == 0:  # the requests that it has accepted go with it
            self.load.windows.append(window)
        pids = self.everybody(cell.node)
        for pid in pids:
            trees.strike(pid, signal.SIGKILL)
        self.launches[cell.node].process.wait()
        # Until the last of them is gone, somebody may hold the listening socket.
        until(lambda: all((stat := procfs.read_stat(pid)) is None or stat.state == "Z" for pid in pids), CLOSE_LIMIT)
        dead = time.monotonic()
        window.close_by, window.end = dead + CLOSE_LIMIT, dead
        time.sleep(self.chance.choice((0.0, self.chance.uniform(0, 3), self.chance.uniform(SILENCE, LONGEST))))
        self.launches[cell.node] = self.begin(cell.node)

    def _pause(self) -> float:
        """Half of them short enough to be nothing."""
        if self.chance.random() < 0.5:
            return self.chance.uniform(0.2, SILENCE - 3)
        return self.chance.uniform(SILENCE + 0.5, LONGEST)

    def _freeze(self, cell: Cell) -> None:
        pids = self.everybody(cell.node)
        for pid in pids:
            trees.strike(pid, signal.SIGSTOP)
        time.sleep(self._pause())
        for pid in reversed(pids):
            trees.strike(pid, signal.SIGCONT)

    def _unplug(self, cell: Cell) -> None:
        self.net.cable(cell.node, there=False)
        time.sleep(self._pause())
        self.net.cable(cell.node, there=True)

    def _one(self, cell: Cell) -> None:
        prefix = {"AGENT": "NodeAgent", "WORKER": "Worker", "CORE": "EngineCore"}[cell.blow]
        tree = self.launches[cell.node].tree()
        fitting = sorted(title for title in tree if title.startswith(prefix))
        if fitting:  # else it is on its way back from the round before
            trees.strike(tree[self.chance.choice(fitting)], signal.SIGKILL)

    # --- the whole

    def run(self) -> int:
        if self.answers(60) is None:
            logs = "\n".join(launch.text()[-2000:] for launch in self.launches)
            raise SystemExit(f"chaos_nodes: the launch does not come up\n{logs}")
        self.load.start()
        cells: list[Cell] = []
        for number in range(1, self.options.rounds + 1):
            if time.monotonic() > self.options.until:
                return number - 1
            if not cells:
                cells = self.deck()
                self.chance.shuffle(cells)
            cell = cells.pop()
            self.label = f"round {number} ({cell})"
            print(f"round {number} of {self.options.rounds}: {cell}", file=sys.stderr)
            self.play(cell)
        return self.options.rounds

    def end(self) -> None:
        self.label = "end"
        self.load.pause(20)
        # After a cable was out TCP may be silent for as long again: a launch that ends in that time does so unheard.
        time.sleep(SILENCE)
        self.load.close()
        if self.launches[0].alive:
            self.launches[0].process.send_signal(signal.SIGTERM)
        for node, launch in enumerate(self.launches):
            if not until(lambda launch=launch: not launch.alive, 20):
                self.fault("not back", f"node {node} is still there 20 s after a SIGTERM to node 0 [{launch.log}]")
                launch.end()
            elif launch.process.returncode:
                self.fault("launches that ended", f"node {node}: SIGTERM to node 0: {launch.process.returncode}")
        self._no_strangers(set())
        if not any(self.faults.values()):
            shutil.rmtree(self.directory, ignore_errors=True)


def figures(run: Run, played: int) -> dict[str, Any]:
    counts = run.load.counts
    return {
        "goals": [_figures.goal(name, len(run.faults[name]), 0) for name in FAULTS],
        "rounds": played,
        "seed": run.options.seed,
        "nodes": run.net.nodes,
        "back_s": {blow: {"count": len(v), **_figures.pair(v)} for blow, v in sorted(run.back.items())},
        "requests": {"right": counts.right, "excused": counts.excused, "sent again": counts.turned_away},
        "faults": {name: lines for name, lines in run.faults.items() if lines},
        "host": _figures.facts(),
    }


def show(result: dict[str, Any]) -> None:
    print(f"{result['rounds']} rounds, {result['nodes']} nodes, seed {result['seed']}; {result['requests']}")
    for blow, one in result["back_s"].items():
        print(f"{blow:8} undone → answering: {one['count']:3} times, p50 {one['p50']:5.2f} s, p99 {one['p99']:5.2f} s")
    _figures.show_goals(result["goals"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], prog="chaos_nodes")
    parser.add_argument("--quick", action="store_true", help="5 rounds, at most some 75 s")
    parser.add_argument("--rounds", type=int, help="how many (default: 50)")
    parser.add_argument("--nodes", type=int, default=2, help="default: 2")
    parser.add_argument("--seed", type=int, help="default: of the clock")
    parser.add_argument("--only", metavar="TEXT", default="", help="only rounds with this in their name")
    parser.add_argument("--key", action="store_true", help="with a cluster key")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--out", metavar="FILE", help="write the JSON object there, too")
    options = parser.parse_args()
    options.rounds = options.rounds or (5 if options.quick else 50)
    options.seed = int(time.time()) if options.seed is None else options.seed
    options.until = time.monotonic() + 75 if options.quick else float("inf")
    return options


def main() -> int:
    options = parse()
    kernel.become_subreaper()
    print(f"seed {options.seed}, pid {os.getpid()}", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        try:
            net = stack.enter_context(Testnet(options.nodes))
        except NoNet as error:
            raise SystemExit(f"chaos_nodes: {error}") from None
        run = Run(options, net)
        try:
            played = run.run()
        finally:
            run.end()
        result = figures(run, played)
    _figures.deliver(result, options.out, options.json)
    if not options.json:
        show(result)
    if result["faults"]:
        print(f"logs: {run.directory}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
