"""A model directory read without transformers: what config.json says, and whether the weights are whole.

Everything that can be known to be wrong before a process is started is refused here, in one line that holds the value
and what to do: it costs milliseconds instead of a start.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec

from launcher.config import BLOCK_SIZE
from launcher.errors import UsageError
from launcher.plan.weights import Weights, read_weights

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_NAMES: dict[str, tuple[str, ...]] = {
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "max_model_len": ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx"),
    "head_dim": ("head_dim", "d_kv"),
    "vocab": ("vocab_size",),
}
"""Our word → the words that configurations have for it, the usual one first."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A model directory. 0: the configuration does not say."""

    directory: str
    model_type: str
    architectures: tuple[str, ...] = ()
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    layers: int = 0
    max_model_len: int = 0
    """The longest sequence that the model was made for."""
    vocab: int = 0
    dtype: str = "float32"
    """Of the weights, as config.json names it."""
    quantization: str = ""
    compressed_kv: bool = False
    """Keys and values are stored in a form of the model's own (latent attention): their size cannot be told here."""
    weight_files: tuple[str, ...] = ()
    weight_bytes: int = 0
    parameters: int = 0

    def weight_bytes_as(self, dtype: str) -> int:
        """Bytes of all weights once loaded as `dtype`. Packed weights stay as they are."""
        if self.quantization or dtype not in DTYPE_BYTES:
            return self.weight_bytes
        return self.parameters * DTYPE_BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str, tp: int) -> int:
        """Bytes that one token's keys and values take on one rank; 0 when it cannot be told."""
        if self.compressed_kv or dtype not in DTYPE_BYTES:
            return 0
        return 2 * self.layers * (self.kv_heads // tp) * self.head_dim * DTYPE_BYTES[dtype]

    def kv_bytes_per_block(self, dtype: str, tp: int) -> int:
        return self.kv_bytes_per_token(dtype, tp) * BLOCK_SIZE

    def tp_sizes(self) -> list[int]:
        """The tensor-parallel sizes that divide both kinds of heads; KV heads are not replicated."""
        common = math.gcd(self.heads, self.kv_heads)
        return [size for size in range(1, common + 1) if common % size == 0]


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read config.json and the weight files' headers. `UsageError` when something is missing or damaged."""
    config = read_config(directory)
    return describe_config(directory, config, read_weights(directory))


def read_config(directory: Path) -> dict[str, Any]:
    """config.json as it is."""
    path = directory / "config.json"
    if not directory.exists():
        raise UsageError(f"--model {directory}: no such directory")
    if not directory.is_dir():
        raise UsageError(f"--model {directory} is a file: give the directory that holds config.json and the weights")
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"--model {directory} has no config.json: give a Hugging Face model directory") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; check its owner and mode") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}; get it again") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UsageError(f"{path} names no model_type: it is no Hugging Face model configuration")
    return config


def describe_config(directory: Path, config: dict[str, Any], weights: Weights) -> Checkpoint:
    """The facts that planning needs. Models that also see or hear keep their language part in ``text_config``."""
    nested = config.get("text_config")
    text = {**config, **nested, "model_type": config["model_type"]} if isinstance(nested, dict) else config
    heads = _find(text, "heads")
    hidden = _find(text, "hidden")
    kv_heads = 1 if text.get("multi_query") is True else _find(text, "kv_heads")
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    quantization = config.get("quantization_config")
    return Checkpoint(
        directory=str(directory),
        model_type=config["model_type"],
        architectures=tuple(str(name) for name in config.get("architectures") or ()),
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=_find(text, "head_dim") or (hidden // heads if heads else 0),
        layers=_find(text, "layers"),
        max_model_len=_find(text, "max_model_len"),
        vocab=_find(text, "vocab"),
        dtype=dtype.removeprefix("torch.") if isinstance(dtype, str) else "float32",
        quantization=str(quantization.get("quant_method", "yes")) if isinstance(quantization, dict) else "",
        compressed_kv=bool(text.get("kv_lora_rank")),
        weight_files=weights.files,
        weight_bytes=weights.bytes,
        parameters=weights.parameters,
    )


def _find(config: dict[str, Any], what: str) -> int:
    for name in _NAMES[what]:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def check_tensor_parallel(model: Checkpoint, tp: int) -> None:
    """Refuse a size that would split a head."""
    if not model.heads or (model.heads % tp == 0 and model.kv_heads % tp == 0):
        return
    sizes = [str(size) for size in model.tp_sizes()]
    usable = " or ".join([", ".join(sizes[:-1]), sizes[-1]] if len(sizes) > 1 else sizes)
    raise UsageError(
        f"--tp {tp} does not divide the {model.heads} attention heads and {model.kv_heads} KV heads"
        f" of {model.directory}: use --tp {usable}"
    )


def check_model_len(model: Checkpoint, max_model_len: int | None) -> None:
    """Refuse sequences that the model was not made for."""
    if max_model_len is not None and model.max_model_len and max_model_len > model.max_model_len:
        raise UsageError(
            f"--max-model-len {max_model_len} is beyond the {model.max_model_len} tokens that {model.directory} takes:"
            f" use at most {model.max_model_len}"
        )


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")


def check_tokenizer(directory: Path) -> None:
    """Refuse a model that nobody could send text to."""
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise UsageError(f"--model {directory} has no tokenizer (tokenizer.json): add it, the API takes text")
