"""Plans for people and programs: complete, and without a secret."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launcher.config import LaunchConfig, WorkerSettings
from launcher.host import NumaNode
from launcher.plan import LaunchPlan, make_plan
from launcher.plan.show import HIDDEN, environments, rows, to_json
from tests.plan.made_facts import GIB, gpu_machine, machine
from tests.plan.model_files import write_model


def plan(config: LaunchConfig, **options: Any) -> LaunchPlan:
    facts = options.pop("facts", machine())
    return make_plan(config, facts, run_dir=Path("/run/x"), launch_id="L1", name="default", **options)


def test_rows_in_the_order_of_the_tree() -> None:
    made = rows(plan(LaunchConfig(tp=2)))
    assert [(row.title, row.parent, row.method) for row in made] == [
        ("Forkserver", "Supervisor", "spawn"),
        ("APIServer_0", "Supervisor", "spawn"),
        ("EngineCore_DP0", "Supervisor", "forkserver"),
        ("Worker_DP0_PP0_TP0", "EngineCore_DP0", "fork"),
        ("Worker_DP0_PP0_TP1", "EngineCore_DP0", "fork"),
    ]
    assert [(row.rank, row.device, row.threads) for row in made[3:]] == [("0", "cpu", "8"), ("1", "cpu", "8")]
    assert made[1].listens == "http://127.0.0.1:8000"
    assert made[2].listens == "ipc:///run/x/core0.sock"


def test_rows_without_helper_and_workers() -> None:
    made = rows(plan(LaunchConfig(start_method="spawn"), api=False))
    assert [(row.title, row.method, row.device, row.threads) for row in made] == [
        ("EngineCore_DP0", "spawn", "cpu", "16")
    ]


def test_rows_name_the_gpu(tmp_path: Path) -> None:
    config = LaunchConfig(model=str(write_model(tmp_path)), tp=2)
    assert [row.device for row in rows(plan(config, facts=gpu_machine()))[-2:]] == ["cuda:0", "cuda:1"]


def test_json_holds_everything() -> None:
    shown = json.loads(json.dumps(to_json(plan(LaunchConfig(tp=2)))))
    assert shown["url"] == "http://127.0.0.1:8000"
    assert shown["start_method"] == "forkserver"
    api, core = shown["processes"]
    assert api["start_method"] == "spawn"
    assert core["settings"]["address"] == "ipc:///run/x/core0.sock"
    assert [child["title"] for child in core["children"]] == ["Worker_DP0_PP0_TP0", "Worker_DP0_PP0_TP1"]
    assert core["children"][1]["settings"]["ranks"]["rank"] == 1
    assert core["children"][1]["env"]["OMP_NUM_THREADS"] == "8"
    assert core["children"][1]["env"]["TOKENIZERS_PARALLELISM"] == "false"
    assert shown["helper"]["preload"]
    assert shown["decisions"][0]["origin"]


@pytest.mark.parametrize("tp", [1, 2])
def test_no_secret_gets_out(tp: int) -> None:
    secrets = {"hf_token": "s3cret-1", "DB_PASSWORD": "s3cret-2", "max_tokens": "77"}
    made = plan(LaunchConfig(tp=tp, api_key="s3cret-0", worker_config=secrets))
    text = json.dumps(to_json(made)) + repr(rows(made))
    assert "s3cret" not in text
    assert '"max_tokens": "77"' in text
    assert HIDDEN in text


def test_every_setting_has_an_origin() -> None:
    config = LaunchConfig(tp=2, api_key="s3cret", origins={"tp": "XSERVE_TP", "api_key": "--api-key"})
    made = {d.name: d for d in plan(config).settings}
    assert set(made) == {f"--{name.replace('_', '-')}" for name in LaunchConfig.__struct_fields__} - {"--origins"}
    assert (made["--tp"].value, made["--tp"].origin) == ("2", "XSERVE_TP")
    assert (made["--api-key"].value, made["--api-key"].origin) == (HIDDEN, "--api-key")
    assert (made["--port"].value, made["--port"].origin) == ("8000", "default")


def test_every_limit_has_an_origin() -> None:
    made = {d.name: d for d in plan(LaunchConfig(ready_timeout=7), facts=machine(cpu_quota=2.5)).limits}
    assert made["start without progress"].value == "7 s"
    assert made["CPUs"].value == "16, quota 2.5"
    assert all(limit.value and limit.origin for limit in made.values())


@pytest.mark.parametrize(
    ("ready", "watchdog", "seconds"), [(600, 30, 660), (7, 30, 660), (7, 1000, 1060), (7, 0, 86460)]
)
def test_no_timer_of_a_library_fires_before_ours(ready: float, watchdog: float, seconds: float) -> None:
    made = plan(LaunchConfig(ready_timeout=ready, watchdog_timeout=watchdog, tp=2), facts=machine())
    assert {d.name: d for d in made.limits}["a collective"].value == f"{seconds:g} s"
    core = next(spec for spec in made.processes if spec.role == "engine_core")
    told = [msgspec.msgpack.decode(child.payload, type=WorkerSettings) for child in core.children]
    assert [each.group_timeout for each in told] == [seconds] * 2


def test_what_is_bound_and_why_it_starts_so() -> None:
    node = NumaNode(id=1, cpus=(4, 5), memory=GIB)
    facts = machine(cpu_ids=(4, 5), cpus=2, numa_nodes=(node,))
    made = plan(LaunchConfig(tp=2, numa_bind=True), facts=facts)
    assert [(row.node, row.cpus) for row in rows(made)[3:]] == [("1", "4-5")] * 2
    shown = to_json(made)
    worker = shown["processes"][1]["children"][0]
    assert (worker["cpus"], worker["memory_nodes"]) == ((4, 5), (1,))
    assert worker["start_method_why"] == "its engine core forks before it has a thread"
    assert "imports are done once" in shown["processes"][1]["start_method_why"]


def test_memory_of_a_worker_that_has_a_model(tmp_path: Path) -> None:
    config = LaunchConfig(model=str(write_model(tmp_path)), tp=2, device="cpu")
    assert [bool(row.memory) for row in rows(plan(config))] == [False, False, False, True, True]


def test_environments_are_grouped_and_hide_secrets() -> None:
    shown = environments(plan(LaunchConfig(tp=2, env={"MY_TOKEN": "s3cret", "NCCL_DEBUG": "INFO"})))
    [titles] = [titles for titles, env in shown if "NCCL_DEBUG" in env]
    assert titles == "Forkserver, EngineCore_DP0, Worker_DP0_PP0_TP0, Worker_DP0_PP0_TP1"
    assert "s3cret" not in repr(shown)
    assert "s3cret" not in json.dumps(to_json(plan(LaunchConfig(tp=2, env={"MY_TOKEN": "s3cret"}))))
