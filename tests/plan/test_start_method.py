"""Which start method, and why: by itself, forced, or refused in words."""

from __future__ import annotations

import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from launcher.config import LaunchConfig
from launcher.errors import UsageError
from launcher.host.process_state import needs_exec, unsafe_to_fork
from launcher.plan.choices import choose_start
from tests.plan.made_facts import machine

CUDA, RAY = "CUDA is initialised in this process", "this is a Ray actor"


def test_auto_is_the_forkserver() -> None:
    assert choose_start(LaunchConfig(), machine()).value == "forkserver"


def test_auto_is_forced_to_spawn_with_all_reasons() -> None:
    found = choose_start(LaunchConfig(), machine(unsafe_to_fork=(CUDA, RAY)))
    assert found == ("spawn", f"forced: {CUDA}; {RAY}")


def test_what_takes_an_exec_is_no_hindrance_to_the_forkserver() -> None:
    """Its helper is executed with the workers' variables."""
    assert choose_start(LaunchConfig(), machine(), ("LD_PRELOAD",)).value == "forkserver"
    assert choose_start(LaunchConfig(start_method="spawn"), machine(), ("LD_PRELOAD",)).value == "spawn"


@pytest.mark.parametrize(
    ("unsafe", "at_exec", "words"),
    [
        ((CUDA,), (), f"--start-method fork is not safe here: {CUDA}: use forkserver or spawn"),
        ((), ("LD_PRELOAD",), "LD_PRELOAD takes effect at an exec only"),
        ((CUDA, RAY), ("MALLOC_ARENA_MAX",), f"{CUDA}; {RAY}; MALLOC_ARENA_MAX takes effect"),
    ],
)
def test_fork_is_refused_with_all_reasons(unsafe: tuple[str, ...], at_exec: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_start(LaunchConfig(start_method="fork"), machine(unsafe_to_fork=unsafe), at_exec)
    assert words in str(caught.value)


# --- what makes a process unsafe to fork -----------------------------------------------------------------------------


def small_proc(root: Path, threads: list[str], release: str = "6.8.0-generic") -> Path:
    for number, name in enumerate(threads):
        task = root / f"proc/self/task/{number}"
        task.mkdir(parents=True)
        (task / "comm").write_text(name + "\n")
    (root / "proc/sys/kernel").mkdir(parents=True)
    (root / "proc/sys/kernel/osrelease").write_text(release + "\n")
    return root


def test_threads(tmp_path: Path) -> None:
    assert unsafe_to_fork(small_proc(tmp_path / "a", ["python"])) == []
    [reason] = unsafe_to_fork(small_proc(tmp_path / "b", ["python", "OpenBLAS-1"]))
    assert reason == "it runs 2 threads (python, OpenBLAS-1)"


def test_wsl(tmp_path: Path) -> None:
    [reason] = unsafe_to_fork(small_proc(tmp_path, ["python"], "5.15.0-microsoft-standard-WSL2"))
    assert reason.startswith("this is WSL")


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_an_initialised_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    module: Any = types.ModuleType("torch")
    setattr(module, kind, types.SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", module)
    assert unsafe_to_fork(small_proc(tmp_path, ["python"])) == [f"{kind.upper()} is initialised in this process"]


@pytest.mark.parametrize(("actor", "reasons"), [("a1b2", [RAY]), (None, [])])
def test_a_ray_actor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, actor: str | None, reasons: list[str]) -> None:
    module: Any = types.ModuleType("ray")
    module.is_initialized = lambda: True
    module.get_runtime_context = lambda: types.SimpleNamespace(get_actor_id=lambda: actor)
    monkeypatch.setitem(sys.modules, "ray", module)
    assert unsafe_to_fork(small_proc(tmp_path, ["python"])) == reasons


def test_a_real_thread_is_seen() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert any("threads (" in reason for reason in unsafe_to_fork())
    finally:
        stop.set()
        thread.join()


def test_what_needs_an_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/a.so")
    wanted = {"LD_PRELOAD": "/a.so", "MALLOC_ARENA_MAX": "1", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"}
    assert needs_exec(wanted) == ["MALLOC_ARENA_MAX"], "what this process has already is inherited"
    assert needs_exec({**wanted, "LD_PRELOAD": "/b.so"}) == ["LD_PRELOAD", "MALLOC_ARENA_MAX"]
