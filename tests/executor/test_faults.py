"""Faults of the reference worker as its executor sees them: in steps, at the end, over a restart, in the core."""

from __future__ import annotations

import os
import signal
import time
from itertools import count
from pathlib import Path

import msgspec
import psutil
import pytest

from launcher import host
from launcher.clock import Deadline
from launcher.config import REFERENCE_WORKER, EngineSettings
from launcher.errors import ChildFailedError, DeadlineError, HostError, RemoteError
from launcher.executor.base import Executor, StepPlan
from launcher.host import Headroom
from launcher.process.nursery import Nursery
from launcher.process.spec import ProcessSpec
from launcher.worker.injury import InjectedError
from tests.conftest import eventually
from tests.executor.rig import mp, settings_of, specs_of, uni


def fault(text: str) -> dict[str, str]:
    return {"XSERVE_FAULT": text}


def reference(world: int, **config: str) -> EngineSettings:
    return settings_of(world, REFERENCE_WORKER, worker_config=config)


def run_steps(executor: Executor, first: int) -> None:
    """What befalls a silent rank may show some steps late."""
    deadline = Deadline.after(10)
    for step in count(first):
        executor.execute_model(StepPlan(step))
        assert not deadline.expired


def test_a_raise_in_a_step_of_a_silent_rank() -> None:
    with mp(reference(2), env=fault("step_raise:1@3")) as executor:
        executor.execute_model(StepPlan(1))
        executor.execute_model(StepPlan(2))
        with pytest.raises(RemoteError, match="rank 1 raised InjectedError: injected fault step_raise") as error:
            run_steps(executor, 3)
        assert "in execute_model" in error.value.remote_traceback


def test_a_segfault_in_a_step() -> None:
    with (
        mp(reference(2), env=fault("step_segv:1")) as executor,
        pytest.raises(ChildFailedError, match=r"rank 1 .*died of signal 11 \(SIGSEGV\)"),
    ):
        run_steps(executor, 1)


def test_a_hang_is_named_when_somebody_limits_the_wait() -> None:
    with mp(reference(2), env=fault("step_hang:0@2")) as executor:
        executor.execute_model(StepPlan(1))
        future = executor.execute_model(StepPlan(2), non_block=True)
        with pytest.raises(DeadlineError, match=r"execute_model: .* from rank 0 \(Worker_DP0_PP0_TP0, pid \d+\)"):
            future.result(0.3)
        assert executor.shutdown(0.5) == ["Worker_DP0_PP0_TP0"]


def test_slow_cleanup_is_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    with mp(reference(2), env=fault("slow_cleanup:1:0.7")) as executor:
        begin = time.monotonic()
        assert executor.shutdown(10) == []
        assert time.monotonic() - begin >= 0.7
    assert capfd.readouterr().out.count("cleanup done") == 1


def test_a_child_of_a_worker_is_started() -> None:
    with mp(reference(1), env=fault("spawn_child:0")) as executor:
        left = eventually(
            lambda: psutil.Process(executor.children[0].pid).children(recursive=True)[1:], 5, "grandchild"
        )
        for stray in psutil.Process(executor.children[0].pid).children(recursive=True):
            stray.kill()
        assert left


@pytest.mark.parametrize("with_marks", [False, True])
def test_once_over_a_restart(with_marks: bool, tmp_path: Path) -> None:
    settings = reference(1, **({"fault_dir": str(tmp_path)} if with_marks else {}))
    with mp(settings, env=fault("step_raise:0,once")) as executor, pytest.raises(RemoteError):
        executor.execute_model(StepPlan(1))
    with mp(msgspec.structs.replace(settings, generation=1), env=fault("step_raise:0,once")) as executor:
        executor.execute_model(StepPlan(1))


def test_faults_of_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XSERVE_FAULT", "step_raise:core@2")
    with uni(reference(1)) as executor:
        executor.execute_model(StepPlan(1))
        with pytest.raises(InjectedError, match="rank core"):
            executor.execute_model(StepPlan(2))
    with uni(settings_of(1)) as executor:  # not the reference worker itself: no faults of the core
        executor.execute_model(StepPlan(1))
        executor.execute_model(StepPlan(2))


@pytest.mark.parametrize("left", [Headroom(64 << 30, "control group /x"), Headroom(1 << 30, "MemAvailable")])
def test_oom_wants_a_limit_of_its_own(left: Headroom, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "memory_headroom_of", lambda: left)
    monkeypatch.setenv("XSERVE_FAULT", "oom:core")
    message = rf"{left.bytes >> 20} MiB are free \({left.origin}\).*MemoryMax=1G"
    with uni(reference(1)) as executor, pytest.raises(HostError, match=message):
        executor.execute_model(StepPlan(1))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_die_with_their_core(method: str) -> None:
    """kill -9 of the core: its workers are gone within two seconds, busy or idle."""
    settings = settings_of(3)
    spec = ProcessSpec(
        title="EngineCore_DP0",
        role="engine_core",
        target="tests.executor.cores:hangs",
        payload=msgspec.msgpack.encode(settings),
        children=specs_of(settings),
        child_method=method,  # type: ignore[arg-type]
    )
    nursery = Nursery("spawn")
    try:
        (core,) = nursery.start_all([spec])
        nursery.wait_ready(30)
        pids = (core.ready_info or {})["pids"]
        assert all(psutil.pid_exists(pid) for pid in pids)
        os.kill(core.pid, signal.SIGKILL)
        eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids), 2, "workers gone")
    finally:
        nursery.close()
