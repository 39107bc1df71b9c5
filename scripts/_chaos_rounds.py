"""The rounds of `chaos`: deal a blow, see that what must happen happens, in time, and count what does not."""

from __future__ import annotations

import random
import shutil
import signal
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import _chaos_tree as trees
from _chaos_blows import (
    API,
    CORE,
    DRAIN,
    HELPER,
    RESTART,
    START,
    SUPERVISOR,
    WORKER,
    Cell,
    MemoryLimit,
    choose,
    deal,
    role_of,
)
from _chaos_load import CLOSE_LIMIT, Load, Window
from _chaos_tree import Launch, until

WATCHDOG = 2.0
READY_TIMEOUT = 8.0
SHUTDOWN = 8.0
GONE_LIMIT = 2.0
"""Seconds after a death within which every process that must go is gone."""
BACK_LIMIT = 30.0
"""Seconds after which a launch counts as one that does not come back."""
TALLY_EVERY = 10
FAULTS = (
    "orphans",
    "segments",
    "files and sockets",
    "descriptors",
    "requests lost",
    "requests wrong",
    "connections closed late",
    "wrong first cause",
    "not back, or not gone in time",
)


class Arena:
    """A launch under load, followed by others when it is ended."""

    def __init__(
        self, directory: Path, port: int, arguments: list[str], load: Load, seed: int, variables: dict[str, str]
    ) -> None:
        self.faults: dict[str, list[str]] = {name: [] for name in FAULTS}
        self.times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        """(phase, victim, blow) → seconds from the blow to the next answer."""
        self.cold: list[float] = []
        """Seconds from the start of a launch to its first answer."""
        self.dealt: Counter[str] = Counter()
        self.memory = MemoryLimit()
        self.load = load
        self._directory, self._port, self._arguments, self._variables = directory, port, arguments, variables
        self._chance = random.Random(seed)
        self._number = 0
        self._label = ""
        self._segments: set[str] = set()
        """Names in /dev/shm that a launch was seen to use."""
        self._shape: Counter[str] = Counter()
        self._struck: set[int] = set()
        self._back_since = 0.0
        self.launch = self.begin()

    # --- launches

    def begin(self, *more: str) -> Launch:
        """Start one, without waiting for it."""
        self._number += 1
        command = self.memory.entering(trees.command_line(self._port, [*self._arguments, *more]))
        self.launch = Launch(self._directory, self._number, self._port, command, self._variables)
        self._struck.clear()
        return self.launch

    def come_up(self) -> None:
        """Wait until it answers, then remember what it looks like when all is well."""
        launch = self.launch
        answered = launch.probe(BACK_LIMIT)
        if answered is None:
            raise SystemExit(f"chaos: a launch does not come up; see {launch.log}\n{launch.text()[-3000:]}")
        self.cold.append(answered - launch.began)
        self.load.resume()

    def settle(self) -> None:
        """The first look at a launch that all others are compared with: nothing runs, everybody is there."""
        self.load.pause(5)
        until(lambda: len(self.launch.tree()) >= 2 and self.is_steady(), 5)
        self._shape = self.launch.shape()
        self.launch.baseline = self.launch.descriptors()
        self._segments |= trees.named_segments(trees.descendants(self.launch.process.pid))
        self.load.resume()

    def is_steady(self) -> bool:
        before = (self.launch.shape(), self.launch.descriptors())
        time.sleep(0.15)
        return before == (self.launch.shape(), self.launch.descriptors())

    def fresh(self) -> None:
        self.begin()
        self.come_up()
        self.settle()

    def fault(self, kind: str, text: str, *, quiet: bool = False) -> None:
        line = f"{self._label}: {text} [{self.launch.log.name}]"
        self.faults[kind].append(line)
        if not quiet:
            print(f"FAULT {kind}: {line}", file=sys.stderr)

    # --- rounds

    def play(self, number: int, cell: Cell) -> None:
        self._label = f"round {number} ({cell})"
        self.dealt[str(cell)] += 1
        counts = self.load.counts
        before = (len(counts.lost), len(counts.wrong))
        if cell.phase != RESTART:  # or those that were there at the last death would be suspects, tried one by one
            until(lambda: self.load.oldest() > self._back_since, 5)
        time.sleep(self._chance.uniform(0.0, 0.3))
        {DRAIN: self._drain, START: self._start, RESTART: self._restart}.get(cell.phase, self._serving)(cell)
        self._look_for_strangers()
        self.load.late(time.monotonic())
        for kind, found, old in (
            ("requests lost", counts.lost, before[0]),
            ("requests wrong", counts.wrong, before[1]),
        ):
            for text in found[old:]:
                self.fault(kind, text, quiet=text not in found[old : old + 3])
        for text in counts.closed_late:
            self.fault("connections closed late", text)
        counts.closed_late.clear()
        if number % TALLY_EVERY == 0:
            self.tally()
        self._back_since = time.monotonic()

    def _serving(self, cell: Cell) -> None:
        title, pid = self._choose(cell.victim)
        self._strike(cell, [(title, pid)], len(self.launch.text().encode()))

    def _restart(self, cell: Cell) -> None:
        """A second blow while a group is coming back from the first."""
        mark = self.launch.log.stat().st_size
        first = self._choose(self._chance.choice((WORKER, CORE)))
        deal("KILL", first[1], self._chance, self.memory)
        self._struck.add(first[1])
        time.sleep(self._chance.uniform(0.0, 0.8))
        self._strike(cell, [self._choose(cell.victim), first], mark)

    def _choose(self, victim: str) -> tuple[str, int]:
        return choose(self._chance, victim, self.launch.tree(), self.launch.process.pid)

    def _strike(self, cell: Cell, victims: list[tuple[str, int]], mark: int) -> None:
        """Deal it to the first of `victims`; all of them must be followed by others."""
        title, pid = victims[0]
        role = role_of(title)
        window = Window(time.monotonic()) if role in (API, SUPERVISOR) and cell.blow != "CONT" else None
        if window is not None:
            self.load.windows.append(window)
        self._struck.add(pid)
        old = self.launch.tree()
        moment = deal(cell.blow, pid, self._chance, self.memory)
        if cell.blow == "CONT":
            self._unhurt(moment, old, mark, cell)
        elif role == SUPERVISOR:
            if cell.blow == "STOP":  # nobody above it looks after it
                time.sleep(0.3)
                deal("KILL", pid, self._chance, self.memory)
            self._whole_tree_goes(cell, window)
        else:
            if role == HELPER and cell.blow == "STOP":  # nothing shows before it is needed
                victims.append(self._choose(WORKER))
                self._struck.add(victims[-1][1])
                deal("KILL", victims[-1][1], self._chance, self.memory)
            self._comes_back(cell, victims, window, moment, mark)

    def _unhurt(self, moment: float, old: dict[str, int], mark: int, cell: Cell) -> None:
        answered = self.launch.probe(BACK_LIMIT)
        if answered is None:
            self.fault("not back, or not gone in time", "no answer after SIGCONT")
            return
        self.times[tuple(cell)].append(answered - moment)
        if cell.phase == "serving" and self.launch.tree() != old:
            self.fault("not back, or not gone in time", "a process was replaced though all went on")
        self._check_causes(mark, needed=False)

    def _comes_back(
        self, cell: Cell, victims: list[tuple[str, int]], window: Window | None, moment: float, mark: int
    ) -> None:
        launch = self.launch
        limit = BACK_LIMIT + (WATCHDOG if cell.blow == "STOP" else 0)
        pid = victims[0][1]
        if window is not None and cell.blow != "STOP":
            window.end = time.monotonic()
        if not until(lambda: is_gone(pid) or not launch.alive, limit):
            self.fault("not back, or not gone in time", f"{victims[0][0]} (pid {pid}) still there")
            self._give_up()
            return
        dead = time.monotonic()
        if window is not None:
            window.end, window.close_by = dead, dead + CLOSE_LIMIT

        wanted = {name.removeprefix(trees.PREFIX) for name in self._shape if name.startswith(trees.PREFIX)}
        gone = {each for _, each in victims}

        def whole() -> bool:
            tree = launch.tree()
            return not launch.alive or (set(tree) == wanted and not gone & set(tree.values()))

        if not until(whole, limit) or not launch.alive:
            how = f"the launch ended: {launch.process.poll()}" if not launch.alive else f"tree: {launch.tree()}"
            self.fault("not back, or not gone in time", how)
            self._give_up()
            return
        answered = launch.probe(limit)
        if answered is None:
            self.fault("not back, or not gone in time", f"no answer within {limit:g} s; {launch.tree()}")
            self._give_up()
            return
        self.times[tuple(cell)].append(answered - moment)
        if not until(lambda: launch.shape() == self._shape, 5):
            extra, missing = launch.shape() - self._shape, self._shape - launch.shape()
            self.fault("orphans", f"beside the tree: {dict(extra)}; missing: {dict(missing)}")
            self._give_up()
            return
        self._check_causes(mark, needed=True)

    def _whole_tree_goes(self, cell: Cell, window: Window | None) -> None:
        self.launch.process.wait()
        dead = time.monotonic()
        if window is not None:
            window.close_by = dead + CLOSE_LIMIT
        self._all_gone(dead)
        if window is not None:
            window.end = time.monotonic()
        self.fresh()
        self.times[tuple(cell)].append(self.cold[-1])

    def _all_gone(self, dead: float, *, files: bool = True) -> None:
        """Of a launch whose supervisor is gone since `dead`: nothing may be left 2 s later. Without `files` there had
        been no helper yet to clean up: the next start takes the directory over."""
        left = dead + GONE_LIMIT - time.monotonic()
        until(lambda: not trees.strangers({self.launch.process.pid}), left)
        if found := trees.strangers({self.launch.process.pid}):
            self.fault("orphans", f"{GONE_LIMIT:g} s after the end: {found}")
            trees.kill_strangers(found)
        until(lambda: not files or not self.launch.files_left(), dead + GONE_LIMIT - time.monotonic())
        if files and (left_files := self.launch.files_left()):
            self.fault("files and sockets", f"{left_files}")
            shutil.rmtree(self._directory / "r" / "xserve", ignore_errors=True)
        if left_behind := [name for name in self._segments if Path(name).exists()]:
            self.fault("segments", f"{left_behind}")
        self._segments.clear()

    def _give_up(self) -> None:
        """This launch is not what it should be: go on with another one."""
        window = Window(time.monotonic())
        self.load.windows.append(window)
        self.launch.end()
        until(lambda: not trees.strangers({self.launch.process.pid}), GONE_LIMIT)
        trees.kill_strangers(trees.strangers({self.launch.process.pid}))
        window.end = time.monotonic()
        self.fresh()

    # --- start and drain

    def _start(self, cell: Cell) -> None:
        """A blow while a launch is starting: without restarts of a first start it ends, with them it comes up."""
        self.end_in_order()
        always = self._chance.random() < 0.5
        launch = self.begin("--restart", "always" if always else "on-failure")
        time.sleep(self._chance.uniform(0.05, 1.0) * (self.cold[0] if self.cold else 2.0))
        title, pid = self._choose(cell.victim)
        self._struck.add(pid)
        was_ready = "ready: " in launch.text()
        guarded = "Forkserver (pid" in launch.text()
        window = Window(time.monotonic())  # it may serve already
        self.load.windows.append(window)
        deal(cell.blow, pid, self._chance, self.memory)
        if title == "Supervisor":
            if cell.blow == "STOP":
                deal("KILL", pid, self._chance, self.memory)
            launch.process.wait()
            window.close_by = time.monotonic() + CLOSE_LIMIT
            self._all_gone(time.monotonic(), files=guarded)
            window.end = time.monotonic()
            self.fresh()
            return
        limit = GONE_LIMIT + (READY_TIMEOUT + 2 if cell.blow == "STOP" else 0)
        struck = time.monotonic()
        up = until(lambda: not launch.alive or launch.probe(0.2), BACK_LIMIT)
        if launch.alive and up:
            until(lambda: not launch.alive, 0.3)
        if launch.alive:
            if not up:
                self.fault("not back, or not gone in time", f"neither up nor gone after {title} was struck")
                self._give_up()
                return
            self._check_causes(0, needed=False)
            self.settle()
            window.end = time.monotonic()
            return
        took = time.monotonic() - struck
        if always or launch.process.returncode != 1 or took > limit:
            how = f"exit {launch.process.returncode} after {took:.1f} s"
            self.fault("not back, or not gone in time", f"{how}, always={always}, ready={was_ready}, struck: {title}")
        window.close_by = time.monotonic() + CLOSE_LIMIT
        self._check_causes(0, needed=True)
        self._all_gone(time.monotonic())
        window.end = time.monotonic()
        self.fresh()

    def _drain(self, cell: Cell) -> None:
        """A blow while a launch finishes what runs."""
        self.tally()
        launch, mark = self.launch, self.launch.log.stat().st_size
        self._choose(cell.victim)
        window = Window(time.monotonic(), answered_ones_too=cell.victim != HELPER)
        self.load.windows.append(window)
        launch.process.send_signal(signal.SIGTERM)
        time.sleep(self._chance.uniform(0.0, 0.5))
        title, pid = self._choose(cell.victim)
        self._struck.add(pid)
        if cell.victim == HELPER and title != "Forkserver":
            window.answered_ones_too = True
        deal(cell.blow, pid, self._chance, self.memory)
        if title == "Supervisor" and cell.blow == "STOP":
            deal("KILL", pid, self._chance, self.memory)
        limit = SHUTDOWN + GONE_LIMIT
        if not until(lambda: not launch.alive, limit):
            self.fault("not back, or not gone in time", f"still there {limit:g} s after SIGTERM; struck: {title}")
            self._give_up()
            return
        dead = time.monotonic()
        window.close_by = dead + CLOSE_LIMIT
        allowed = {0, 1} if title != "Supervisor" else {0, 1, -signal.SIGKILL, -signal.SIGSEGV}
        if title == "Forkserver":
            allowed = {0}
        if launch.process.returncode not in allowed:
            self.fault("not back, or not gone in time", f"exit {launch.process.returncode}; struck: {title}")
        if launch.process.returncode == 1:
            self._check_causes(mark, needed=True)
        self._all_gone(dead)
        window.end = time.monotonic()
        self.fresh()

    def end_in_order(self) -> None:
        self.tally()
        window = Window(time.monotonic(), answered_ones_too=False)
        self.load.windows.append(window)
        self.launch.process.send_signal(signal.SIGTERM)
        if not until(lambda: not self.launch.alive, SHUTDOWN + GONE_LIMIT):
            self.fault("not back, or not gone in time", "still there after SIGTERM")
            self.launch.end()
        dead = time.monotonic()
        if self.launch.process.returncode != 0:
            self.fault("not back, or not gone in time", f"SIGTERM: exit {self.launch.process.returncode}")
        window.close_by = dead + CLOSE_LIMIT
        self._all_gone(dead)
        window.end = time.monotonic()

    # --- counts

    def _check_causes(self, mark: int, *, needed: bool) -> None:
        """Every failure that the log calls a cause is one of those that were struck, and there is one."""
        causes = self.launch.causes(mark)
        for title, pid, line in causes:
            if pid not in self._struck:
                self.fault("wrong first cause", f"{title}, pid {pid}: {line}")
        if needed and not causes:
            self.fault("wrong first cause", "the log names nobody")

    def _look_for_strangers(self) -> None:
        known = {self.launch.process.pid}
        if trees.strangers(known) and not until(lambda: not trees.strangers(known), GONE_LIMIT):
            found = trees.strangers(known)
            self.fault("orphans", f"outside the tree: {found}")
            trees.kill_strangers(found)

    def tally(self) -> None:
        """With no request under way every process has as many descriptors as in the beginning."""
        if not self.load.pause(8):
            self.fault("requests lost", "a request does not end")
        launch = self.launch

        def more() -> dict[str, tuple[int, int]]:
            counts = launch.descriptors()
            return {t: (launch.baseline.get(t, 0), n) for t, n in counts.items() if n > launch.baseline.get(t, 0)}

        if not until(lambda: not more(), 3):
            self.fault("descriptors", f"title: (at first, now): {more()}")
            launch.baseline = launch.descriptors()
        self.load.resume()


def is_gone(pid: int) -> bool:
    """Not there, or a zombie: it holds nothing any more."""
    stat = trees.procfs.read_stat(pid)
    return stat is None or stat.state == "Z"
