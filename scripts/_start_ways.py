"""Each way to start eight workers that import torch, timed from the exec of its first process to ready."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import _peers
import psutil

from launcher import envs

ROOT = Path(__file__).resolve().parents[1]
PEER = str(Path(__file__).with_name("_start_peer.py"))
LIMIT = 300.0
"""Seconds after which a start is given up."""
_WORKER = """import torch
from launcher.worker.reference import ReferenceWorker
class TorchWorker(ReferenceWorker):
    '''Has torch, as every real worker has.'''
"""


class Start(NamedTuple):
    """One start."""

    seconds: float
    """From the exec to ready."""
    pss: float = 0.0
    """MiB of a worker, shared pages counted by their share; mean over the workers."""
    restart: float = 0.0
    """Seconds from the death of a worker until its group is ready again; 0: not tried."""


class NotReady(Exception):
    """One line."""


def exec_to_exit(program: str) -> Start:
    """A fresh interpreter with a one-line program."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", program], check=True, env=_environment())
    return Start(time.monotonic() - began)


def ours(method: str, count: int) -> Start:
    """`xserve launch`, to ``/readyz`` 200; then, where workers come from the helper, kill one."""
    with tempfile.TemporaryDirectory(prefix="xs") as place:
        (Path(place) / "torch_worker.py").write_text(_WORKER)
        env = {"XDG_RUNTIME_DIR": place, "PYTHONPATH": _path(place)}
        arguments = [
            "--worker",
            "torch_worker:TorchWorker",
            "--device",
            "cpu",
            "--tp",
            str(count),
            "--start-method",
            method,
        ]
        with _launch(arguments, env) as (process, port, began):
            _wait_ready(process, port)
            seconds = time.monotonic() - began
            workers = [p for p in psutil.Process(process.pid).children(recursive=True) if _is_worker(p)]
            pss = _mean_pss([worker.pid for worker in workers])
            restart = _restart(process, port, workers) if method == "forkserver" else 0.0
            return Start(seconds, pss, restart)


def _restart(process: subprocess.Popen[bytes], port: int, old: list[psutil.Process]) -> float:
    before = {worker.pid for worker in old}
    began = time.monotonic()
    old[0].kill()
    while time.monotonic() - began < LIMIT:
        now = {p.pid for p in psutil.Process(process.pid).children(recursive=True) if _is_worker(p)}
        if len(now) == len(before) and not now & before and _get(port) == 200:
            return time.monotonic() - began
        time.sleep(0.005)
    raise NotReady("the group did not come back")


@contextlib.contextmanager
def _launch(arguments: list[str], env: dict[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], int, float]]:
    port = free_port()
    command = [sys.executable, "-m", "launcher.cli", "launch", "--port", str(port), *arguments]
    began = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=_environment() | env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield process, port, began
        except NotReady as error:
            log.seek(0)
            raise NotReady(f"{error}: {log.read().decode(errors='replace').strip().splitlines()[-1:]}") from None
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def plain(way: str, count: int) -> Start:
    """multiprocessing's spawn: ``spawn`` or ``serial``."""
    port = free_port()
    began = time.monotonic()
    command = [sys.executable, PEER, way, str(port), str(count)]
    process = subprocess.Popen(command, env=_environment(), stdin=subprocess.PIPE)
    try:
        _wait_ready(process, port)
        seconds = time.monotonic() - began
        workers = [p.pid for p in psutil.Process(process.pid).children() if "spawn_main" in " ".join(p.cmdline())]
        return Start(seconds, _mean_pss(workers))
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


def torchrun(count: int) -> Start:
    """torchrun, until each of its workers has torch."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        server.settimeout(LIMIT)
        began = time.monotonic()
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "--standalone"]
        command += [PEER, "torchrun", str(server.getsockname()[1]), str(count)]
        process = subprocess.Popen(command, env=_environment(), stderr=subprocess.DEVNULL)
        try:
            lines = [stack.enter_context(server.accept()[0]) for _ in range(count)]
            pids = [int(line.makefile().readline()) for line in lines]
            return Start(time.monotonic() - began, _mean_pss(pids))
        finally:
            stack.close()  # they end with their lines
            process.wait(60)


# --- end to end: a model's first answer ---


def our_first_answer(model: str, tp: int) -> Start:
    with tempfile.TemporaryDirectory(prefix="xs") as place:
        arguments = ["--model", model, "--tp", str(tp), "--dtype", "bfloat16", "--max-model-len", "512"]
        arguments += ["--served-model-name", "m", "--kv-cache-memory", "256MiB"]
        with _launch(arguments, {"XDG_RUNTIME_DIR": place, "OMP_NUM_THREADS": "1"}) as (process, port, began):
            _wait_ready(process, port)
            _ask(port, "m")
            return Start(time.monotonic() - began)


def vllm_first_answer(model: str, tp: int) -> Start:
    """`vllm serve`, from its own environment. Raises `_peers.NoPeer`."""
    python = _peers.peer_python("executor")
    port = free_port()
    command = [str(Path(python).with_name("vllm")), "serve", model, "--tensor-parallel-size", str(tp)]
    command += ["--max-model-len", "512", "--enforce-eager", "--dtype", "bfloat16", "--port", str(port)]
    command += ["--served-model-name", "m"]
    env = {name: value for name, value in _peers.environment().items() if name != "PYTHONPATH"}
    env["PATH"] = f"{Path(python).parent}:{os.defpath}"
    with tempfile.TemporaryFile() as log:
        began = time.monotonic()
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _wait_ready(process, port, "/health")
            _ask(port, "m")
            return Start(time.monotonic() - began)
        except NotReady as error:
            log.seek(0)
            raise _peers.NoPeer(f"vllm: {error}: {log.read().decode(errors='replace').splitlines()[-3:]}") from error
        finally:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            for one in family:  # each by itself: its workers may outlive it
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait()


def _ask(port: int, model: str) -> None:
    body = json.dumps({"model": model, "prompt": "The capital of France is", "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=LIMIT) as answer:
        answer.read()


# --- parts -----------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _path(place: str) -> str:
    given = envs.child_environment().get("PYTHONPATH", "")
    return ":".join(part for part in (place, str(ROOT), given) if part)


def _environment() -> dict[str, str]:
    env = envs.child_environment()
    return {name: value for name, value in env.items() if not name.startswith(("XSERVE_", "OMP_"))}


def _wait_ready(process: subprocess.Popen[bytes], port: int, path: str = "/readyz") -> None:
    end = time.monotonic() + LIMIT
    while _get(port, path) != 200:
        if process.poll() is not None:
            raise NotReady(f"ended with {process.returncode} before it was ready")
        if time.monotonic() > end:
            raise NotReady(f"not ready after {LIMIT:g} s")
        time.sleep(0.005)


def _get(port: int, path: str = "/readyz") -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "xserve::Worker_" in " ".join(process.cmdline()[:1])
    except psutil.Error:
        return False


def _mean_pss(pids: list[int]) -> float:
    """MiB; every pid is alive while it is asked, so that the shares are those of the whole group."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total / 1024 / max(1, len(pids))


WAYS: dict[str, Callable[[int], Start]] = {
    "import torch": lambda _: exec_to_exit("import torch"),
    "interpreter": lambda _: exec_to_exit("pass"),
    "xserve forkserver": lambda count: ours("forkserver", count),
    "xserve spawn": lambda count: ours("spawn", count),
    "xserve fork": lambda count: ours("fork", count),
    "multiprocessing spawn": lambda count: plain("spawn", count),
    "torchrun": torchrun,
}
SLOW: dict[str, Callable[[int], Start]] = {"spawn, each waited for": lambda count: plain("serial", count)}


def as_data(starts: list[Start]) -> list[dict[str, Any]]:
    return [start._asdict() for start in starts]
