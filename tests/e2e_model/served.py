"""One `xserve launch` of a model, as a user would start it, for the length of a test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

XSERVE = [sys.executable, "-m", "launcher.cli"]
START_SECONDS = 90.0
STOP_SECONDS = 30.0


class Served:
    """Up and ready inside the ``with``; stopped by `xserve stop` after it, which must end in order (exit 0).

    `runtime` becomes its XDG_RUNTIME_DIR: a short path, as sockets lie below it.
    """

    def __init__(self, runtime: Path, model: Path, *flags: str) -> None:
        self._log = runtime / "launch.log"
        self._command = [*XSERVE, "launch", "--model", str(model), "--port", "0", "--name", "it", *flags]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("XSERVE_", "OMP_", "RUNTIME_DIRECTORY"))}
        # One thread a worker: on a busy machine several would wait at every barrier for one that has no core.
        ours = {"XDG_RUNTIME_DIR": str(runtime), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self._environment = {**inherited, **ours}
        self.url = ""
        self.model = model.name
        """Its name in the API."""

    def __enter__(self) -> Served:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            self._wait_ready()
        except BaseException:
            self._end()
            raise
        return self

    def _wait_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while True:
            assert self._process.poll() is None, f"exit code {self._process.returncode}\n{self.log}"
            assert time.monotonic() < end, f"not ready within {START_SECONDS} s\n{self.log}"
            status = self.status()
            if status.get("state") == "ready":
                self.url = status["url"]
                return
            time.sleep(0.05)  # between two questions

    def status(self) -> dict[str, Any]:
        """What `xserve status --json` prints; empty while there is nobody to answer."""
        asked = subprocess.run(
            [*XSERVE, "status", "--json", "--name", "it"], env=self._environment, capture_output=True, timeout=20
        )
        return msgspec.json.decode(asked.stdout) if asked.returncode == 0 else {}

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def __exit__(self, kind: type[BaseException] | None, _error: object, _where: TracebackType | None) -> None:
        code = self._end()
        if kind is None:
            assert code == 0, f"exit code {code}\n{self.log}"

    def _end(self) -> int:
        if self._process.poll() is None:
            stop = [*XSERVE, "stop", "--name", "it", "--timeout", "10"]
            subprocess.run(stop, env=self._environment, capture_output=True, timeout=STOP_SECONDS)
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(STOP_SECONDS)
