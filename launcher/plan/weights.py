"""Weight files: which there are, whether they are whole, and how many bytes and parameters they hold.

Only headers are read: eight bytes of little-endian length, that many bytes of JSON (tensor name → dtype, shape,
offsets), then the data. A file that is shorter than its header says was cut off while downloading.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from launcher.errors import UsageError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER = 100 << 20
"""The format's own limit."""
_LFS_POINTER = b"version https://git-lfs"


class Weights(NamedTuple):
    files: tuple[str, ...]
    bytes: int
    """Of tensor data, in the dtype of the files."""
    parameters: int
    """Elements; packed (quantised) tensors count as they are stored."""


def read_weights(directory: Path) -> Weights:
    """Every weight file of a model directory, checked against its header and the index. `UsageError` in one line."""
    if (directory / INDEX).is_file():
        return _read_sharded(directory)
    if (directory / SINGLE).is_file():
        tensors = _read_header(directory / SINGLE)
        return Weights((SINGLE,), _data_bytes(tensors.values()), _elements(tensors.values()))
    raise UsageError(f"{directory} has no weights: {_what_is_there(directory)}")


def _read_sharded(directory: Path) -> Weights:
    shards: dict[str, set[str]] = {}
    try:
        weight_map = json.loads((directory / INDEX).read_bytes())["weight_map"]
        for tensor, shard in weight_map.items():
            shards.setdefault(str(shard), set()).add(tensor)
    except OSError as error:
        raise UsageError(f"{directory / INDEX} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{directory / INDEX} has no weight_map that can be read: get it again") from error
    missing = [shard for shard in sorted(shards) if not (directory / shard).is_file()]
    if missing:
        rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UsageError(
            f"{directory} is incomplete: {missing[0]}{rest} of {len(shards)} weight files is missing; download it again"
        )
    size = elements = 0
    for shard, expected in sorted(shards.items()):
        tensors = _read_header(directory / shard)
        if lacking := sorted(expected - tensors.keys()):
            raise UsageError(f"{directory / shard} lacks {lacking[0]}, which {INDEX} promises; download both again")
        size += _data_bytes(tensors.values())
        elements += _elements(tensors.values())
    return Weights(tuple(sorted(shards)), size, elements)


def _read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name → its entry. Raises `UsageError` when the file is not a whole safetensors file."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            text = file.read(length) if len(start) == 8 and length <= _MAX_HEADER else b""
            size = path.stat().st_size
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; check its owner and mode") from error
    if (start + text).startswith(_LFS_POINTER[:8]):
        raise UsageError(f"{path} is a Git LFS pointer, not weights: run `git lfs pull` in {path.parent}")
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UsageError(
            f"{path} ({size} bytes) is no safetensors file: its header is damaged; get it again"
        ) from error
    expected = 8 + length + end
    if size < expected:
        raise UsageError(f"{path} is cut off: {size} bytes of {expected}; download it again")
    return dict(header)


def _data_bytes(entries: Iterable[dict[str, Any]]) -> int:
    return sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in entries)


def _elements(entries: Iterable[dict[str, Any]]) -> int:
    return sum(math.prod(entry.get("shape", ())) for entry in entries)


def _what_is_there(directory: Path) -> str:
    """Why there are no weights that we take, and what to do about it."""
    names = sorted(path.name for path in directory.iterdir())
    safetensors = [name for name in names if name.endswith(".safetensors")]
    if safetensors:
        return f"{safetensors[0]} is there, but neither {SINGLE} nor {INDEX}; get the missing file"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        return "only pickled ones (.bin), which can run any code; save the model as safetensors"
    if gguf := [name for name in names if name.endswith(".gguf")]:
        return f"only {gguf[0]}; convert it to safetensors"
    return f"neither {SINGLE} nor {INDEX}; download the model again"
