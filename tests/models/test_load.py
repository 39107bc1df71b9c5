"""What is refused before and at load, and what a configuration says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from launcher.config import RankSettings, WorkerSettings
from launcher.errors import HostError, UsageError
from launcher.models import load, paged
from launcher.models.shard import span
from launcher.models.tiny import make_tiny
from launcher.models.worker import TransformersWorker
from launcher.parallel.communicators import SoleCommunicator
from launcher.plan import architectures
from launcher.worker.base import no_progress
from tests.models.driver import Driver, Request, settings, started

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "initializer_range": 0.2,
}


def tiny_of(config: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.set_attn_implementation(paged.NAME)
    return model


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.FalconConfig(**SIZES), "FalconForCausalLM reaches the paged attention in 0 of its 4 layers"),
        (transformers.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8), "soft-capped attention scores"),
        (transformers.GptOssConfig(**SIZES, num_key_value_heads=2, head_dim=8, num_local_experts=4), "attention sinks"),
    ],
)
def test_architectures_that_would_run_wrong(config: Any, words: str) -> None:
    assert config.model_type in architectures.REFUSED
    with pytest.raises(UsageError, match=words):
        load.probe(tiny_of(config), CPU)


def test_the_proof_finds_what_the_probe_cannot() -> None:
    model = tiny_of(transformers.DiffLlamaConfig(**SIZES, num_key_value_heads=2))
    state = load.probe(model, CPU)
    with pytest.raises(UsageError, match="DiffLlamaForCausalLM gives other logits with the paged attention"):
        load.prove(model, state, CPU, torch.float32)


def test_a_model_without_attention_layers_cannot_be_driven() -> None:
    model = tiny_of(transformers.MambaConfig(**{k: v for k, v in SIZES.items() if "attention" not in k}))
    with pytest.raises(UsageError, match="MambaForCausalLM"):
        load.probe(model, CPU)


@pytest.mark.parametrize(("window", "layers"), [(5, None), (9, ["sliding_attention", "full_attention"] * 2)])
def test_sliding_windows(window: int, layers: list[str] | None) -> None:
    sizes = {**SIZES, "num_key_value_heads": 2, "sliding_window": window}
    if layers is None:
        model = tiny_of(transformers.MistralConfig(**sizes))
    else:
        model = tiny_of(transformers.Qwen3Config(**sizes, use_sliding_window=True, layer_types=layers, head_dim=8))
    state = load.probe(model, CPU)
    assert load.prove(model, state, CPU, torch.float32) < 1e-4


def test_a_window_served_equals_generate(tmp_path: Path) -> None:
    directory = make_tiny(
        tmp_path,
        "qwen3",
        sliding_window=11,
        use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    prompt = [(i * 13) % 250 + 5 for i in range(50)]
    worker = started(TransformersWorker(settings(str(directory))))
    driver = Driver(worker.execute_model)
    requests = [driver.add(Request(prompt[:n], 12)) for n in (50, 8, 23)]
    driver.run()
    worker.shutdown()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for request in requests:
        ids = torch.tensor([request.prompt])
        with torch.inference_mode():
            expected = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=12,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=2,
            )
        assert request.output == expected[0, len(request.prompt) :].tolist()


def test_no_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config.json"):
        load.read_config(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_thing"}))
    with pytest.raises(UsageError, match="no_such_thing"):
        load.read_config(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(UsageError, match="'t5', which is no causal language model"):
        load.read_config(str(tmp_path))


def test_weights_missing(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_llama / "config.json").read_bytes())
    config = load.read_config(str(tmp_path))
    with pytest.raises(HostError, match="cannot be loaded"):
        load.load(str(tmp_path), config, torch.float32, CPU, SoleCommunicator(), no_progress)


def test_sizes_that_do_not_divide(tiny_for_three: Path) -> None:
    config = load.read_config(str(tiny_for_three))
    load.check_shards(config, 1)
    load.check_shards(config, 3)
    for tp in (2, 4, 9):
        with pytest.raises(UsageError, match=f"--tp {tp} does not divide the model's 9 .*sizes that work: 1, 3$"):
            load.check_shards(config, tp)
    with pytest.raises(UsageError, match="'gpt2' has no tensor-parallel plan: use --tp 1"):
        load.check_shards(transformers.GPT2Config(), 2)


def test_no_model_and_no_pipeline(tiny_llama: Path) -> None:
    with pytest.raises(UsageError, match="needs a model"):
        TransformersWorker(WorkerSettings()).init_device()
    staged = WorkerSettings(model=str(tiny_llama), ranks=RankSettings(pp_size=2, world_size=2))
    with pytest.raises(UsageError, match="pipeline size 2"):
        TransformersWorker(staged).init_device()


def test_dtypes() -> None:
    config = transformers.LlamaConfig(dtype="bfloat16")
    cuda = torch.device("cuda", 0)
    assert load.choose_dtype("auto", CPU, config) == torch.float32
    assert load.choose_dtype("auto", cuda, config) == torch.bfloat16
    assert load.choose_dtype("float16", cuda, config) == torch.float16


def test_what_ends_an_answer() -> None:
    config = transformers.LlamaConfig(eos_token_id=[7, 3])
    model = SimpleNamespace(config=config, generation_config=SimpleNamespace(eos_token_id=9))
    assert load.eos_ids(model) == (3, 7, 9)
    assert load.eos_ids(SimpleNamespace(config=transformers.LlamaConfig(eos_token_id=None))) == ()


def test_spans_cut_as_chunk_cuts() -> None:
    for length in range(1, 33):
        for size in range(1, 17):
            parts = [list(range(*span(length, rank, size))) for rank in range(size)]
            assert [i for part in parts for i in part] == list(range(length))
            expected = [chunk.tolist() for chunk in torch.arange(length).chunk(size)]
            assert [part for part in parts if part] == expected


def test_the_tables_of_architectures_do_not_overlap() -> None:
    assert not architectures.TENSOR_PARALLEL & architectures.SINGLE_RANK
    assert not set(architectures.REFUSED) & (architectures.TENSOR_PARALLEL | architectures.SINGLE_RANK)
