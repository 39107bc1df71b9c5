"""A launch of `chaos` under load, followed by others when it is ended; what is counted, and when."""

from __future__ import annotations

import random
import shutil
import signal
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import _chaos_tree as trees
from _chaos_blows import Cell, MemoryLimit
from _chaos_load import CLOSE_LIMIT, Load, Window
from _chaos_tree import Launch, until

SHUTDOWN = 8.0
GONE_LIMIT = 2.0
"""Seconds after a death within which every process that must go is gone."""
START_LIMIT = 120.0
"""Seconds for a launch that is not disturbed; a model may have to be read from a cold disk."""
BACK_LIMIT = 30.0
"""Seconds after which a launch counts as one that does not come back."""
LATE = "not back, or not gone in time"
FAULTS = (
    "orphans",
    "segments",
    "files and sockets",
    "descriptors",
    "requests lost",
    "requests wrong",
    "connections closed late",
    "wrong first cause",
    LATE,
)


class Arena:
    """A launch under load, followed by others when it is ended."""

    def __init__(
        self, directory: Path, port: int, arguments: list[str], load: Load, seed: int, variables: dict[str, str]
    ) -> None:
        self.faults: dict[str, list[str]] = {name: [] for name in FAULTS}
        self.times: dict[Cell, list[float]] = defaultdict(list)
        """Seconds from the blow to the next answer."""
        self.cold: list[float] = []
        """Seconds from the start of a launch to its first answer."""
        self.dealt: Counter[str] = Counter()
        self.quiet_limit = 8.0
        """Seconds for all requests that are under way to end."""
        self.void = 0
        """Rounds in which the kernel killed more than it was meant to."""
        self.memory = MemoryLimit()
        self.load = load
        self._directory, self._port, self._arguments, self._variables = directory, port, arguments, variables
        self.chance = random.Random(seed)
        self._number = 0
        self.label = ""
        self._segments: set[str] = set()
        """Names in /dev/shm that a launch was seen to use."""
        self.shape: Counter[str] = Counter()
        self.struck: set[int] = set()
        self.back_since = 0.0
        self.launch = self.begin()

    # --- launches

    def begin(self, *more: str) -> Launch:
        """Start one, without waiting for it."""
        self._number += 1
        command = self.memory.entering(trees.command_line(self._port, [*self._arguments, *more]))
        self.launch = Launch(self._directory, self._number, self._port, command, self._variables)
        self.struck.clear()
        return self.launch

    def come_up(self) -> None:
        """Wait until it answers, then remember what it looks like when all is well."""
        launch = self.launch
        answered = launch.probe(START_LIMIT)
        if answered is None:
            raise SystemExit(f"chaos: a launch does not come up; see {launch.log}\n{launch.text()[-3000:]}")
        self.cold.append(answered - launch.began)
        self.load.resume()

    def settle(self) -> None:
        """The first look at a launch that all others are compared with: nothing runs, everybody is there."""
        self.load.pause(5)
        until(lambda: len(self.launch.tree()) >= 2 and self.is_steady(), 5)
        self.shape = self.launch.shape()
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
        line = f"{self.label}: {text} [{self.launch.log.name}]"
        self.faults[kind].append(line)
        if not quiet:
            print(f"FAULT {kind}: {line}", file=sys.stderr)

    # --- ends

    def end_in_order(self) -> None:
        self.tally()
        window = Window(time.monotonic(), answered_ones_too=False)
        self.load.windows.append(window)
        self.launch.process.send_signal(signal.SIGTERM)
        if not until(lambda: not self.launch.alive, SHUTDOWN + GONE_LIMIT):
            self.fault(LATE, "still there after SIGTERM")
            self.launch.end()
        dead = time.monotonic()
        if self.launch.process.returncode != 0:
            self.fault(LATE, f"SIGTERM: exit {self.launch.process.returncode}")
        window.close_by = dead + CLOSE_LIMIT
        self.all_gone(dead)
        window.end = time.monotonic()

    def all_gone(self, dead: float, *, files: bool = True) -> None:
        """Of a launch whose supervisor is gone since `dead`: nothing may be left 2 s later. Without `files` there was
        no helper, not yet or not any more, to clean up: the next start takes the directory over."""
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

    def give_up(self) -> None:
        """This launch is not what it should be: go on with another one."""
        window = Window(time.monotonic())
        self.load.windows.append(window)
        self.launch.end()
        until(lambda: not trees.strangers({self.launch.process.pid}), GONE_LIMIT)
        trees.kill_strangers(trees.strangers({self.launch.process.pid}))
        window.end = time.monotonic()
        self.fresh()

    # --- counts

    def check_causes(self, mark: int, *, needed: bool) -> None:
        """Every failure that the log calls a cause is one of those that were struck, and there is one."""
        causes = self.launch.causes(mark)
        for title, pid, line in causes:
            if pid not in self.struck:
                self.fault("wrong first cause", f"{title}, pid {pid}: {line}")
        if needed and not causes:
            self.fault("wrong first cause", "the log names nobody")

    def look_for_strangers(self) -> None:
        known = {self.launch.process.pid}
        if trees.strangers(known) and not until(lambda: not trees.strangers(known), GONE_LIMIT):
            found = trees.strangers(known)
            self.fault("orphans", f"outside the tree: {found}")
            trees.kill_strangers(found)

    def tally(self) -> None:
        """With no request under way every process has as many descriptors as in the beginning."""
        if not self.load.pause(self.quiet_limit):
            self.fault("requests lost", f"a request does not end within {self.quiet_limit:g} s")
        launch = self.launch

        def more() -> dict[str, tuple[int, int]]:
            counts = launch.descriptors()
            return {t: (launch.baseline.get(t, 0), n) for t, n in counts.items() if n > launch.baseline.get(t, 0)}

        if not until(lambda: not more(), 3):
            self.fault("descriptors", f"title: (at first, now): {more()}")
            launch.baseline = launch.descriptors()
        self.load.resume()
