"""Threads and memory: every size, and the arithmetic in the refusals."""

from __future__ import annotations

import pytest

from launcher.errors import HostError, UsageError
from launcher.plan import budget
from launcher.plan.checkpoint import Checkpoint
from tests.plan.made_facts import GIB, machine

BLOCK = 16 * 2 * 2 * 4 * 8 * 4
"""Bytes of 16 tokens: 2 layers, 4 KV heads of 8, keys and values, float32."""
MODEL = Checkpoint(
    directory="/m", model_type="x", heads=8, kv_heads=4, head_dim=8, layers=2, max_model_len=160, parameters=1000
)


@pytest.mark.parametrize("cpus", range(1, 17))
@pytest.mark.parametrize("workers", range(1, 17))
def test_threads_times_workers_never_exceed_the_cpus(cpus: int, workers: int) -> None:
    threads = budget.thread_budget(machine(cpus=cpus), workers)
    assert threads.number == max(1, cpus // workers)
    assert threads.number * workers <= max(cpus, workers)


@pytest.mark.parametrize(
    ("quota", "workers", "number"),
    [(None, 4, 4), (4.0, 1, 4), (4.0, 4, 1), (2.5, 1, 2), (0.5, 1, 1), (0.5, 8, 1), (64.0, 4, 4), (16.0, 4, 4)],
)
def test_the_quota_counts_when_it_is_less(quota: float | None, workers: int, number: int) -> None:
    threads = budget.thread_budget(machine(cpu_quota=quota), workers)
    assert threads.number == number
    assert ("quota" in threads.origin) == (quota is not None and quota < 16)


def test_an_explicit_number_wins() -> None:
    assert budget.thread_budget(machine(omp_num_threads=40, cpu_quota=1), 8) == (40, "OMP_NUM_THREADS is set")


@pytest.mark.parametrize(
    ("tp", "given", "length", "words"),
    [
        (1, None, None, None),
        (1, 10 * BLOCK, None, None),
        (1, 10 * BLOCK, 160, None),
        (2, 5 * BLOCK, None, None),
        (1, 4 * BLOCK, 64, None),
        (1, BLOCK - 1, 16, f"holds no block of 16 tokens, which takes {BLOCK} bytes a rank"),
        (4, BLOCK // 4 - 1, 16, f"give at least {BLOCK // 4}"),
        (1, 9 * BLOCK, None, "holds 144 tokens, less than one sequence of the model's 160"),
        (1, 2 * BLOCK, 33, f"of --max-model-len 33: give at least {3 * BLOCK}, or --max-model-len 32"),
    ],
)
def test_kv_memory(tp: int, given: int | None, length: int | None, words: str | None) -> None:
    if words is None:
        budget.check_kv_memory(MODEL, "float32", tp, given, length)
        return
    with pytest.raises(UsageError) as caught:
        budget.check_kv_memory(MODEL, "float32", tp, given, length)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_kv_memory_of_an_unknown_shape_is_left_to_the_worker() -> None:
    latent = Checkpoint(directory="/m", model_type="x", compressed_kv=True, layers=1, kv_heads=1, head_dim=1)
    budget.check_kv_memory(latent, "float32", 1, 1, None)
    budget.check_kv_memory(MODEL, "auto", 1, 1, None)


@pytest.mark.parametrize(
    ("tp", "given", "length", "kv"),
    [
        (1, None, None, 10 * BLOCK),
        (2, None, None, 10 * BLOCK),
        (1, None, 17, 2 * BLOCK),
        (2, 3 * BLOCK, None, 6 * BLOCK),
    ],
)
def test_memory_need(tp: int, given: int | None, length: int | None, kv: int) -> None:
    need = budget.memory_need(MODEL, "float32", tp, given, length)
    assert (need.weights, need.kv) == (4000, kv)
    budget.check_memory(machine(memory_free=4000 + kv), need)
    with pytest.raises(HostError) as caught:
        budget.check_memory(machine(memory_free=4000 + kv - 1, memory_origin="control group /x"), need)
    line = str(caught.value)
    assert need.line in line
    assert "control group /x" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("left", "given", "advice"),
    [
        (0, None, "raise the limit, or give a smaller --dtype or model"),
        (2 * BLOCK - 1, None, "raise the limit, or give a smaller --dtype or model"),
        (2 * BLOCK, None, "give --max-model-len 16, or free some"),
        (9 * BLOCK, None, "give --max-model-len 64, or free some"),
        (0, 2 * BLOCK, "or a smaller --kv-cache-memory"),
    ],
)
def test_the_advice_is_what_would_work(left: int, given: int | None, advice: str) -> None:
    need = budget.memory_need(MODEL, "float32", 1, given, None)
    with pytest.raises(HostError) as caught:
        budget.check_memory(machine(memory_free=4000 + left), need)
    assert str(caught.value).endswith(advice)


def test_the_arithmetic_reads_well() -> None:
    model = Checkpoint(directory="/m", model_type="x", layers=1, kv_heads=1, head_dim=1, parameters=3 * GIB)
    need = budget.memory_need(model, "float32", 1, 2 * GIB, None)
    assert need.line == "weights as float32 12.0 GiB + 1 x 2.0 GiB of KV cache = 14.0 GiB"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 << 10, "1.5 MiB"), (GIB, "1.0 GiB"), (5 << 40, "5.0 TiB")],
)
def test_size(count: int, text: str) -> None:
    assert budget.size(count) == text
