"""Starts that succeed under each method, and starts that fail: who is blamed, and that nothing is left."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from launcher.config import EngineSettings
from launcher.errors import ChildFailedError
from launcher.process.nursery import Nursery
from launcher.process.spec import ChildMethod, ProcessSpec
from tests.executor.rig import mp, settings_of, specs_of


def _core(scenario: str, method: ChildMethod, settings: EngineSettings) -> ProcessSpec:
    return ProcessSpec(
        title="EngineCore_DP0",
        role="engine_core",
        target=f"tests.executor.cores:{scenario}",
        payload=msgspec.msgpack.encode(settings),
        children=specs_of(settings),
        child_method=method,
    )


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_core_with_its_workers(method: ChildMethod) -> None:
    nursery = Nursery("spawn")
    try:
        (core,) = nursery.start_all([_core("tokens", method, settings_of(3))])
        nursery.wait_ready(30)
        info: dict[str, Any] = core.ready_info or {}
        assert info["right"]
        assert info["who"] == [[rank, pid] for rank, pid in enumerate(info["pids"])]
        assert info["titles"] == [[f"xserve::Worker_DP0_PP0_TP{rank}", f"xs:w0.d0p0t{rank}"] for rank in range(3)]
        assert nursery.stop(10) == []
    finally:
        nursery.close()


START_FAULTS = [
    ("init_raise:1", "rank 1 .*step device: InjectedError: injected fault init_raise on rank 1", "init_device"),
    ("init_segv:1", r"rank 1 .*died of signal 11 \(SIGSEGV\)", ""),
    ("init_hang:1", r"rank 1 .*not ready: no progress for .*step 'device' \(--ready-timeout 2\)", ""),
    ("import_sleep:1:60", r"rank 1 .*step 'import' \(--ready-timeout 2\)", ""),
    ("bogus:1", r"XSERVE_FAULT='bogus:1': there is no kind 'bogus'", ""),
]


@pytest.mark.parametrize(("fault", "message", "trace"), START_FAULTS)
def test_a_failing_start(fault: str, message: str, trace: str) -> None:
    settings = settings_of(2, "launcher.worker.reference:ReferenceWorker")
    settings = msgspec.structs.replace(settings, ready_timeout=2 if "hang" in fault or "sleep" in fault else 30)
    with mp(settings, start=False, env={"XSERVE_FAULT": fault}) as executor:
        with pytest.raises(ChildFailedError, match=message) as error:
            executor.start()
        executor.shutdown(1)
    assert trace in error.value.cause.traceback
    assert error.value.cause.permanent is ("bogus" in fault)


def test_progress_keeps_a_slow_start_alive() -> None:
    settings = msgspec.structs.replace(settings_of(1, "launcher.worker.reference:ReferenceWorker"), ready_timeout=2)
    with mp(settings, env={"XSERVE_FAULT": "init_progress:0:3.5"}) as executor:
        executor.check_health()


def test_a_class_that_is_no_worker() -> None:
    with mp(settings_of(2, "tests.executor.workers:Extension"), start=False) as executor:
        with pytest.raises(
            ChildFailedError, match=r"Extension' has no init_device, load_model, .*derive it from"
        ) as error:
            executor.start()
        assert error.value.cause.permanent
        assert error.value.cause.step == "import"


def test_a_usage_error_of_a_worker_is_permanent() -> None:
    with mp(settings_of(1, "tests.executor.workers:Refusing"), start=False) as executor:
        with pytest.raises(ChildFailedError, match="model 'x' is not here; give a directory") as error:
            executor.start()
        assert error.value.exit_code == 2
