"""Whole plans: the process table, what each process is told, and refusals before anything is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launcher.config import REFERENCE_WORKER, ApiSettings, EngineSettings, LaunchConfig, WorkerSettings
from launcher.errors import HostError, InternalError, UsageError
from launcher.host import HostFacts
from launcher.plan import LaunchPlan, make_plan, preload, settings_of
from launcher.process.spec import ProcessSpec
from tests.plan.made_facts import gpu_machine, machine
from tests.plan.model_files import write_model

FACTS = machine()


def plan(config: LaunchConfig, facts: HostFacts = FACTS, **options: Any) -> LaunchPlan:
    return make_plan(config, facts, run_dir=Path("/run/x"), launch_id="L1", name="default", **options)


def parts(made: LaunchPlan) -> tuple[ApiSettings, EngineSettings, list[WorkerSettings]]:
    api, core = made.processes
    return (
        msgspec.msgpack.decode(api.payload, type=ApiSettings),
        msgspec.msgpack.decode(core.payload, type=EngineSettings),
        [msgspec.msgpack.decode(child.payload, type=WorkerSettings) for child in core.children],
    )


# --- the process table ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [2, 3, 4, 8, 128])
def test_a_launch_of_n_is_n_plus_2_processes(tp: int) -> None:
    made = plan(LaunchConfig(tp=tp))
    api, core = made.processes
    assert (api.title, api.role, api.target) == ("APIServer_0", "api_server", "launcher.api.server:run")
    assert (core.title, core.role, core.target) == ("EngineCore_DP0", "engine_core", "launcher.engine.core_process:run")
    assert [child.title for child in core.children] == [f"Worker_DP0_PP0_TP{rank}" for rank in range(tp)]
    assert [child.rank for child in core.children] == list(range(tp))
    assert {child.early_title for child in core.children} == {"Worker"}
    assert {child.target for child in core.children} == {"launcher.worker.main:run"}
    everyone = [api, core, *core.children]
    assert len(everyone) == tp + 2
    assert len({spec.comm for spec in everyone}) == tp + 2
    assert all(len(spec.comm.encode()) <= 15 for spec in everyone)
    assert {(spec.instance, spec.launch_id) for spec in everyone} == {("default", "L1")}
    assert {spec.env["XSERVE_LAUNCH_ID"] for spec in everyone} == {"L1"}
    assert not api.early_title
    assert not core.early_title


def test_uni_has_no_workers() -> None:
    made = plan(LaunchConfig())
    _, core, workers = parts(made)
    assert core.backend == "uni"
    assert workers == []
    assert core.worker.ranks.world_size == 1


def test_mp_of_one_has_one_worker() -> None:
    assert len(plan(LaunchConfig(backend="mp")).processes[1].children) == 1


def test_a_library_has_no_api_server() -> None:
    made = plan(LaunchConfig(api_key_file="/none"), api=False)
    assert [spec.role for spec in made.processes] == ["engine_core"]
    assert made.http is None
    assert made.url == ""


@pytest.mark.parametrize(
    ("asked", "method", "api", "workers", "helped"),
    [
        ("auto", "forkserver", "spawn", "fork", True),
        ("forkserver", "forkserver", "spawn", "fork", True),
        ("fork", "fork", "spawn", "fork", False),
        ("spawn", "spawn", "spawn", "spawn", False),
    ],
)
def test_start_methods(asked: Any, method: str, api: str, workers: str, helped: bool) -> None:
    made = plan(LaunchConfig(start_method=asked, tp=2))
    assert made.start_method == method
    assert made.method_of(made.processes[0]) == api
    assert made.method_of(made.processes[1]) == method
    assert made.processes[1].child_method == workers
    assert (made.helper is not None) == helped


# --- what each is told ---------------------------------------------------------------------------------------------


def test_settings_reach_every_role() -> None:
    config = LaunchConfig(
        tp=2,
        worker_config={"step_ms": "5"},
        max_model_len=99,
        max_num_seqs=7,
        max_num_batched_tokens=33,
        kv_cache_memory=4096,
        seed=5,
        api_key="k",
        served_model_name="mine",
        ready_timeout=11,
        shutdown_timeout=12,
        ring_bytes=1 << 16,
        log_level="debug",
    )
    made = plan(config, generation=3)
    api, core, workers = parts(made)
    assert api == ApiSettings(
        engine_addresses=(core.address,), served_model_name="mine", api_keys=("k",), restart=True, log_level="debug"
    )
    assert core.worker == workers[0]
    assert (core.max_model_len, core.max_num_seqs, core.max_num_batched_tokens, core.seed) == (99, 7, 33, 5)
    assert (core.ready_timeout, core.shutdown_timeout, core.ring_bytes, core.generation) == (11, 12, 1 << 16, 3)
    for rank, worker in enumerate(workers):
        assert (worker.ranks.rank, worker.ranks.local_rank, worker.ranks.tp_rank) == (rank, rank, rank)
        assert (worker.ranks.world_size, worker.ranks.tp_size, worker.local_world_size) == (2, 2, 2)
        assert worker.worker == REFERENCE_WORKER
        assert worker.worker_config == {"step_ms": "5"}
        assert (worker.max_model_len, worker.max_num_seqs, worker.max_num_batched_tokens) == (99, 7, 33)
        assert (worker.kv_cache_memory, worker.seed, worker.num_threads, worker.generation) == (4096, 5, 8, 3)
        assert worker.rendezvous == "file:///run/x/rendezvous-L1-0-3"
        assert (worker.device, worker.device_index, worker.model) == ("cpu", 0, None)
    assert made.generation == 3
    assert (made.world_size, made.threads, made.served_model_name) == (2, 8, "mine")


def test_settings_of_decodes_by_role() -> None:
    api, core = plan(LaunchConfig(tp=2)).processes
    assert isinstance(settings_of(api), ApiSettings)
    assert isinstance(settings_of(core), EngineSettings)
    assert isinstance(settings_of(core.children[1]), WorkerSettings)
    with pytest.raises(InternalError):
        settings_of(ProcessSpec(title="x", role="guard", target="a:b"))


def test_each_gpu_has_its_worker(tmp_path: Path) -> None:
    made = plan(LaunchConfig(model=str(write_model(tmp_path)), tp=3), gpu_machine(4))
    _, core, workers = parts(made)
    assert [(w.device, w.device_index) for w in workers] == [("cuda", 0), ("cuda", 1), ("cuda", 2)]
    assert {w.dtype for w in workers} == {"bfloat16"}
    assert core.worker.device == "cuda"


def test_environment() -> None:
    made = plan(LaunchConfig(tp=4))
    api, core = made.processes
    assert made.helper is not None
    assert core.env == core.children[0].env == made.helper.env
    assert core.env["OMP_NUM_THREADS"] == core.env["MKL_NUM_THREADS"] == "4"
    assert core.env["OPENBLAS_NUM_THREADS"] == "1"
    assert (core.env["GLOO_SOCKET_IFNAME"], core.env["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    assert core.env["NCCL_NVLS_ENABLE"] == "0"
    assert core.env["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == core.env["NVSHMEM_DISABLE_NVLS"] == "1"
    assert core.env["TOKENIZERS_PARALLELISM"] == "false"
    assert "HF_HUB_OFFLINE" not in core.env
    assert api.env["OMP_NUM_THREADS"] == "1"
    assert "GLOO_SOCKET_IFNAME" not in api.env


def test_blas_follows_where_no_helper_imports_it() -> None:
    assert plan(LaunchConfig(tp=4, start_method="spawn")).processes[1].env["OPENBLAS_NUM_THREADS"] == "4"


def test_an_explicit_omp_number_wins() -> None:
    made = plan(LaunchConfig(tp=4), machine(omp_num_threads=9))
    assert made.threads == 9
    assert made.processes[1].env["OMP_NUM_THREADS"] == "9"
    assert any("OMP_NUM_THREADS is set" in line for line in made.notes)


def test_a_model_directory_is_never_looked_up_on_the_network(tmp_path: Path) -> None:
    made = plan(LaunchConfig(model=str(write_model(tmp_path / "a")), tp=2))
    api, core, workers = parts(made)
    assert {spec.env["HF_HUB_OFFLINE"] for spec in made.processes} == {"1"}
    assert api.model == core.worker.model == workers[1].model == str(tmp_path / "a")
    assert made.served_model_name == api.served_model_name == "a"
    assert workers[0].dtype == "float32"


@pytest.mark.parametrize(
    ("worker", "torch"),
    [("launcher.models.worker:TransformersWorker", True), (REFERENCE_WORKER, False), ("mine.worker:Class", False)],
)
def test_the_helper_imports_what_all_will_need(worker: str, torch: bool) -> None:
    modules = preload(worker)
    assert ("torch" in modules) == torch
    own = "launcher.models.preload" if torch else worker.partition(":")[0]
    assert modules[-1] == own
    assert {"launcher.engine.core_process", "launcher.worker.main"} < set(modules)


# --- notes ---------------------------------------------------------------------------------------------------------


def test_a_bare_launch_says_that_it_has_no_model() -> None:
    assert sum("reference worker" in line for line in plan(LaunchConfig()).notes) == 1
    assert not any("reference worker" in line for line in plan(LaunchConfig(worker="reference")).notes)


def test_notes_are_lines() -> None:
    notes = plan(LaunchConfig(worker="json:JSONDecoder", tp=2)).notes
    assert all(line and "\n" not in line for line in notes)
    assert any(line.startswith("start method forkserver: default") for line in notes)
    assert any("16 CPUs in the affinity mask over 2 local workers" in line for line in notes)
    assert any(line.startswith("KV cache half of what is free") for line in notes)


def test_hidden_gpus_are_mentioned_once(tmp_path: Path) -> None:
    facts = gpu_machine(gpus=1, gpus_present=2, gpu_note="CUDA_VISIBLE_DEVICES='0,9': '9' is out of range")
    model = str(write_model(tmp_path))
    assert sum("out of range" in line for line in plan(LaunchConfig(model=model), facts).notes) == 1
    assert not any("out of range" in line for line in plan(LaunchConfig(model=model, device="cpu"), facts).notes)
    assert not any("out of range" in line for line in plan(LaunchConfig(), facts).notes)


def test_decisions_have_origins() -> None:
    decisions = {d.name: d for d in plan(LaunchConfig(tp=2, backend="mp")).decisions}
    assert decisions["backend"].value == "mp"
    assert decisions["backend"].origin == "--backend"
    assert all(d.value and d.origin for d in decisions.values())


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "facts", "kind", "words"),
    [
        ({"tp": 0}, FACTS, UsageError, "--tp 0"),
        ({"tp": 5}, FACTS, UsageError, "does not divide the 12 attention heads"),
        ({"max_model_len": 513}, FACTS, UsageError, "beyond the 512 tokens"),
        ({"kv_cache_memory": 5}, FACTS, UsageError, "holds no block"),
        ({}, machine(memory_free=4000), HostError, "not enough memory: weights as float32 3.9 KiB + 384.0 KiB"),
        ({"tp": 3}, gpu_machine(2), UsageError, "larger than the 2 visible GPUs"),
        ({"api_key_file": "/nowhere"}, FACTS, UsageError, "--api-key-file /nowhere"),
        ({"ssl_keyfile": "/nowhere"}, FACTS, UsageError, "/nowhere"),
        ({"uds": "/nowhere/x/s"}, FACTS, UsageError, "no directory"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], facts: HostFacts, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as caught:
        plan(LaunchConfig(model=str(write_model(tmp_path)), **changes), facts)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_gpu_memory_is_not_measured_against_the_machines(tmp_path: Path) -> None:
    plan(LaunchConfig(model=str(write_model(tmp_path))), gpu_machine(1, memory_free=4000))


def test_flags_are_checked_before_the_model_is_looked_for() -> None:
    with pytest.raises(UsageError, match="--backend uni"):
        plan(LaunchConfig(model="some/model", tp=2, backend="uni"))


def test_a_model_without_tokenizer_serves_a_library_only(tmp_path: Path) -> None:
    config = LaunchConfig(model=str(write_model(tmp_path)))
    (tmp_path / "tokenizer.json").unlink()
    plan(config, api=False)
    with pytest.raises(UsageError, match="no tokenizer"):
        plan(config)


def test_other_workers_may_do_with_a_model_what_they_like(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    made = plan(LaunchConfig(model=str(tmp_path), worker="json:JSONDecoder", tp=7))
    assert parts(made)[2][0].model == str(tmp_path)


def test_a_run_directory_too_long_for_sockets() -> None:
    with pytest.raises(HostError, match="too long"):
        make_plan(LaunchConfig(), FACTS, run_dir=Path("/" + "x" * 120), launch_id="L", name="n")


# --- purity and weight ---------------------------------------------------------------------------------------------


def test_the_same_facts_give_the_same_plan(tmp_path: Path) -> None:
    config = LaunchConfig(model=str(write_model(tmp_path)), tp=3)
    assert msgspec.msgpack.encode(plan(config)) == msgspec.msgpack.encode(plan(config))


def test_planning_imports_neither_torch_nor_zmq_nor_transformers(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from launcher.config import LaunchConfig;"
        "from launcher.host import read_host; from launcher.plan import make_plan; import launcher.plan.show;"
        f"make_plan(LaunchConfig(model={str(write_model(tmp_path))!r}), read_host(), run_dir=Path('/r'), launch_id='L',"
        "name='n');"
        "print(sorted({'torch', 'zmq', 'transformers', 'huggingface_hub', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("tp", "said"), [(1, False), (2, True)])
def test_slices_meet_in_host_memory(tp: int, said: bool) -> None:
    slices = ("MIG-GPU-0c11d2e3-cccc/1/0", "MIG-GPU-0c11d2e3-cccc/2/0")
    facts = gpu_machine(2, gpu_entries=slices)
    made = plan(LaunchConfig(tp=tp, worker="json:JSONDecoder", device="cuda"), facts)
    assert any("MIG slices reach no other GPU" in note for note in made.notes) is said
