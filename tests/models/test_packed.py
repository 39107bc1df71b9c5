"""A step in one kernel call per layer, with a kernel written out: it must give what the padded attention gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from launcher.models import load
from launcher.models.packed import find_kernel, plain_kernel
from launcher.models.paged import LayerShape
from launcher.models.transfer import download, upload, upload_bytes, upload_floats
from launcher.models.worker import TransformersWorker
from tests.models.conftest import Reference
from tests.models.driver import Driver, settings, started
from tests.models.test_load import SIZES, tiny_of
from tests.models.test_worker import workload

CPU = torch.device("cpu")


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_qwen3"])
def test_it_equals_generate(model: str, reference: Reference, request: pytest.FixtureRequest) -> None:
    directory: Path = request.getfixturevalue(model)
    worker = started(TransformersWorker(settings(str(directory))))
    worker._state.kernel = plain_kernel
    requests = workload(Driver(worker.execute_model))
    worker.shutdown()
    for done in requests:
        assert done.output == reference(directory, done.prompt, 20)


@pytest.mark.parametrize("window", [None, 5])
def test_windows(window: int | None) -> None:
    model = tiny_of(transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=window))
    state = load.probe(model, CPU)
    state.kernel = plain_kernel
    assert load.prove(model, state, CPU, torch.float32) < 1e-4


def test_where_it_is_not_used() -> None:
    shape = LayerShape(2, 8, 8, 4)
    assert find_kernel([shape], torch.bfloat16, CPU) == (None, "not on a GPU")
    kernel, why = find_kernel([shape], torch.float32, torch.device("cuda", 0))
    assert kernel is None
    assert "float32" in why


def test_transfers_keep_order_and_type() -> None:
    a, b, c = upload([[1, 2, 3], [], range(2)], CPU)
    assert (a.tolist(), b.tolist(), c.tolist()) == ([1, 2, 3], [], [0, 1])
    [d] = upload_floats([[0.1]], CPU)
    assert d.dtype == torch.float64
    assert upload_bytes(b"\x01\xff", CPU).tolist() == [1, 255]
    assert [t.tolist() for t in download([a, d])] == [[1, 2, 3], [0.1]]
    assert upload([[], []], CPU)[1].numel() == 0
