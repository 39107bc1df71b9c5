"""`xserve status` and `xserve stop`: commands to an instance that runs."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from launcher.cli.flags import NAME, TIMEOUT
from launcher.cli.launch_config import read_flag
from launcher.clock import Deadline
from launcher.control import client, run_dir
from launcher.control.protocol import InstanceStatus
from launcher.errors import DeadlineError

if TYPE_CHECKING:
    from rich.console import Console

ANSWER_SECONDS = 5.0
"""The supervisor answers between two events; one that takes longer is stuck."""
DEADLINE_PASSED = 124


def status(given: dict[str, Any]) -> int:
    """Print the instance's status: 0; errors: 3 not running, 4 cannot tell, 2 which one."""
    instance = run_dir.find(read_flag(NAME, given["name"]))
    found = client.status(instance, Deadline.after(ANSWER_SECONDS))
    if given["json"]:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    else:
        _print(found)
    return 0


def stop(given: dict[str, Any]) -> int:
    """Stop the instance and wait for its end: 0, or 124 when it is not over in time."""
    timeout = read_flag(TIMEOUT, given["timeout"])
    instance = run_dir.find(read_flag(NAME, given["name"]))
    began = time.monotonic()
    try:
        pid = client.stop(instance, timeout, Deadline.after(ANSWER_SECONDS))
    except DeadlineError as error:
        sys.stderr.write(f"xserve: {error}\n")
        return DEADLINE_PASSED
    sys.stdout.write(f"stopped {instance.name} (pid {pid}) in {time.monotonic() - began:.1f} s\n")
    return 0


def _print(found: InstanceStatus) -> None:
    from rich.table import Table

    where = f", {found.url}" if found.url else ""
    sys.stdout.write(f"{found.name}: {found.state} for {_ago(found.since)}{where}\n")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("TITLE", "ROLE", "RANK", "PID", "PHASE", "SINCE"):
        table.add_column(name, no_wrap=True)
    for one in found.processes:
        rank = "" if one.rank is None else str(one.rank)
        table.add_row(one.title, one.role, rank, str(one.pid), one.phase, f"{_ago(one.since)} ago")
    console_for(sys.stdout).print(table)


def console_for(stream: TextIO) -> Console:
    """As wide as the terminal; in a pipe so wide that no table is cut."""
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False, width=None if stream.isatty() else 400)


def _ago(since: float) -> str:
    """Whole seconds, minutes, hours or days since then, by the wall clock: for people."""
    seconds = max(0.0, time.time() - since)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
