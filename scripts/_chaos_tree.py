"""A launch as `chaos` sees it from outside: who runs, what is open, what is left when it is gone."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from launcher import envs
from launcher.process import procfs, sessions

PREFIX = "xserve::"
POLL = 0.004
_CAUSE = re.compile(
    r"^(?:xserve: +[\d.]+ s  )?(?:xserve: )?(?:rank \d+ \()?(\w+)\)?, pid (\d+)[^:]*: (.*)$", re.MULTILINE
)


def until(condition: Callable[[], Any], limit: float) -> Any:
    """The first true value of `condition`; None when `limit` seconds have passed."""
    end = time.monotonic() + limit
    while True:
        if value := condition():
            return value
        if time.monotonic() > end:
            return None
        time.sleep(POLL)


def command_line(port: int, arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "launcher.cli", "launch", "--port", str(port), "--name", "chaos", *arguments]


class Launch:
    """`xserve launch` with a runtime directory that all launches of a run share, one after the other."""

    def __init__(
        self, directory: Path, number: int, port: int, command: list[str], variables: dict[str, str] | None = None
    ) -> None:
        self.log = directory / f"launch-{number}.log"
        self.port = port
        self._runtime = directory / "r"
        self._temporary = directory / "t"
        state = directory / "s"  # crash bundles stay there
        for each in (self._runtime, self._temporary):
            each.mkdir(exist_ok=True)
        kept = {k: v for k, v in envs.child_environment().items() if not k.startswith(("XSERVE_", "NOTIFY_"))}
        places = {"XDG_RUNTIME_DIR": str(self._runtime), "TMPDIR": str(self._temporary), "XDG_STATE_HOME": str(state)}
        self.began = time.monotonic()
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**kept, **places, **(variables or {})}
            )
        self.baseline: dict[str, int] = {}
        """Descriptors of each long-lived process when all was quiet for the first time."""

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def text(self, since: int = 0) -> str:
        return self.log.read_bytes()[since:].decode(errors="replace")

    def causes(self, since: int) -> list[tuple[str, int, str]]:
        """(title, pid, headline) of each failure that the log calls a cause, from that byte of it on."""
        return [(title, int(pid), line) for title, pid, line in _CAUSE.findall(self.text(since))]

    def tree(self) -> dict[str, int]:
        """Title → pid of our processes below the supervisor."""
        found = {}
        for pid in descendants(self.process.pid):
            name = procfs.command_line(pid)
            if name.startswith(PREFIX):
                found[name.removeprefix(PREFIX)] = pid
        return found

    def shape(self) -> Counter[str]:
        """Every process below the supervisor by its command line: ours, and what workers have started."""
        return Counter(procfs.command_line(pid) for pid in descendants(self.process.pid))

    def probe(self, limit: float) -> float | None:
        """Monotonic time at which a request that is sent now is answered; None: not within the limit."""
        end = time.monotonic() + limit
        body = json.dumps({"model": "chaos", "prompt": "probe", "max_tokens": 1, "temperature": 0})
        while time.monotonic() < end and self.alive:
            line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=max(0.1, end - time.monotonic()))
            with contextlib.closing(line), contextlib.suppress(OSError, http.client.HTTPException):
                line.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                answer = line.getresponse()
                answer.read()
                if answer.status == 200:
                    return time.monotonic()
            time.sleep(POLL)
        return None

    def descriptors(self) -> dict[str, int]:
        """How many each process has that is in the tree for long; workers by their title, too."""
        pids = {"Supervisor": self.process.pid, **self.tree()}
        return {title: count for title, pid in pids.items() if (count := count_descriptors(pid)) is not None}

    def files_left(self) -> list[str]:
        """Whatever a launch that is gone has left in its directories."""
        found = [str(path) for top in (self._runtime / "xserve", self._temporary) for path in top.rglob("*")]
        return [path for path in found if "torchinductor" not in path]  # torch's cache of compiled code

    def end(self) -> None:
        """Whatever state it is in: kill it. Its children follow."""
        self.process.kill()
        self.process.wait()


def count_descriptors(pid: int) -> int | None:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None


def children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                yield from map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())


def descendants(pid: int) -> list[int]:
    found = list(children(pid))
    for each in found:
        found += children(each)
    return found


def strangers(known: set[int]) -> list[str]:
    """Live processes that have become ours by the death of their parent (chaos is a subreaper). Zombies are reaped."""
    alive = []
    for pid in children(os.getpid()):
        if pid in known:
            continue
        stat = procfs.read_stat(pid)
        if stat is not None and stat.state == "Z":
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        elif stat is not None:
            alive += [f"{each} {procfs.command_line(each)}" for each in (pid, *descendants(pid))]
    return alive


def kill_strangers(lines: list[str]) -> None:
    for line in lines:
        with contextlib.suppress(OSError):
            os.kill(int(line.split()[0]), signal.SIGKILL)


def strike(pid: int, number: int) -> bool:
    """Send it; False: it was gone."""
    return sessions.signal_process(pid, procfs.start_time(pid), number)


def named_segments(pids: Iterable[int]) -> set[str]:
    """Files in /dev/shm that these processes have mapped."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found |= set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text()))
    return found
