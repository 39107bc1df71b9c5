"""A model directory: what its configuration says, in all the words that configurations use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.errors import UsageError
from launcher.plan.checkpoint import (
    Checkpoint,
    check_model_len,
    check_tensor_parallel,
    check_tokenizer,
    describe_config,
    read_checkpoint,
)
from launcher.plan.weights import Weights
from tests.plan.model_files import LLAMA, write_model


def describe(config: dict[str, Any]) -> Checkpoint:
    return describe_config(Path("/m"), config, Weights((), 0, 0))


def test_a_whole_model(tmp_path: Path) -> None:
    model = read_checkpoint(write_model(tmp_path))
    assert model == Checkpoint(
        directory=str(tmp_path),
        model_type="llama",
        architectures=("LlamaForCausalLM",),
        heads=12,
        kv_heads=6,
        head_dim=8,
        layers=2,
        max_model_len=512,
        vocab=300,
        dtype="bfloat16",
        weight_files=("model.safetensors",),
        weight_bytes=2000,
        parameters=1000,
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: None, "no such directory"),
        (lambda d: d.write_text("x"), "is a file"),
        (lambda d: d.mkdir(), "no config.json"),
        (lambda d: (d.mkdir(), (d / "config.json").write_text("{")), "is not JSON"),
        (lambda d: (d.mkdir(), (d / "config.json").write_bytes(b"\xff")), "is not JSON"),
        (lambda d: (d.mkdir(), (d / "config.json").mkdir()), "cannot be read"),
        (lambda d: (d.mkdir(), (d / "config.json").write_text("[]")), "names no model_type"),
        (lambda d: (d.mkdir(), (d / "config.json").write_text('{"model_type": 3}')), "names no model_type"),
        (lambda d: (write_model(d), (d / "model.safetensors").unlink()), "has no weights"),
    ],
)
def test_refusals_name_the_directory_in_one_line(tmp_path: Path, make: Any, words: str) -> None:
    directory = tmp_path / "modèle à moi"
    make(directory)
    with pytest.raises(UsageError) as caught:
        read_checkpoint(directory)
    line = str(caught.value)
    assert words in line
    assert str(directory) in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"n_head": 8, "n_embd": 64, "n_layer": 3, "n_positions": 99}, (8, 8, 8, 3, 99)),
        ({"num_attention_heads": 8, "multi_query": True, "hidden_size": 64}, (8, 1, 8, 0, 0)),
        ({"num_attention_heads": 8, "num_kv_heads": 2, "hidden_size": 64, "head_dim": 32}, (8, 2, 32, 0, 0)),
        ({"num_attention_heads": 8, "num_key_value_heads": None, "hidden_size": 64}, (8, 8, 8, 0, 0)),
        ({"text_config": {"num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 5}}, (4, 4, 8, 5, 0)),
        ({"hidden_size": 64, "text_config": {"num_attention_heads": 4, "hidden_size": 32}}, (4, 4, 8, 0, 0)),
        ({}, (0, 0, 0, 0, 0)),
        ({"num_attention_heads": True, "n_layer": -3}, (0, 0, 0, 0, 0)),
    ],
)
def test_the_words_of_configurations(config: dict[str, Any], expected: tuple[int, ...]) -> None:
    model = describe({"model_type": "x", **config})
    assert (model.heads, model.kv_heads, model.head_dim, model.layers, model.max_model_len) == expected
    assert model.model_type == "x"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": "bfloat16", "text_config": {"model_type": "y"}}, "bfloat16"),
        ({"text_config": {"dtype": "float16"}}, "float16"),
        ({}, "float32"),
    ],
)
def test_dtype(config: dict[str, Any], expected: str) -> None:
    assert describe({"model_type": "x", **config}).dtype == expected


def test_quantised_and_latent_models_are_marked() -> None:
    model = describe({"model_type": "x", "quantization_config": {"quant_method": "fp8"}, "kv_lora_rank": 512})
    assert model.quantization == "fp8"
    assert model.kv_bytes_per_token("float32", 1) == 0


# --- arithmetic ----------------------------------------------------------------------------------------------------


def model(heads: int, kv_heads: int) -> Checkpoint:
    return Checkpoint(
        directory="/m",
        model_type="x",
        heads=heads,
        kv_heads=kv_heads,
        head_dim=8,
        layers=2,
        weight_bytes=70,
        parameters=30,
    )


@pytest.mark.parametrize("heads", range(1, 17))
@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_tensor_parallel_sizes_are_those_that_divide(heads: int, group: int) -> None:
    made = model(heads * group, heads)
    sizes = made.tp_sizes()
    for tp in range(1, heads * group + 2):
        if tp in sizes:
            check_tensor_parallel(made, tp)
            continue
        with pytest.raises(UsageError, match=f"--tp {tp} does not divide"):
            check_tensor_parallel(made, tp)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "end"),
    [(9, 3, 2, "use --tp 1 or 3"), (12, 6, 4, "use --tp 1, 2, 3 or 6"), (8, 1, 2, "use --tp 1")],
)
def test_the_refusal_names_the_sizes_that_work(heads: int, kv_heads: int, tp: int, end: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_tensor_parallel(model(heads, kv_heads), tp)
    assert str(caught.value).endswith(end)
    assert f"{heads} attention heads and {kv_heads} KV heads" in str(caught.value)


def test_a_model_that_tells_no_heads_is_left_to_the_worker() -> None:
    check_tensor_parallel(model(0, 0), 7)


@pytest.mark.parametrize(
    ("asked", "limit", "fits"), [(None, 512, True), (512, 512, True), (513, 512, False), (9, 0, True)]
)
def test_model_length(asked: int | None, limit: int, fits: bool) -> None:
    made = describe({**LLAMA, "max_position_embeddings": limit})
    if fits:
        check_model_len(made, asked)
        return
    with pytest.raises(UsageError, match=r"--max-model-len 513 is beyond the 512 tokens .*use at most 512"):
        check_model_len(made, asked)


def test_bytes() -> None:
    made = model(8, 4)
    assert made.weight_bytes_as("float32") == 120
    assert made.weight_bytes_as("bfloat16") == 60
    assert made.weight_bytes_as("auto") == 70
    assert made.kv_bytes_per_token("float32", 1) == 2 * 2 * 4 * 8 * 4
    assert made.kv_bytes_per_token("bfloat16", 2) == 2 * 2 * 2 * 8 * 2
    assert made.kv_bytes_per_block("float32", 4) == 16 * 2 * 2 * 1 * 8 * 4
    assert made.kv_bytes_per_token("auto", 1) == 0


def test_tokenizer(tmp_path: Path) -> None:
    check_tokenizer(write_model(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match="has no tokenizer"):
        check_tokenizer(tmp_path)
