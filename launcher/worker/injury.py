"""What each fault of `faults` does to the process that it strikes. Never run without ``XSERVE_FAULT``."""

from __future__ import annotations

import ctypes
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from launcher import clock, envs, host
from launcher.config import WorkerSettings
from launcher.errors import HostError
from launcher.worker.base import Progress
from launcher.worker.faults import Fault, Point, Schedule, parse_faults

_OOM_LIMIT = 4 << 30
"""Bytes. With more than this left, `oom` could take the whole machine down with it."""
_OOM_STEP = 16 << 20


class InjectedError(RuntimeError):
    """Raised by the ``*_raise`` faults."""


class Injury:
    """Carries out the faults of one process."""

    def __init__(self, schedule: Schedule, who: int | Literal["core"], progress: Callable[[], Progress]) -> None:
        self._schedule = schedule
        self._who = who
        self._progress = progress
        self._left_behind: list[subprocess.Popen[bytes]] = []

    def strike(self, point: Point) -> None:
        """Do what is due at this point; mostly nothing. May not return."""
        for fault in self._schedule.due(point):
            _DEEDS[fault.kind](self, fault)

    def _raise(self, fault: Fault) -> None:
        raise InjectedError(f"injected fault {fault.kind} on rank {self._who}")

    def _segv(self, _fault: Fault) -> None:
        ctypes.string_at(0)

    def _sleep(self, fault: Fault) -> None:
        time.sleep(fault.seconds)

    def _sleep_with_progress(self, fault: Fault) -> None:
        deadline = clock.Deadline.after(fault.seconds)
        while not deadline.expired:
            self._progress()(fault.seconds - deadline.remaining(), fault.seconds, "s", "injected delay")
            time.sleep(min(1.0, deadline.remaining()))

    def _hang(self, _fault: Fault) -> None:
        while True:
            time.sleep(3600)

    def _leave_a_child(self, _fault: Fault) -> None:
        # Kept in a list, or the garbage collector would warn of it; never waited for: that is the fault.
        self._left_behind.append(subprocess.Popen(["/bin/sh", "-c", "sleep 1000 & wait"], stdin=subprocess.DEVNULL))

    def _take_all_memory(self, _fault: Fault) -> None:
        left = host.memory_headroom_of()
        if left.bytes > _OOM_LIMIT or left.origin == "MemAvailable":
            raise HostError(
                f"fault oom: {left.bytes >> 20} MiB are free ({left.origin}), and taking them could harm others; "
                "run under a memory limit, for example systemd-run --user --scope -p MemoryMax=1G"
            )
        hoard = []
        while True:
            hoard.append(bytearray(b"\xff") * _OOM_STEP)  # written to, so that it is really there

    def _slow_cleanup(self, fault: Fault) -> None:
        time.sleep(fault.seconds)
        print("cleanup done", flush=True)


_DEEDS: dict[str, Callable[[Injury, Fault], None]] = {
    "import_sleep": Injury._sleep,
    "init_raise": Injury._raise,
    "init_segv": Injury._segv,
    "init_sleep": Injury._sleep,
    "init_progress": Injury._sleep_with_progress,
    "init_hang": Injury._hang,
    "spawn_child": Injury._leave_a_child,
    "step_raise": Injury._raise,
    "step_segv": Injury._segv,
    "step_sleep": Injury._sleep,
    "step_hang": Injury._hang,
    "oom": Injury._take_all_memory,
    "slow_cleanup": Injury._slow_cleanup,
}


def make_injury(who: int | Literal["core"], settings: WorkerSettings, progress: Callable[[], Progress]) -> Injury:
    """The faults of a rank, or of the engine core above the ranks. `UsageError` when ``XSERVE_FAULT`` can't be read."""
    directory = settings.worker_config.get("fault_dir")
    schedule = Schedule(
        parse_faults(envs.fault_text()),
        who,
        generation=settings.generation,
        marker_dir=Path(directory) if directory else None,
    )
    return Injury(schedule, who, progress)
