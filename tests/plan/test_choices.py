"""Each decision, as a table: what is asked and what the host has → the value, or the words of the refusal."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from launcher.config import REFERENCE_WORKER, TRANSFORMERS_WORKER, LaunchConfig
from launcher.errors import HostError, UsageError
from launcher.host import HostFacts
from launcher.plan import choices
from launcher.plan.checkpoint import Checkpoint
from tests.plan.made_facts import gpu_machine, machine


def refused(kind: type[Exception], call: Any, *args: Any) -> str:
    with pytest.raises(kind) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("tp", 0, 1),
        ("tp", -1, 8),
        ("max_num_seqs", 0, 1),
        ("max_num_batched_tokens", 0, 1),
        ("max_model_len", 0, 1),
        ("kv_cache_memory", -5, 1),
        ("ring_bytes", 0, 1),
        ("gpu_memory_utilization", 0.0, 0.01),
        ("gpu_memory_utilization", 1.01, 1.0),
        ("port", -1, 0),
        ("port", 65536, 65535),
        ("ready_timeout", -0.1, 0.0),
        ("ready_timeout", float("nan"), 1e9),
        ("shutdown_timeout", float("inf"), 0.0),
        ("worker_extension", "no colon", "json:JSONDecoder"),
    ],
)
def test_numbers(field: str, bad: Any, good: Any) -> None:
    choices.check_numbers(LaunchConfig(**{field: good}))
    line = refused(UsageError, choices.check_numbers, LaunchConfig(**{field: bad}))
    assert line.startswith(f"--{field.replace('_', '-')} ")
    assert str(bad) in line


@pytest.mark.parametrize(
    ("worker", "model", "expected"),
    [
        (None, None, REFERENCE_WORKER),
        (None, "/m", TRANSFORMERS_WORKER),
        ("reference", None, REFERENCE_WORKER),
        ("reference", "/m", REFERENCE_WORKER),
        ("transformers", "/m", TRANSFORMERS_WORKER),
        ("json:JSONDecoder", None, "json:JSONDecoder"),
        ("json.decoder:Outer.Inner", "/m", "json.decoder:Outer.Inner"),
    ],
)
def test_worker(worker: str | None, model: str | None, expected: str) -> None:
    assert choices.choose_worker(LaunchConfig(worker=worker, model=model)).value == expected


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        ("transformers", "needs a model"),
        ("vllm", "is not reference, transformers or module:Class"),
        ("json", "is not reference"),
        ("json:", "is not reference"),
        (":Class", "is not reference"),
        ("a/b.py:Class", "is not reference"),
        ("a b:Class", "is not reference"),
        ("json:Class:x", "is not reference"),
        ("no_such_module_at_all.x:Class", "no module 'no_such_module_at_all'"),
    ],
)
def test_worker_refusals(worker: str, words: str) -> None:
    line = refused(UsageError, choices.choose_worker, LaunchConfig(worker=worker))
    assert words in line
    assert worker in line


def test_a_model_needs_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install" in refused(HostError, choices.choose_worker, LaunchConfig(model="/m"))


def test_a_dotted_name_is_looked_up_but_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "explodes_when_imported.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    choices.check_dotted("--worker", "explodes_when_imported:Worker", "…")


@pytest.mark.parametrize(
    ("backend", "tp", "expected"),
    [(None, 1, "uni"), (None, 2, "mp"), ("uni", 1, "uni"), ("mp", 1, "mp"), ("mp", 8, "mp"), ("json:X", 8, "json:X")],
)
def test_backend(backend: str | None, tp: int, expected: str) -> None:
    assert choices.choose_backend(LaunchConfig(backend=backend, tp=tp)).value == expected


@pytest.mark.parametrize(
    ("backend", "tp", "words"),
    [
        ("uni", 2, "not --tp 2: use --backend mp"),
        ("ray", 1, "not in this version"),
        ("external_launcher", 1, "not in this version"),
        ("threads", 1, "is not uni, mp or module:Class"),
        ("no_such_module_at_all:X", 1, "no module"),
    ],
)
def test_backend_refusals(backend: str, tp: int, words: str) -> None:
    assert words in refused(UsageError, choices.choose_backend, LaunchConfig(backend=backend, tp=tp))


HIDDEN = gpu_machine(gpus=0, gpus_present=8, gpu_note="CUDA_VISIBLE_DEVICES='' hides all 8 GPUs: unset it to use them")


@pytest.mark.parametrize(
    ("device", "tp", "facts", "worker", "expected"),
    [
        ("auto", 1, machine(), TRANSFORMERS_WORKER, "cpu"),
        ("auto", 64, machine(), TRANSFORMERS_WORKER, "cpu"),
        ("auto", 8, gpu_machine(), TRANSFORMERS_WORKER, "cuda"),
        ("auto", 8, gpu_machine(), "json:X", "cuda"),
        ("auto", 9, gpu_machine(), REFERENCE_WORKER, "cpu"),
        ("cuda", 9, gpu_machine(), REFERENCE_WORKER, "cpu"),
        ("cuda", 8, gpu_machine(), TRANSFORMERS_WORKER, "cuda"),
        ("cpu", 9, gpu_machine(), TRANSFORMERS_WORKER, "cpu"),
        ("cpu", 1, HIDDEN, TRANSFORMERS_WORKER, "cpu"),
        ("auto", 1, HIDDEN, REFERENCE_WORKER, "cpu"),
        ("auto", 1, gpu_machine(torch_cuda=None), TRANSFORMERS_WORKER, "cpu"),
    ],
)
def test_device(device: Any, tp: int, facts: HostFacts, worker: str, expected: str) -> None:
    assert choices.choose_device(LaunchConfig(device=device, tp=tp), facts, worker).value == expected


@pytest.mark.parametrize(
    ("device", "tp", "facts", "words"),
    [
        ("cuda", 1, machine(), ["no NVIDIA GPU", "--device cpu"]),
        ("cuda", 1, HIDDEN, ["hides all 8 GPUs", "--device cpu"]),
        # Set by mistake or not: a model of many GPUs shall not come up on the CPU without a word.
        ("auto", 1, HIDDEN, ["hides all 8 GPUs", "--device cpu"]),
        ("cuda", 1, gpu_machine(torch_cuda=None), ["built without CUDA"]),
        ("cuda", 9, gpu_machine(), ["world size 9", "8 visible GPUs", "--nnodes", "--device cpu"]),
        ("auto", 9, gpu_machine(), ["world size 9", "--nnodes", "--device cpu"]),
        ("auto", 2, gpu_machine(1, gpus_present=8, gpu_note="CUDA_VISIBLE_DEVICES…"), ["CUDA_VISIBLE_DEVICES…"]),
    ],
)
def test_device_refusals(device: Any, tp: int, facts: HostFacts, words: list[str]) -> None:
    line = refused(UsageError, choices.choose_device, LaunchConfig(device=device, tp=tp), facts, TRANSFORMERS_WORKER)
    assert all(word in line for word in words)


@pytest.mark.parametrize(
    ("asked", "device", "own", "expected"),
    [
        ("auto", "cpu", "bfloat16", "float32"),
        ("auto", "cuda", "bfloat16", "bfloat16"),
        ("auto", "cuda", "float16", "float16"),
        ("auto", "cuda", "float8_e4m3fn", "auto"),
        ("auto", "cpu", None, "auto"),
        ("auto", "cuda", None, "auto"),
        ("bfloat16", "cpu", "float32", "bfloat16"),
        ("float16", "cpu", None, "float16"),
    ],
)
def test_dtype(asked: Any, device: str, own: str | None, expected: str) -> None:
    model = Checkpoint(directory="/m", model_type="x", dtype=own) if own else None
    assert choices.choose_dtype(LaunchConfig(dtype=asked), device, model).value == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("auto", "forkserver"), ("forkserver", "forkserver"), ("fork", "fork"), ("spawn", "spawn")],
)
def test_start_method(asked: Any, expected: str) -> None:
    choice = choices.choose_start(LaunchConfig(start_method=asked), machine())
    assert choice.value == expected
    assert ("--start-method" in choice.reason) == (asked != "auto")


@pytest.mark.parametrize("lacking", ["pidfd", "memfd"])
def test_a_kernel_without_what_we_stand_on(lacking: str) -> None:
    line = refused(HostError, choices.choose_start, LaunchConfig(), machine(**{lacking: False}))
    assert f"{lacking}_" in line


@pytest.mark.parametrize(
    ("asked", "typed", "model", "worker", "expected"),
    [
        ("mine", "/models/a", "/models/a", TRANSFORMERS_WORKER, "mine"),
        (None, "/models/a", "/models/a", TRANSFORMERS_WORKER, "a"),
        (None, "./a/", "/cwd/a", TRANSFORMERS_WORKER, "a"),
        (None, ".", "/cwd/a", TRANSFORMERS_WORKER, "a"),
        (None, "org/a", "/cache/models--org--a/snapshots/77ab", TRANSFORMERS_WORKER, "org/a"),
        (None, "/cache/snapshots/77ab", "/cache/snapshots/77ab", TRANSFORMERS_WORKER, "77ab"),
        (None, None, None, REFERENCE_WORKER, "reference"),
        (None, None, None, "a.b:MyWorker", "MyWorker"),
    ],
)
def test_served_name(asked: str | None, typed: str | None, model: str | None, worker: str, expected: str) -> None:
    config = LaunchConfig(served_model_name=asked, model=typed)
    assert choices.served_name(config, worker, Path(model) if model else None).value == expected
