"""How a start goes: bound to its node, its threads counted, slow ones described, hard ends explained."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.host.files import parse_list
from tests.conftest import eventually
from tests.e2e.launch import Launch
from tests.process.test_numa import DENY, SET_MEMPOLICY

Start = Callable[..., Launch]
METHODS = ["forkserver", "spawn", "fork"]


def allowed(pid: int, what: str) -> tuple[int, ...]:
    line = re.findall(rf"^{what}_allowed_list:\t(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[0]
    return parse_list(line) or ()


@pytest.mark.parametrize("method", METHODS)
def test_workers_stay_inside_the_mask_given_from_outside(launch: Start, method: str) -> None:
    cpu = str(max(os.sched_getaffinity(0)))
    launched = launch("--tp", "2", "--numa-bind", "--start-method", method, prefix=("taskset", "-c", cpu))
    launched.wait_ready()
    for pid in launched.pids_of("Worker_"):
        assert allowed(pid, "Cpus") == (int(cpu),)
    assert launched.stop() == 0
    assert "not bound" not in launched.output


@pytest.mark.parametrize("method", METHODS)
def test_memory_policy_is_in_force(launch: Start, method: str) -> None:
    launched = launch("--tp", "2", "--numa-bind-nodes", "0", "--start-method", method)
    launched.wait_ready()
    for title, policy in (("Worker_DP0_PP0_TP1", "bind:0"), ("EngineCore_DP0", "default")):
        maps = Path(f"/proc/{launched.pid_of(title)}/numa_maps")
        if not maps.exists():
            pytest.skip("this kernel shows no memory policies")
        assert policy in {line.split()[1] for line in maps.read_text().splitlines()}
    assert launched.stop() == 0


def test_forbidden_by_seccomp_is_one_warning(launch: Start) -> None:
    program = DENY + f"\nforbid({SET_MEMPOLICY})\nos.execv(sys.argv[1], sys.argv[1:])"
    launched = launch("--tp", "2", "--numa-bind", prefix=(sys.executable, "-c", program))
    launched.wait_ready()
    assert len(allowed(launched.pids_of("Worker_")[0], "Cpus")) >= 1
    assert launched.stop() == 0
    lines = [line for line in launched.output.splitlines() if "NUMA" in line]
    assert len(lines) == 1, launched.output
    assert "memory may not be bound here (seccomp, as by default in containers): CPUs only" in lines[0]


@pytest.mark.parametrize("method", METHODS)
def test_threads_are_shared_out(launch: Start, method: str) -> None:
    """What a worker's torch really has, and where the number came from."""
    launched = launch("--tp", "2", "--start-method", method, env={"OMP_NUM_THREADS": "3"})
    launched.wait_ready()
    environ = Path(f"/proc/{launched.pid_of('EngineCore_DP0')}/environ")
    assert environ.exists()
    assert launched.stop() == 0
    assert "OMP threads 3 per worker: OMP_NUM_THREADS is set" in launched.output


def test_every_ten_seconds_where_each_rank_is(launch: Start) -> None:
    launched = launch("--tp", "4", fault="init_hang:2")
    eventually(lambda: "still starting after 10 s" in launched.output, 30, "the line of a slow start")
    [line] = [line for line in launched.output.splitlines() if "still starting after 10 s" in line]
    assert re.search(r"rank 2 device cpu for \d+ s, silent for \d+ s", line), line
    assert line.endswith("; ranks 0,1,3 ready")
    launched.signal(signal.SIGTERM)
    assert launched.wait_exit() == 143


def test_an_import_error_of_a_worker_module_is_the_cause(launch: Start, runtime: Path) -> None:
    """Imported in the helper, before anything is forked."""
    (runtime / "broken_worker.py").write_text("raise RuntimeError('no such kernel')\n")
    env = {"PYTHONPATH": f"{runtime}:{os.getcwd()}"}
    launched = launch("--tp", "2", "--worker", "broken_worker:X", env=env)
    assert launched.wait_exit() == 1
    assert "RuntimeError: no such kernel" in launched.last_line
    assert launched.output.count("Traceback (most recent call last)") == 1


def test_a_module_that_leaves_a_thread_is_spawned_with_the_reason(launch: Start, runtime: Path) -> None:
    (runtime / "threaded_worker.py").write_text(
        "import threading, time\n"
        "from launcher.worker.reference import ReferenceWorker\n"
        "threading.Thread(target=time.sleep, args=(1000,), daemon=True, name='t').start()\n"
        "class W(ReferenceWorker): pass\n"
    )
    launched = launch("--tp", "2", "--worker", "threaded_worker:W", env={"PYTHONPATH": f"{runtime}:{os.getcwd()}"})
    launched.wait_ready()
    assert launched.stop() == 0
    assert "spawn instead of forkserver: after the preload it runs 2 threads (" in launched.output


@pytest.mark.parametrize(("method", "limit"), [("forkserver", 6.0), ("spawn", 9.0)])
def test_a_slow_import_is_paid_once_or_all_at_the_same_time(
    launch: Start, runtime: Path, method: str, limit: float
) -> None:
    (runtime / "slow_worker.py").write_text(
        "import time\ntime.sleep(4)\nfrom launcher.worker.reference import ReferenceWorker\n"
        "class W(ReferenceWorker): pass\n"
    )
    began = time.monotonic()
    env = {"PYTHONPATH": f"{runtime}:{os.getcwd()}"}
    launched = launch("--tp", "8", "--worker", "slow_worker:W", "--start-method", method, env=env)
    launched.wait_ready()
    took = time.monotonic() - began
    assert launched.stop() == 0
    # One after another it would be 32 s; the limits are those of a machine with two busy cores.
    assert took < limit + 5, f"{took:.1f} s"


def test_a_taken_port_is_told_before_anything_is_started(launch: Start) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        began = time.monotonic()
        launched = launch("--tp", "2", "--port", str(sock.getsockname()[1]))
        assert launched.wait_exit() == 2
    assert time.monotonic() - began < 10
    assert f"is taken on 127.0.0.1 by pid {os.getpid()}" in launched.last_line
    assert "Worker" not in launched.output


def test_exactly_one_traceback_of_eight_ranks(launch: Start) -> None:
    launched = launch("--tp", "8", fault="init_raise:*")
    assert launched.wait_exit() == 1
    assert launched.output.count("Traceback (most recent call last)") == 1, launched.output
    assert "InjectedError: injected fault init_raise on rank" in launched.last_line


def test_terminated_while_it_loads(launch: Start) -> None:
    launched = launch("--tp", "2", fault="init_sleep:1:60")
    eventually(lambda: len(launched.pids_of("Worker")) == 2 and "device" in launched.output, 30, "workers")
    began = time.monotonic()
    [_, pid] = sorted(launched.pids_of("Worker"))
    eventually(lambda: f"(pid {pid}): device" in launched.output, 10, "in init")
    os.kill(pid, signal.SIGTERM)
    assert launched.wait_exit() == 1
    assert time.monotonic() - began < 5
    assert "SIGTERM" in launched.output


SCRIPT = """
import sys
import torch
from launcher import Engine

torch.set_num_threads(4)
x = torch.rand(512, 512)
torch.einsum("ij,jk->ik", x, x)  # starts OpenMP's threads, which a fork would lose
if __name__ == "__main__":
    with Engine(tp=2, start_method=sys.argv[1]) as engine:
        print("answered", len(engine.generate(["hi"], max_tokens=3)[0].token_ids))
"""


def run_script(tmp_path: Path, method: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(SCRIPT)
    env = os.environ | {"PYTHONPATH": os.getcwd()}
    command = [sys.executable, str(tmp_path / "script.py"), method]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=90, env=env)


def test_live_openmp_threads_mean_spawn_by_itself(tmp_path: Path) -> None:
    done = run_script(tmp_path, "auto")
    assert "answered 3" in done.stdout, done.stderr
    assert re.search(r"using spawn: it runs \d+ threads \(", done.stderr)


def test_live_openmp_threads_and_fork_is_refused(tmp_path: Path) -> None:
    done = run_script(tmp_path, "fork")
    assert done.returncode != 0
    assert "start method fork is not safe in this process: it runs" in done.stderr


@pytest.mark.gpu
def test_cuda_in_the_parent_means_spawn_by_itself(tmp_path: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    (tmp_path / "script.py").write_text(SCRIPT.replace("torch.set_num_threads(4)", "torch.cuda.init()"))
    command = [sys.executable, str(tmp_path / "script.py"), "auto"]
    env = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110, env=env)
    assert "answered 3" in done.stdout, done.stderr
    assert "CUDA is initialised in this process" in done.stderr
