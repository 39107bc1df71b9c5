"""End what our children started and left behind, and nobody else.

Every child of ours is a session leader, so a process that a worker started (a compiler, a data loader, a shell) is in
the worker's session unless it made its own; then the launch id in its environment still tells whose it is. A pid is
only signalled through a pidfd whose process was checked after the pidfd was opened: it can't have been replaced.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Mapping

from launcher.clock import Deadline
from launcher.process import procfs
from launcher.process.procfs import ProcStat
from launcher.process.spec import LAUNCH_ID_VARIABLE

TITLE_PREFIX = "xserve::"


def find_members(sessions: Mapping[int, int], launch_id: str, spare: Collection[int] = ()) -> list[ProcStat]:
    """Live processes of ours: `sessions` maps the session id (= its leader's pid) to the leader's start time.

    `spare` are pids that are never returned (the caller's own). Zombies are left out: they hold nothing.
    """
    processes = [p for p in procfs.all_processes() if p.pid not in spare and p.state != "Z"]
    leaders = {p.pid: p for p in procfs.all_processes() if p.pid in sessions}
    mark = f"{LAUNCH_ID_VARIABLE}={launch_id}"

    def belongs(process: ProcStat) -> bool:
        if sessions.get(process.pid) == process.start_time:
            return True
        if process.session in sessions and _is_ours(process, leaders.get(process.session), sessions):
            return True
        return bool(launch_id) and procfs.has_in_environment(process.pid, mark)

    return [process for process in processes if belongs(process)]


def _is_ours(process: ProcStat, leader: ProcStat | None, sessions: Mapping[int, int]) -> bool:
    if leader is not None:
        return leader.start_time == sessions[process.session]
    # The leader is gone. Its number can only have come back as a new session if every member of ours had gone
    # before, so ask the member itself: a fork of ours carries our title, an exec'ed one the launch id (see above).
    return procfs.command_line(process.pid).startswith(TITLE_PREFIX)


def signal_process(pid: int, start_time: int, number: int) -> bool:
    """Send a signal to exactly this process; False when it is gone."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if procfs.start_time(pid) != start_time:
            return False
        signal.pidfd_send_signal(fd, number)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def kill_members(sessions: Mapping[int, int], launch_id: str, deadline: Deadline, spare: Collection[int] = ()) -> int:
    """SIGKILL every member until none is left or the deadline passes; returns how many there were.

    Repeated because a member may fork between the look and the kill.
    """
    killed: set[tuple[int, int]] = set()
    while members := find_members(sessions, launch_id, {*spare, os.getpid()}):
        for member in members:
            if signal_process(member.pid, member.start_time, signal.SIGKILL):
                killed.add((member.pid, member.start_time))
        if deadline.expired:
            break
        time.sleep(0.002)
    return len(killed)
