"""A tensor-parallel launch on several cards: the parts of gpu_check --gpus N. Each survives the failure of another.

topology   NUMA nodes as xserve reads them against nvidia-smi topo -m
starts     ready by both start methods as a ratio to one worker; names in ps and nvidia-smi, one worker per card; tokens
reduce     all-reduce by NCCL, one-shot and two-shot, 8 KiB to 16 MiB; bit-equal
symmetric  a launch with --worker-config all_reduce=symmetric: what it says, tokens
speed      tokens a second and the time of a step of a random bf16 Llama at TP 1, 2, 4 … N
kills      kill -9 of a worker, the engine core and the supervisor under load: memory back, the cause named
restarts   kill -9 of a worker with restarts on: streams go on and are right
step       the executor's own cost of a step at TP 1 and N (bench_step --quick)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from _gpu_topology import (
    disagreements,
    names_cause,
    one_per_card,
    parse_holders,
    parse_topology,
    reduce_rows,
)
from _gpu_tree import ROOT, Tree, environment, smi

PROMPTS = ["Hi!", "What is the capital of France?", "one two three " * 12, "x"]
TOKENS, LONG = 24, 900
"""An answer to compare; one that is still being given when a process is killed."""
BACK_SECONDS = 5.0
_MP = ("--backend", "mp", "--kv-cache-memory", "256MiB", "--max-model-len", "1200")


class Cards:
    """The first N of the machine."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.uuids = smi("--query-gpu=uuid")[:count]
        self.before = self.used()
        self.short: list[str] = []
        """Texts at --tp 1."""
        self.ready: dict[tuple[str, int], float] = {}

    def used(self) -> list[int]:
        """MiB, by card."""
        return [int(line) for line in smi("--query-gpu=memory.used")[: self.count]]

    def back(self) -> float:
        """Seconds until the memory of all is back; -1: not within 15 s."""
        begin = time.monotonic()
        while time.monotonic() - begin < 15:
            if all(now <= before + 8 for now, before in zip(self.used(), self.before, strict=True)):
                return round(time.monotonic() - begin, 2)
            time.sleep(0.05)
        return -1.0

    def see_back(self, check: Any, key: str) -> None:
        seconds = self.back()
        check.see(f"{key}: memory of all cards back, s", seconds, 0 <= seconds <= BACK_SECONDS)


_cards: list[Cards] = []


def begin_many(check: Any, count: int) -> None:
    cards = Cards(count)
    _cards[:] = [cards]
    check.see("memory before, by card, MiB", str(cards.before))


def _tree(check: Any, *arguments: str, tp: int = 0, **options: Any) -> Tree:
    return Tree(check.work, check.model, *_MP, "--tp", str(tp or _cards[0].count), *arguments, **options)


def _log(check: Any) -> str:
    return (check.work / "log").read_text(errors="replace")


def topology(check: Any) -> None:
    from launcher.host.gpus import read_gpus
    from launcher.host.numa import numa_nodes

    done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True)
    found = parse_topology(done.stdout)
    gpus = read_gpus(nodes=numa_nodes())
    check.see("links between cards", found.shown_links())
    check.see("NUMA nodes of the cards: nvidia-smi", str([list(found.nodes[card]) for card in sorted(found.nodes)]))
    check.see("NUMA nodes of the cards: xserve", str([list(gpu.nodes) for gpu in gpus]))
    wrong = disagreements(found, [gpu.nodes for gpu in gpus])
    order = [gpu.uuid for gpu in gpus][: _cards[0].count] == _cards[0].uuids
    check.see("they agree", wrong or "yes", not wrong)
    check.see("cards in the order of nvidia-smi", "yes" if order else "NO", order)


def starts(check: Any) -> None:
    cards = _cards[0]
    for tp in (1, cards.count):
        for method in ("forkserver", "spawn"):
            with _tree(check, "--start-method", method, tp=tp) as tree:
                cards.ready[method, tp] = tree.ready_seconds
                texts = [tree.text(prompt, TOKENS) for prompt in PROMPTS]
                if tp == 1:
                    cards.short = cards.short or texts
                else:
                    _see_names(check, tree, method)
                same = sum(a == b for a, b in zip(texts, cards.short, strict=True))
                good = same == len(PROMPTS)
                if tp > 1:
                    check.see(f"tokens equal to --tp 1, {method}", f"{same} of {len(PROMPTS)}", good)
            cards.see_back(check, f"stop at --tp {tp}, {method}")
    for method in ("forkserver", "spawn"):
        one, many = (cards.ready[method, tp] for tp in (1, cards.count))
        words = f"{many} with {cards.count} workers, {one} with one, ratio {many / one:.2f}"
        check.see(f"launch to ready, {method}, s", words)


def _see_names(check: Any, tree: Tree, method: str) -> None:
    cards, pids = _cards[0], tree.pids()
    holders = parse_holders(smi("--query-compute-apps=pid,gpu_uuid,process_name"))
    wrong = one_per_card(holders, pids, cards.uuids)
    check.see(f"nvidia-smi, {method}: one named worker on each card", wrong or "yes", not wrong)
    workers = {title: pid for title, pid in pids.items() if title.startswith("Worker")}
    listed = ["ps", "-o", "comm=", "-p", ",".join(map(str, workers.values()))]
    names = subprocess.run(listed, capture_output=True, text=True, check=False).stdout.split()
    good = len(names) == cards.count and all(name.startswith("xs:w") for name in names)
    check.see(f"ps, {method}", " ".join(names), good)
    check.see(f"memory while serving, by card, {method}, MiB", str(cards.used()))


def _program(check: Any, *arguments: str, limit: float) -> Any:
    from launcher.plan.environment import LOOPBACK, NO_MULTICAST

    command = [sys.executable, str(ROOT / "scripts/_gpu_ranks.py"), *arguments]
    env = environment() | {"XDG_RUNTIME_DIR": str(check.work)} | NO_MULTICAST | LOOPBACK
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit, env=env)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr[-1500:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def reduce(check: Any) -> None:
    found = _program(check, "reduce", str(_cards[0].count), limit=120)
    if "reason" in found:
        check.see("all-reduce through symmetric memory", f"not to be had: {found['reason']}", False)
        return
    equal = all(row["equal"] for row in found["sizes"])
    check.see("all-reduce, bf16, median microseconds, copies included", reduce_rows(found["sizes"]), equal)
    for row in found["sizes"]:
        words = f"{row['nccl']}, {row['one_shot']}, {row['two_shot']}: {row['fastest']}"
        check.see(f"all-reduce of {row['bytes'] // 1024} KiB: NCCL, one-shot, two-shot, µs", words)
    check.see("sums bit-equal on all ranks", "yes" if equal else "NO", equal)
    check.see("chosen at the start", found["table"])
    check.see("trial and timing at the start, s", found["connect_s"])


def symmetric(check: Any) -> None:
    with _tree(check, "--worker-config", "all_reduce=symmetric") as tree:
        said = [line.strip() for line in _log(check).splitlines()]
        line = next((s for s in said if "through symmetric memory" in s or "not to be had" in s), "nothing")
        check.see("a launch with all_reduce=symmetric says", line, "through symmetric memory" in line)
        same = sum(tree.text(p, TOKENS) == e for p, e in zip(PROMPTS, _expected(check), strict=True))
        check.see("tokens equal to --tp 1, symmetric", f"{same} of {len(PROMPTS)}", same == len(PROMPTS))
    _cards[0].see_back(check, "stop, symmetric")


def _expected(check: Any) -> list[str]:
    """Texts at --tp 1, also where `starts` was left out or failed."""
    if not _cards[0].short:
        with _tree(check, tp=1) as tree:
            _cards[0].short = [tree.text(prompt, TOKENS) for prompt in PROMPTS]
    return _cards[0].short


def speed(check: Any) -> None:
    large = check.work / "large"
    check.see("random Llama, bf16, billions of parameters", _program(check, "make", str(large), limit=120))
    counts = [tp for tp in (1, 2, 4, 8) if tp <= _cards[0].count]
    runs: list[tuple[int, tuple[str, ...]]] = [(tp, ()) for tp in counts]
    runs.append((counts[-1], ("all_reduce=symmetric",)))
    for tp, settings in runs:
        found = _program(check, "rate", str(large), str(tp), *settings, limit=150)
        for batch, said in found.items():
            key = f"--tp {tp}{', symmetric' if settings else ''}, batch {batch}: tokens/s, ms a step"
            check.see(key, f"{said['tokens_per_s']}, {said['step_ms']}")


class Load:
    """Long answers to all prompts at once, in threads."""

    def __init__(self, tree: Tree) -> None:
        self.texts: list[str] = [""] * len(PROMPTS)
        self._tree = tree
        self._threads = [threading.Thread(target=self._ask, args=(place,)) for place in range(len(PROMPTS))]
        for thread in self._threads:
            thread.start()

    def _ask(self, place: int) -> None:
        try:
            self.texts[place] = self._tree.text(PROMPTS[place], LONG)
        except (OSError, ValueError, KeyError) as error:  # its server was killed, or says so
            self.texts[place] = f"{type(error).__name__}: {error}"

    def running(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(90)


def kills(check: Any) -> None:
    for title in ("Worker_DP0_PP0_TP1", "EngineCore_DP0", "Supervisor"):
        with _tree(check) as tree:
            victim = tree.process.pid if title == "Supervisor" else tree.pids()[title]
            load = Load(tree)
            time.sleep(0.5)
            running = load.running()
            os.kill(victim, signal.SIGKILL)
            _cards[0].see_back(check, f"kill -9 {title} under load ({running} of {len(PROMPTS)} answers running)")
            tree.process.wait(30)
            load.join()
            if title != "Supervisor":
                last = _log(check).strip().splitlines()[-3:]
                check.see(f"kill -9 {title}: the cause is named", last, names_cause(_log(check), title))


def restarts(check: Any) -> None:
    with _tree(check, restart="on-failure") as tree:
        expected = [tree.text(prompt, LONG) for prompt in PROMPTS]
        pids = tree.pids()
        load = Load(tree)
        time.sleep(0.5)
        running = load.running()
        os.kill(pids["Worker_DP0_PP0_TP1"], signal.SIGKILL)
        begin = time.monotonic()
        load.join()
        same = sum(a == b for a, b in zip(load.texts, expected, strict=True))
        words, good = f"{same} of {len(PROMPTS)} ({running} running at the kill)", same == running == len(PROMPTS)
        check.see("kill -9 of a worker, restarts on: streams go on and are right", words, good)
        check.see("… all answered after the kill, s", round(time.monotonic() - begin, 2))
        now = tree.pids()
        changed = all(now[title] != pid for title, pid in pids.items() if title.startswith(("Worker", "EngineCore")))
        check.see("… the whole group is another", "yes" if changed else "NO", changed)
    _cards[0].see_back(check, "stop after a restart")


def step(check: Any) -> None:
    out = check.work / "step.json"
    command = [sys.executable, str(ROOT / "scripts/bench_step.py"), "--quick", "--tp", f"1,{_cards[0].count}"]
    env = environment() | {"XDG_RUNTIME_DIR": str(check.work)}
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, check=False, timeout=100, env=env, cwd=ROOT
    )
    lines = [line.rstrip() for line in (done.stdout or done.stderr).splitlines() if line.strip()][-30:]
    check.see("the executor's cost of a call (bench_step --quick)", lines, out.exists())


MANY_PARTS: dict[str, Callable[[Any], None]] = {
    f.__name__: f for f in (topology, starts, reduce, symmetric, kills, restarts, speed, step)
}
