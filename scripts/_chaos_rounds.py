"""The rounds of `chaos`: deal a blow, see that what must happen happens, in time, and count what does not."""

from __future__ import annotations

import signal
import time

import _chaos_tree as trees
from _chaos_arena import BACK_LIMIT, GONE_LIMIT, LATE, SHUTDOWN, Arena
from _chaos_blows import (
    API,
    CORE,
    DRAIN,
    HELPER,
    RESTART,
    SERVING,
    START,
    SUPERVISOR,
    WORKER,
    Cell,
    choose,
    deal,
    role_of,
)
from _chaos_load import CLOSE_LIMIT, Window
from _chaos_tree import until

from launcher.process import procfs

WATCHDOG = 2.0
READY_TIMEOUT = 8.0
TALLY_EVERY = 10


class Rounds(Arena):
    """Plays rounds in it."""

    def play(self, number: int, cell: Cell) -> None:
        self.label = f"round {number} ({cell})"
        self.dealt[str(cell)] += 1
        counts = self.load.counts
        before = (len(counts.lost), len(counts.wrong))
        if cell.phase != RESTART:  # or those that were there at the last death would be suspects, tried one by one
            until(lambda: self.load.oldest() > self.back_since, 5)
        time.sleep(self.chance.uniform(0.0, 0.3))
        {DRAIN: self._drain, START: self._start, RESTART: self._restart}.get(cell.phase, self._serving)(cell)
        self.look_for_strangers()
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
        self.back_since = time.monotonic()

    def _serving(self, cell: Cell) -> None:
        title, pid = self._choose(cell.victim)
        self._strike(cell, [(title, pid)], len(self.launch.text().encode()))

    def _restart(self, cell: Cell) -> None:
        """A second blow while a group is coming back from the first."""
        mark = self.launch.log.stat().st_size
        first = self._choose(self.chance.choice((WORKER, CORE)))
        deal("KILL", first[1], self.chance, self.memory)
        self.struck.add(first[1])
        time.sleep(self.chance.uniform(0.0, 0.8))
        self._strike(cell, [self._choose(cell.victim), first], mark)

    def _choose(self, victim: str) -> tuple[str, int]:
        return choose(self.chance, victim, self.launch.tree(), self.launch.process.pid)

    def _strike(self, cell: Cell, victims: list[tuple[str, int]], mark: int) -> None:
        """Deal it to the first of `victims`; all of them must be followed by others."""
        title, pid = victims[0]
        role = role_of(title)
        window = Window(time.monotonic()) if role in (API, SUPERVISOR) and cell.blow != "CONT" else None
        if window is not None:
            self.load.windows.append(window)
        self.struck.add(pid)
        old = self.launch.tree()
        moment = deal(cell.blow, pid, self.chance, self.memory)
        if self.memory.kills != 1:  # somebody else's memory is gone, too: nothing can be said of this round
            self.void += 1
            self.memory.kills = 1
            self.give_up()
        elif cell.blow == "CONT":
            self._unhurt(moment, old, mark, cell)
        elif role == SUPERVISOR:
            if cell.blow == "STOP":  # nobody above it looks after it
                time.sleep(0.3)
                deal("KILL", pid, self.chance, self.memory)
            self._whole_tree_goes(cell, window)
        else:
            if role == HELPER and cell.blow == "STOP" and cell.phase == SERVING:  # nothing shows before it is needed
                victims.append(self._choose(WORKER))
                self.struck.add(victims[-1][1])
                deal("KILL", victims[-1][1], self.chance, self.memory)
            self._comes_back(cell, victims, window, moment, mark)

    def _unhurt(self, moment: float, old: dict[str, int], mark: int, cell: Cell) -> None:
        answered = self.launch.probe(BACK_LIMIT)
        if answered is None:
            self.fault(LATE, "no answer after SIGCONT")
            return
        self.times[cell].append(answered - moment)
        if cell.phase == "serving" and self.launch.tree() != old:
            self.fault(LATE, "a process was replaced though all went on")
        self.check_causes(mark, needed=False)

    def _comes_back(
        self, cell: Cell, victims: list[tuple[str, int]], window: Window | None, moment: float, mark: int
    ) -> None:
        launch = self.launch
        limit = BACK_LIMIT + (WATCHDOG if cell.blow == "STOP" else 0)
        pid = victims[0][1]
        if window is not None and cell.blow != "STOP":
            window.end = time.monotonic()
        if not until(lambda: is_gone(pid) or not launch.alive, limit):
            self.fault(LATE, f"{victims[0][0]} (pid {pid}) still there")
            self.give_up()
            return
        dead = time.monotonic()
        if window is not None:
            window.end, window.close_by = dead, dead + CLOSE_LIMIT

        if (fault := self._not_whole({each for _, each in victims}, limit)) is not None:
            self.fault(*fault)
            self.give_up()
            return
        answered = launch.probe(limit)
        if answered is None:
            self.fault(LATE, f"no answer within {limit:g} s; {launch.tree()}")
            self.give_up()
            return
        self.times[cell].append(answered - moment)
        if not until(lambda: launch.shape() == self.shape, 5):
            extra, missing = launch.shape() - self.shape, self.shape - launch.shape()
            self.fault("orphans", f"beside the tree: {dict(extra)}; missing: {dict(missing)}")
            self.give_up()
            return
        self.check_causes(mark, needed=True)

    def _not_whole(self, gone: set[int], limit: float) -> tuple[str, str] | None:
        """None once everybody is there again, with others in the place of `gone`."""
        launch = self.launch
        wanted = {name.removeprefix(trees.PREFIX) for name in self.shape if name.startswith(trees.PREFIX)}

        def whole() -> bool:
            tree = launch.tree()
            return not launch.alive or (set(tree) == wanted and not gone & set(tree.values()))

        found = until(whole, limit)
        if not launch.alive:
            return LATE, f"the launch ended: {launch.process.poll()}"
        return None if found else (LATE, f"tree: {launch.tree()}")

    def _whole_tree_goes(self, cell: Cell, window: Window | None) -> None:
        self.launch.process.wait()
        dead = time.monotonic()
        if window is not None:
            window.close_by = dead + CLOSE_LIMIT
        self.all_gone(dead)
        if window is not None:
            window.end = time.monotonic()
        self.fresh()
        self.times[cell].append(self.cold[-1])

    # --- start and drain

    def _start(self, cell: Cell) -> None:
        """A blow while a launch is starting: without restarts of a first start it ends, with them it comes up."""
        self.end_in_order()
        always = self.chance.random() < 0.5
        launch = self.begin("--restart", "always" if always else "on-failure")
        time.sleep(self.chance.uniform(0.05, 1.0) * (self.cold[0] if self.cold else 2.0))
        title, pid = self._choose(cell.victim)
        self.struck.add(pid)
        guarded = "Forkserver (pid" in launch.text()
        window = Window(time.monotonic())  # it may serve already
        if cell.blow != "CONT":
            self.load.windows.append(window)
        deal(cell.blow, pid, self.chance, self.memory)
        if title == "Supervisor" and cell.blow != "CONT":
            if cell.blow == "STOP":
                deal("KILL", pid, self.chance, self.memory)
            launch.process.wait()
            window.close_by = time.monotonic() + CLOSE_LIMIT
            self.all_gone(time.monotonic(), files=guarded)
            window.end = time.monotonic()
            self.fresh()
            return
        self._after_a_blow_in_the_start(cell, title, window, always=always)

    def _after_a_blow_in_the_start(self, cell: Cell, title: str, window: Window, *, always: bool) -> None:
        launch, struck = self.launch, time.monotonic()
        limit = GONE_LIMIT + (READY_TIMEOUT + 2 if cell.blow == "STOP" else 0)
        up = until(lambda: not launch.alive or launch.probe(0.2), BACK_LIMIT)
        if launch.alive and up:
            until(lambda: not launch.alive, 0.3)
        if launch.alive and not up:
            self.fault(LATE, f"neither up nor gone after {title} was struck")
            self.give_up()
        elif launch.alive:
            self.check_causes(0, needed=False)
            self.settle()
        else:
            took = time.monotonic() - struck
            window.close_by = time.monotonic() + CLOSE_LIMIT
            if always or cell.blow == "CONT" or launch.process.returncode != 1 or took > limit:
                how = f"exit {launch.process.returncode} after {took:.1f} s"
                self.fault(LATE, f"{how}, always={always}, struck: {title}")
            self.check_causes(0, needed=True)
            self.all_gone(time.monotonic())
            self.fresh()
        window.end = time.monotonic()

    def _drain(self, cell: Cell) -> None:
        """A blow while a launch finishes what runs."""
        self.tally()
        launch, mark = self.launch, self.launch.log.stat().st_size
        harmless = cell.victim == HELPER or cell.blow == "CONT"
        window = Window(time.monotonic(), answered_ones_too=not harmless)
        self.load.windows.append(window)
        launch.process.send_signal(signal.SIGTERM)
        time.sleep(self.chance.uniform(0.0, 0.5))
        others = set(launch.tree()) - {"Forkserver"}
        title, pid = self._choose(cell.victim)
        self.struck.add(pid)
        if cell.blow != "CONT" and title != "Forkserver":
            window.answered_ones_too = True
        deal(cell.blow, pid, self.chance, self.memory)
        if title == "Supervisor" and cell.blow == "STOP":
            deal("KILL", pid, self.chance, self.memory)
        limit = SHUTDOWN + GONE_LIMIT
        if not until(lambda: not launch.alive, limit):
            self.fault(LATE, f"still there {limit:g} s after SIGTERM; struck: {title}")
            self.give_up()
            return
        dead = time.monotonic()
        window.close_by = dead + CLOSE_LIMIT
        allowed = {0, 1} if title != "Supervisor" else {0, 1, -signal.SIGKILL, -signal.SIGSEGV}
        if title == "Forkserver" or cell.blow == "CONT":
            allowed = {0}
        if launch.process.returncode not in allowed:
            self.fault(LATE, f"exit {launch.process.returncode}; struck: {title}")
        if launch.process.returncode == 1:
            self.check_causes(mark, needed=True)
        # A supervisor that has sent everybody away, its helper too, leaves its directory to the next start.
        self.all_gone(dead, files=title != "Supervisor" or bool(others))
        window.end = time.monotonic()
        self.fresh()


def is_gone(pid: int) -> bool:
    """Not there, or a zombie: it holds nothing any more."""
    stat = procfs.read_stat(pid)
    return stat is None or stat.state == "Z"
