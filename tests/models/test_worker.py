"""The whole worker against transformers' own generate(), token for token, in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launcher.models import batch_sampler
from launcher.models.worker import TransformersWorker
from launcher.worker.step import KVCacheConfig
from tests.models.conftest import Reference
from tests.models.driver import Driver, Request, settings, started
from tests.models.tensor_ranks import TensorRanks

PROMPTS = [
    [7],
    list(range(10, 27)),
    [(i * 13) % 250 + 5 for i in range(61)],
    [(i * 29) % 250 + 5 for i in range(16)],
    [(i * 5) % 250 + 5 for i in range(40)],
]


def workload(driver: Driver) -> list[Request]:
    """Mixed steps, arrivals in between, one preemption in the prompt and one in the output."""
    requests = [Request(prompt, 20) for prompt in PROMPTS]
    late = {0: requests[:2], 3: requests[2:3], 6: requests[3:]}
    driver.run(late, {5: requests[2], 14: requests[1]})
    assert driver.mixed > 3
    assert sorted(driver.free_blocks) == list(range(256))
    return requests


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_qwen3"])
def test_one_rank_equals_generate(model: str, reference: Reference, request: pytest.FixtureRequest) -> None:
    directory: Path = request.getfixturevalue(model)
    worker = started(TransformersWorker(settings(str(directory))))
    requests = workload(Driver(worker.execute_model))
    worker.shutdown()
    for done in requests:
        assert done.output == reference(directory, done.prompt, 20)


@pytest.mark.keeps_descriptors  # multiprocessing keeps a pipe to its resource tracker
@pytest.mark.parametrize(("model", "tp"), [("tiny_llama", 2), ("tiny_qwen3", 2), ("tiny_for_three", 3)])
def test_ranks_equal_generate(
    model: str, tp: int, reference: Reference, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    directory: Path = request.getfixturevalue(model)
    with TensorRanks(directory, tp, tmp_path) as ranks:
        requests = workload(Driver(ranks.execute))
        assert len({spec.bytes_per_block for spec in ranks.specs}) == 1
    for done in requests:
        assert done.output == reference(directory, done.prompt, 20)


def test_the_spec(tiny_llama: Path) -> None:
    worker = TransformersWorker(settings(str(tiny_llama), kv_cache_memory=12345, max_model_len=500))
    seen: list[tuple[float, float]] = []
    worker.progress = lambda done, total=0, unit="", detail="": seen.append((done, total))
    worker.init_device()
    worker.load_model()
    spec = worker.kv_cache_spec()
    assert seen
    assert seen[-1][0] == seen[-1][1] > 10
    # 4 layers, 4 KV heads, keys and values of 8 fp32 numbers, 16 tokens
    assert spec.bytes_per_block == 4 * 4 * 2 * 8 * 4 * 16
    assert (spec.max_model_len, spec.vocab_size, spec.eos_token_ids) == (500, 320, (4,))
    assert worker.determine_available_memory() == 12345
    worker.initialize_from_config(KVCacheConfig(num_blocks=8, block_size=16))
    assert worker.check_health() == "ok"
    worker.shutdown()
    worker.shutdown()


@pytest.mark.parametrize(("tp", "host", "marks"), [(1, False, [False]), (2, False, [True, False]), (2, True, [False])])
def test_a_gpu_rank_waits_for_the_others_where_it_reads_the_tokens(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, tp: int, host: bool, marks: list[bool]
) -> None:
    """NCCL's sums are only queued before; without the mark a hung peer could not be told from who waits for it."""
    worker = TransformersWorker(settings(str(tiny_llama), tp=tp, host_collectives=host))
    worker.device = torch.device("cuda")
    seen: list[bool] = []
    worker.waits = seen.append
    monkeypatch.setattr(batch_sampler, "sample", lambda logits, rows: (seen[:], []))
    before, _ = worker._choose(torch.zeros(1, 4), [])
    assert [*dict.fromkeys([*before, *seen])] == marks
    assert before == [marks[0]]
    assert seen[-1] is False
