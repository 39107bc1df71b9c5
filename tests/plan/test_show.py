"""Plans for people and programs: complete, and without a secret."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.config import LaunchConfig
from launcher.plan import LaunchPlan, make_plan
from launcher.plan.show import HIDDEN, rows, to_json
from tests.plan.made_facts import gpu_machine, machine
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
