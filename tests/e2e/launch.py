"""A launch by the command line, as a user makes it, and the proof that it left nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.conftest import eventually

_ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(("XSERVE_", "OMP_", "NOTIFY_"))}


class Launch:
    """`xserve launch ARGUMENTS`, with a runtime directory of its own."""

    def __init__(
        self,
        runtime: Path,
        *arguments: str,
        env: dict[str, str | None] | None = None,
        fault: str = "",
        prefix: Sequence[str] = (),
    ) -> None:
        """`env`: None takes a variable away. `prefix`: a program that executes what follows it."""
        self.runtime = runtime
        wanted = (
            _ENVIRONMENT | {"XDG_RUNTIME_DIR": str(runtime), "XDG_STATE_HOME": str(runtime / "state")} | (env or {})
        )
        self.environment = {name: value for name, value in wanted.items() if value is not None}
        if fault:
            self.environment["XSERVE_FAULT"] = fault
        self.port = free_port()
        self.log = runtime / "log"
        self._out = self.log.open("wb")
        command = [*prefix, sys.executable, "-m", "launcher.cli", "launch", "--port", str(self.port), *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._out, env=self.environment
        )
        self._out.close()
        self.seen: dict[int, int] = {}
        """Every pid of the tree that was ever seen, with its start time."""

    # --- look

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def last_line(self) -> str:
        lines = self.output.strip().splitlines()
        return lines[-1] if lines else ""

    def status(self) -> dict[str, Any] | None:
        """`xserve status --json`; None while there is none."""
        done = subprocess.run(
            [sys.executable, "-m", "launcher.cli", "status", "--json"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            return None
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def tree(self) -> dict[int, str]:
        """pid → title of every process below the supervisor, remembered for `assert_nothing_left`."""
        found = {}
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):
                found[pid] = cmdline(pid)
                if start := start_time(pid):  # 0: a zombie already
                    self.seen.setdefault(pid, start)
        return found

    def pid_of(self, title: str) -> int:
        return next(pid for pid, name in self.tree().items() if name == f"xserve::{title}")

    def pids_of(self, prefix: str) -> list[int]:
        return [pid for pid, name in self.tree().items() if name.startswith(f"xserve::{prefix}")]

    # --- wait

    def wait_ready(self, timeout: float = 40) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output}"
            return self.get("/readyz")[0] == 200

        eventually(ready, timeout, f"ready; so far:\n{self.output}")
        self.tree()

    def wait_exit(self, timeout: float = 30) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s: {self.tree()}\n{self.output}") from None

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def complete(self, prompt: str = "hello", max_tokens: int = 5, timeout: float = 20) -> str:
        """The text of a completion."""
        body = json.dumps({"model": "reference", "prompt": prompt, "max_tokens": max_tokens}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text: str = json.load(answer)["choices"][0]["text"]
            return text

    # --- end

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self, timeout: float = 30) -> int:
        self.signal(signal.SIGTERM)
        return self.wait_exit(timeout)

    def assert_nothing_left(self, within: float = 2.0) -> None:
        """No process of the tree, nothing with its launch id, no file in the run directory."""

        def left() -> list[str]:
            alive = [f"{pid} {cmdline(pid)}" for pid, start in self.seen.items() if start_time(pid) == start]
            alive += [f"{pid} {cmdline(pid)}" for pid in processes_with(f"XDG_RUNTIME_DIR={self.runtime}")]
            return alive

        try:
            eventually(lambda: not left(), within, "processes gone")
        except AssertionError:
            raise AssertionError(f"left after {within} s: {left()}") from None
        directory = self.runtime / "xserve"
        files = [str(path) for path in directory.rglob("*")] if directory.exists() else []
        assert files == [], files

    def close(self) -> None:
        """For a test that failed: end all of it."""
        if self.process.poll() is None:
            self.tree()
            self.process.kill()
            self.process.wait()
        for pid in [*self.seen, *processes_with(f"XDG_RUNTIME_DIR={self.runtime}")]:
            if pid not in self.seen or start_time(pid) == self.seen[pid]:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def start_time(pid: int) -> int:
    """0 for a process that is gone or a zombie."""
    try:
        fields = _stat(pid)
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])


def cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def _all_pids() -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            yield int(entry)


def descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for each in _all_pids():
        with contextlib.suppress(OSError):
            parents.setdefault(int(_stat(each)[1]), []).append(each)
    found, todo = [], [pid]
    while todo:
        for child in parents.get(todo.pop(), []):
            found.append(child)
            todo.append(child)
    return found


def processes_with(text: str) -> list[int]:
    """Live processes whose environment (as of their exec) holds `text`, this one apart."""
    found = []
    for pid in _all_pids():
        with contextlib.suppress(OSError):
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            if re.search(re.escape(text.encode()) + rb"(\0|$)", environ) and pid != os.getpid() and start_time(pid):
                found.append(pid)
    return found


def sleep_until(moment: float) -> None:
    """Until a point of the monotonic clock: for tests that act at a random moment, not for waiting on something."""
    time.sleep(max(0.0, moment - time.monotonic()))
