"""A launch on the GPU seen from outside, and the card as nvidia-smi shows it: for gpu_check."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PORT = 8971
DEVICE = "cuda"
"""A rehearsal without cards changes it."""
START_SECONDS = 90.0


def environment() -> dict[str, str]:
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *given]), "HF_HUB_OFFLINE": "1"}


class Tree:
    """Up and ready once made; RuntimeError with the end of its log when it does not come up."""

    def __init__(
        self, runtime: Path, model: Path, *arguments: str, dtype: str = "float32", restart: str = "never"
    ) -> None:
        self.environment = environment() | {"XDG_RUNTIME_DIR": str(runtime)}
        log = runtime / "log"
        log.unlink(missing_ok=True)
        command = [sys.executable, "-m", "launcher.cli", "launch", "--model", str(model), "--device", DEVICE]
        command += ["--port", str(PORT), "--dtype", dtype, "--restart", restart, *arguments]
        begin = time.monotonic()
        with log.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=self.environment, cwd=ROOT)
        try:
            while not self._ready():
                if self.process.poll() is not None or time.monotonic() - begin > START_SECONDS:
                    raise RuntimeError(f"exit code {self.process.poll()}: {log.read_text()[-3000:]}")
                time.sleep(0.02)
        except BaseException:
            self.end()
            raise
        self.ready_seconds = round(time.monotonic() - begin, 2)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/readyz", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def pids(self) -> dict[str, int]:
        """Title → pid of everything in the tree."""
        command = [sys.executable, "-m", "launcher.cli", "status", "--json"]
        done = subprocess.run(command, env=self.environment, cwd=ROOT, capture_output=True, text=True, check=True)
        return {row["title"]: int(row["pid"]) for row in json.loads(done.stdout)["processes"]}

    def helper(self) -> int:
        """Pid of the warm helper; 0: there is none. `status` does not list it: it serves nothing."""
        for path in Path("/proc").glob("[0-9]*"):
            try:
                name, stat = (path / "comm").read_text().strip(), (path / "stat").read_text()
            except OSError:
                continue
            if name == "xs:forkserver" and int(stat.rpartition(")")[2].split()[1]) == self.process.pid:
                return int(path.name)
        return 0

    def text(self, prompt: str, tokens: int) -> str:
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{PORT}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text: str = json.load(answer)["choices"][0]["text"]
            return text

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def end(self) -> None:
        """However it stands."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()


def smi(query: str) -> list[str]:
    done = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True
    )
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def memory_used() -> int:
    """MiB in use on the first card."""
    return int(smi("--query-gpu=memory.used")[0])


def until_memory_is_back(baseline: int) -> float:
    """Seconds until the card's memory is back; -1 when it is not within 15 s."""
    begin = time.monotonic()
    while time.monotonic() - begin < 15:
        if memory_used() <= baseline + 8:
            return round(time.monotonic() - begin, 2)
        time.sleep(0.05)
    return -1.0
