"""`xserve launch` on a host of a `Testnet`, and what is asked of it from there."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from _testnet import Testnet

from launcher.worker.reference import expected_tokens
from tests.conftest import eventually
from tests.e2e.launch import Launch, cmdline, descendants, start_time

_ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(("XSERVE_", "OMP_", "NOTIFY_"))}
SILENCE = 10.0
"""Seconds without a heartbeat after which a node counts as lost."""
NOTICED = 15.0
"""Seconds within which the others have ended."""
PORT = 29501


class Host(Launch):
    """A launch on one node; its port of HTTP is the same everywhere, as nobody else is there."""

    def __init__(
        self,
        net: Testnet,
        node: int,
        runtime: Path,
        *arguments: str,
        env: dict[str, str] | None = None,
        fault: str = "",
    ) -> None:
        self.net, self.node, self.runtime, self.port = net, node, runtime, 8000
        self.environment = _ENVIRONMENT | {
            "XDG_RUNTIME_DIR": str(runtime),
            "XDG_STATE_HOME": str(runtime / "state"),
            **(env or {}),
            **({"XSERVE_FAULT": fault} if fault else {}),
        }
        self.log = runtime / "log"
        xserve = Path(sys.executable).with_name("xserve")
        self.began = time.monotonic()
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                net.command(node, str(xserve), "launch", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self.environment,
            )
        self.seen: dict[int, int] = {}

    # --- ask

    def get(self, path: str) -> tuple[int, str]:
        with self.net.inside(self.node):
            return super().get(path)

    def complete(self, prompt: str = "hello", max_tokens: int = 5, timeout: float = 20) -> str:
        with self.net.inside(self.node):
            return super().complete(prompt, max_tokens, timeout)

    def is_right(self, prompt: str = "hello", max_tokens: int = 5) -> bool:
        return self.complete(prompt, max_tokens) == expected(prompt, max_tokens)

    @property
    def state(self) -> str:
        found = self.status()
        return str(found["state"]) if found else ""

    @property
    def titles(self) -> set[str]:
        return {name.removeprefix("xserve::") for name in self.tree().values() if name.startswith("xserve::")}

    # --- wait

    def wait_line(self, pattern: str, timeout: float = 20, since: int = 0) -> str:
        """The first line of its output, from that character on, in which the pattern is found."""

        def line() -> str:
            found = next((one for one in self.output[since:].splitlines() if re.search(pattern, one)), "")
            if not found and self.process.poll() is not None and not re.search(pattern, self.output[since:]):
                raise AssertionError(f"ended with {self.process.returncode}, without {pattern!r}:\n{self.output}")
            return found

        try:
            return str(eventually(line, timeout))
        except AssertionError as error:
            raise AssertionError(f"{error}; no line with {pattern!r}:\n{self.output}") from None

    def wait_node(self, timeout: float = 40) -> None:
        """Until this node's own part is ready, as its operator would see it."""
        if self.node == 0:
            self.wait_ready(timeout)
            return

        def ready() -> bool:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output}"
            return self.state == "ready"

        eventually(ready, timeout, f"node {self.node} ready; so far:\n{self.output}")
        self.tree()

    # --- what may befall it

    def everybody(self) -> list[int]:
        """Its pids, the supervisor first, which is `self.process` itself."""
        self.tree()
        return [self.process.pid, *descendants(self.process.pid)]

    def strike(self, number: signal.Signals) -> None:
        """All of it, the supervisor first: nobody is left to clean up."""
        for pid in self.everybody():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        for pid in [self.process.pid, *self.seen]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)
        super().close()


class Stream:
    """A completion as a stream, read on a thread from its first token on."""

    def __init__(self, host: Host, prompt: str, max_tokens: int, timeout: float = 90) -> None:
        self._prompt, self._tokens = prompt, max_tokens
        self._text = ""
        self._error = ""
        self._begun = threading.Event()
        body = {"model": "reference", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        self._line = http.client.HTTPConnection("127.0.0.1", host.port, timeout=timeout)
        with host.net.inside(host.node):
            self._line.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._begun.wait(20), "no token within 20 s"

    def _read(self) -> None:
        try:
            for line in self._line.getresponse():
                if line.startswith(b"data: {"):
                    said = json.loads(line.removeprefix(b"data: "))
                    if "choices" not in said:
                        raise ValueError(said)
                    self._text += said["choices"][0]["text"]
                    self._begun.set()
        except (OSError, ValueError, http.client.HTTPException) as error:
            self._error = repr(error)
        finally:
            self._begun.set()

    def assert_whole(self, timeout: float = 60) -> None:
        self.close(timeout)
        assert not self._error, self._error
        assert self._text == expected(self._prompt, self._tokens)

    def close(self, timeout: float = 5) -> None:
        self._thread.join(timeout)
        hanging = self._thread.is_alive()
        if hanging and self._line.sock is not None:
            self._line.sock.shutdown(2)
        self._line.close()
        assert not hanging, f"the stream is still open, after {len(self._text.split())} tokens"


def expected(prompt: str, count: int) -> str:
    return "".join(f"{token} " for token in expected_tokens(list(prompt.encode()), count))


def exit_codes(hosts: Iterable[Host], timeout: float = 30) -> list[int]:
    return [host.wait_exit(timeout) for host in hosts]


def listeners(net: Testnet, node: int) -> list[tuple[str, int]]:
    """(address, port) of every TCP socket that listens in that node."""
    with net.inside(node):
        shown = subprocess.run(["ss", "-ltnH"], capture_output=True, text=True, check=True).stdout
    found = [line.split()[3].rpartition(":") for line in shown.splitlines()]
    return [(address.strip("[]").removeprefix("::ffff:"), int(port)) for address, _, port in found]


def keygen(path: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli", "keygen", str(path)], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0, done.stderr
    assert path.stat().st_mode & 0o777 == 0o600
    return path


def command_lines(pids: Sequence[int]) -> list[str]:
    return [cmdline(pid) for pid in pids if start_time(pid)]


def last_lines(host: Host, count: int = 3) -> str:
    return "\n".join(host.output.strip().splitlines()[-count:])


def json_of(host: Host) -> dict[str, Any]:
    found = host.status()
    assert found is not None, host.output
    return found
