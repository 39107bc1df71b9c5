"""On a GPU: the kernels are right there, tokens are those of generate, the sampler is that of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from launcher.models import batch_sampler, sampler
from launcher.models.packed import find_kernel
from launcher.models.paged import LayerShape
from launcher.models.worker import TransformersWorker
from tests.models.conftest import Reference
from tests.models.driver import Driver, Request, settings, started
from tests.models.tensor_ranks import TensorRanks
from tests.models.test_batch_sampler import some_logits, some_rows
from tests.models.test_worker import workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.keeps_descriptors,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4, 8, 8, 8), (8, 64, 64, 32), (8, 128, 128, 8), (1, 80, 80, 4)])
def test_the_kernel_is_right(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    kernel, why = find_kernel([LayerShape(*shape)], dtype, torch.device("cuda", 0))
    assert kernel is not None, why


def test_the_sampler_is_that_of_the_cpu() -> None:
    rows = some_rows()
    logits = some_logits(len(rows))
    tokens, logprobs = batch_sampler.sample(logits.cuda(), rows)
    expected, expected_logprobs = sampler.sample(logits, rows)
    assert tokens == expected
    assert [p and (p.ids, p.rank) for p in logprobs] == [p and (p.ids, p.rank) for p in expected_logprobs]


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_qwen3"])
def test_tokens_equal_generate(model: str, reference: Reference, request: pytest.FixtureRequest) -> None:
    directory: Path = request.getfixturevalue(model)
    worker = started(TransformersWorker(settings(str(directory), device="cuda", dtype="float32")))
    requests = workload(Driver(worker.execute_model))
    worker.shutdown()
    for done in requests:
        assert done.output == reference(directory, done.prompt, 20)


def test_ranks_on_one_card_equal_generate(tiny_llama: Path, reference: Reference, tmp_path: Path) -> None:
    more = {"device": "cuda", "dtype": "float32", "device_ranks": 2, "host_collectives": True}
    with TensorRanks(tiny_llama, 2, tmp_path, **more) as ranks:
        requests = workload(Driver(ranks.execute))
    for done in requests:
        assert done.output == reference(tiny_llama, done.prompt, 20)


def test_sixteen_bits_by_the_fast_kernel(tiny_llama: Path) -> None:
    """Not exact: most tokens of each answer are those of generate in the same type."""
    worker = started(TransformersWorker(settings(str(tiny_llama), device="cuda", dtype="bfloat16")))
    assert worker._state.kernel is not None
    driver = Driver(worker.execute_model)
    requests = [driver.add(Request([(i * 13) % 250 + 5 for i in range(n)], 12)) for n in (50, 8, 23)]
    driver.run()
    worker.shutdown()
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16).cuda().eval()
    same = 0
    for done in requests:
        ids = torch.tensor([done.prompt + done.output], device="cuda")
        with torch.inference_mode():
            best = model(ids, use_cache=False).logits[0, len(done.prompt) - 1 : -1].argmax(-1).tolist()
        same += sum(a == b for a, b in zip(best, done.output, strict=True))
    assert same >= 30, same
