"""Who is slow to start, who does not answer, and what everybody is doing (stacks)."""

from __future__ import annotations

import faulthandler

from launcher import clock
from launcher.process import procfs, sessions
from launcher.process.child import STACK_SIGNAL
from launcher.process.lives import Lives
from launcher.process.reports import Ping, Step
from launcher.process.start_lines import StartLines
from launcher.process.supervisor_settings import Screen
from launcher.process.tree import Record, Tree
from launcher.process.units import Phase, Units
from launcher.process.verdict import Verdict
from launcher.process.watchdog import Watchdog


class Attention:
    """Looks at the tree when it is told to; what it finds goes to the verdict."""

    def __init__(
        self, tree: Tree, units: Units, lives: Lives, verdict: Verdict, screen: Screen, *, limit: float
    ) -> None:
        self.watchdog = Watchdog(limit)
        self._tree = tree
        self._units = units
        self._nursery, self._helper = lives.nursery, lives.helper
        self._helper.on_pong = lambda: self.watchdog.heard(self._helper.title, clock.now())
        self._verdict = verdict
        self._screen = screen
        self._start_lines = StartLines()

    def start_is_over(self) -> None:
        self._start_lines.reset()

    def look_at_start(self, ready_timeout: float) -> None:
        """The start's limit: no progress of anybody for `ready_timeout` seconds."""
        if (age := self._helper.idle_start) > ready_timeout:
            self._helper.replace(f"not ready: no progress for {age:.0f} s (--ready-timeout {ready_timeout:g})")
        running = set[str]().union(*(unit.titles for unit in self._units if unit.phase is Phase.RUNNING))
        behind = [record for record in self._tree.behind() if record.title in running]
        if not behind:
            return
        if line := self._start_lines.due([record for record in self._tree if record.title in running]):
            self._screen.note(line)
        last = max(record.last_progress for record in self._tree if record.title in running)
        # The engine core has a limit too, a few seconds later: if it went first, its workers' stacks would go with it.
        if clock.now() - last > ready_timeout and not self._verdict.due:
            self.show_stacks(f"no progress for {ready_timeout:g} s")
            self._verdict.too_slow(self._guilty(behind), ready_timeout)

    def _guilty(self, behind: list[Record]) -> Record:
        """Who holds the start up: one that is stopped, or else the furthest behind."""
        for record in behind:
            if (stat := procfs.read_stat(record.pid)) is not None and stat.state in "Tt":
                return record
        slowest = self._tree.slowest()
        return slowest if slowest is not None and slowest in behind else behind[0]

    def look_at_service(self) -> None:
        """Ping who serves; one that has not answered for the limit is hung."""
        ready = [
            c for c in self._nursery.children if c.is_ready and not c.is_gone and not self._units.is_ending(c.title)
        ]
        helper = {self._helper.title: self._helper.pid} if self._helper.is_ready else {}
        turn = self.watchdog.turn(clock.now(), {child.title: child.pid for child in ready} | helper)
        if turn is None:
            return
        for child in ready:
            self._nursery.send_nowait(child, Ping(number=self.watchdog.number))
        if helper:
            self._helper.ping(self.watchdog.number)
        late = dict(turn.late)
        if (age := late.pop(self._helper.title, None)) is not None:
            self._helper.replace(f"has not answered for {age:.0f} s (--watchdog-timeout {self.watchdog.limit:g})")
        if late and not self._verdict.due:
            self.show_stacks("no answer from " + ", ".join(late))
            for title, age in late.items():
                self._verdict.silent(self._tree[title], age, self.watchdog.limit)

    def show_stacks(self, why: str) -> None:
        """Have every process print the Python stack of each of its threads; all of them go on.

        By a signal that each has set up at birth (faulthandler): no tool, no privilege, no interpreter lock needed.
        """
        self._screen.note(f"stacks of all processes: {why}")
        faulthandler.dump_traceback(file=2)
        for record in self._tree:
            if not record.pid or record.gone or record.step is Step.SPAWNED:
                continue
            stat = procfs.read_stat(record.pid)
            if stat is not None and stat.state in "TtD":
                self._screen.note(f"{record.title} (pid {record.pid}) cannot show its stack: state {stat.state}")
            sessions.signal_process(record.pid, record.start_time, STACK_SIGNAL)
