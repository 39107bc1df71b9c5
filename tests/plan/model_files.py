"""Model directories made by hand: config.json, a tokenizer's name, and safetensors files with the right headers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "num_hidden_layers": 2,
    "hidden_size": 96,
    "max_position_embeddings": 512,
    "vocab_size": 300,
    "dtype": "bfloat16",
}
WIDTH = {"F32": 4, "BF16": 2, "F16": 2}


def safetensors(tensors: dict[str, tuple[str, tuple[int, ...]]], *, cut: int = 0) -> bytes:
    """A file with tensors of zeros, `cut` bytes short."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = WIDTH[dtype]
        for n in shape:
            size *= n
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    whole = len(text).to_bytes(8, "little") + text + bytes(at)
    return whole[: len(whole) - cut]


def write_model(directory: Path, config: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A whole model: one weight file of 100 x 10 bfloat16. `changes` to its config.json; None removes a key."""
    directory.mkdir(parents=True, exist_ok=True)
    made = {k: v for k, v in {**(config or LLAMA), **changes}.items() if v is not None}
    (directory / "config.json").write_text(json.dumps(made))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(safetensors({"w": ("BF16", (100, 10))}))
    return directory


def write_shards(directory: Path, shards: dict[str, dict[str, tuple[str, tuple[int, ...]]]]) -> Path:
    """Shards and their index instead of the one file."""
    write_model(directory)
    (directory / "model.safetensors").unlink()
    for name, tensors in shards.items():
        (directory / name).write_bytes(safetensors(tensors))
    index = {"metadata": {}, "weight_map": {t: name for name, tensors in shards.items() for t in tensors}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
