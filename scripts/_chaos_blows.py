"""What `chaos` does to a process, and to whom in which phase: a deck of cells, shuffled by the seed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import _chaos_tree as trees

WORKER, CORE, API, HELPER, SUPERVISOR = "worker", "engine core", "API server", "helper", "supervisor"
_TITLES = {WORKER: "Worker", CORE: "EngineCore", API: "APIServer", HELPER: "Forkserver", SUPERVISOR: "Supervisor"}
VICTIMS = tuple(_TITLES)
PHASES = SERVING, RESTART, START, DRAIN = "serving", "restart", "start", "drain"


class Cell(NamedTuple):
    phase: str
    victim: str
    blow: str
    """``KILL``, ``SEGV``, ``OOM``, ``STOP`` (and nothing more) or ``CONT``: stopped and continued after a moment."""

    def __str__(self) -> str:
        return f"{self.blow} of the {self.victim}, {self.phase}"


def deck(*, quick: bool, oom: bool) -> list[Cell]:
    """Every cell of the table, the usual ones more often."""
    blows = ("KILL", "SEGV", "STOP", "CONT")
    cells = [Cell(phase, victim, blow) for phase in PHASES for victim in VICTIMS for blow in blows]
    if quick:  # who is stopped in these is found by --ready-timeout only
        cells = [cell for cell in cells if cell.blow != "STOP" or cell.phase not in (RESTART, START)]
    if oom:
        cells += [Cell(SERVING, victim, "OOM") for victim in VICTIMS]
    return cells + [Cell(SERVING, victim, "KILL") for victim in (WORKER, WORKER, CORE, API)]


def choose(chance: random.Random, victim: str, tree: dict[str, int], supervisor: int) -> tuple[str, int]:
    """(title, pid) of such a process; of any, where there is none."""
    everybody = {**tree, "Supervisor": supervisor}
    fitting = sorted(title for title in everybody if title.startswith(_TITLES[victim])) or sorted(everybody)
    title = chance.choice(fitting)
    return title, everybody[title]


def role_of(title: str) -> str:
    return next(role for role, prefix in _TITLES.items() if title.startswith(prefix))


class MemoryLimit:
    """A memory control group for the launches, in which the kernel can be made to kill one process of our choice."""

    _ROOT = Path("/sys/fs/cgroup/memory")
    _HOG = (
        "import sys\n"
        "group, step = sys.argv[1], 1 << 20\n"
        "open(group + '/cgroup.procs', 'w').write('0')\n"
        "open('/proc/self/oom_score_adj', 'w').write('-1000')\n"
        "held = [bytearray(b'1') * step for _ in range(2000)]\n"
    )

    def __init__(self) -> None:
        self.note = ""
        """Why there is none."""
        self.kills = 1
        self._group = self._ROOT / f"xserve-chaos-{os.getpid()}"
        if not (self._ROOT / "memory.oom_control").exists():
            self.note = "no starving: it is done with the memory controller of cgroup v1, which is not here"
            return
        try:
            self._group.mkdir()
        except OSError as error:
            self.note = f"no starving: cannot make a control group ({error.strerror})"

    def entering(self, command: list[str]) -> list[str]:
        """`command`, executed inside the group."""
        if self.note:
            return command
        return ["sh", "-c", f'echo $$ > {self._group}/cgroup.procs && exec "$@"', "sh", *command]

    def starve(self, pid: int) -> None:
        """Fill the group up; the kernel then kills `pid`, the one that is marked. `kills` tells of how many it made."""
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
        used = int((self._group / "memory.usage_in_bytes").read_text())
        limit = self._group / "memory.limit_in_bytes"
        before = self._count()
        limit.write_text(str(used + (8 << 20)))
        with subprocess.Popen([sys.executable, "-S", "-c", self._HOG, str(self._group)]) as hog:
            end = time.monotonic() + 20
            while self._count() == before and time.monotonic() < end:
                pass  # every moment more may cost another process its life
            limit.write_text("-1")
            hog.kill()
        self.kills = self._count() - before

    def _count(self) -> int:
        return int((self._group / "memory.oom_control").read_text().split()[-1])

    def close(self) -> None:
        if not self.note:
            trees.until(lambda: not (self._group / "cgroup.procs").read_text(), 3)
            with contextlib.suppress(OSError):
                self._group.rmdir()


def deal(blow: str, pid: int, chance: random.Random, memory: MemoryLimit) -> float:
    """Do it; the moment at which it was done (a starved process dies when memory has run out)."""
    if blow == "OOM":
        memory.starve(pid)
        return time.monotonic()
    number = {"KILL": signal.SIGKILL, "SEGV": signal.SIGSEGV}.get(blow, signal.SIGSTOP)
    moment = time.monotonic()
    trees.strike(pid, number)
    if blow == "CONT":
        time.sleep(chance.uniform(0.05, 0.8))
        trees.strike(pid, signal.SIGCONT)
    return moment
