"""Weight files: whole ones are measured, all others are refused with a line that says which file and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.plan.weights import read_weights
from tests.plan.model_files import safetensors, write_model, write_shards

SHARDS: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "model-00001-of-00002.safetensors": {"a": ("BF16", (10, 4)), "b": ("F32", (3,))},
    "model-00002-of-00002.safetensors": {"c": ("F16", (5,))},
}


def refusal(directory: Path) -> str:
    with pytest.raises(UsageError) as caught:
        read_weights(directory)
    line = str(caught.value)
    assert "\n" not in line
    assert str(directory) in line
    return line


def test_one_file(tmp_path: Path) -> None:
    assert read_weights(write_model(tmp_path)) == (("model.safetensors",), 2000, 1000)


def test_shards(tmp_path: Path) -> None:
    assert read_weights(write_shards(tmp_path, SHARDS)) == (tuple(SHARDS), 80 + 12 + 10, 40 + 3 + 5)


def test_a_file_without_tensors_and_a_scalar(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors({}))
    assert read_weights(tmp_path) == (("model.safetensors",), 0, 0)
    (tmp_path / "model.safetensors").write_bytes(safetensors({"scale": ("F32", ())}))
    assert read_weights(tmp_path) == (("model.safetensors",), 4, 1)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, SHARDS)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    line = refusal(tmp_path)
    assert "model-00002-of-00002.safetensors of 2 weight files" in line
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    assert "model-00001-of-00002.safetensors and 1 more" in refusal(tmp_path)


def test_a_shard_that_lacks_a_tensor(tmp_path: Path) -> None:
    write_shards(tmp_path, SHARDS)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(safetensors({"other": ("F16", (5,))}))
    assert "lacks c" in refusal(tmp_path)


@pytest.mark.parametrize("cut", [1, 500, 2000])
def test_a_file_cut_off_within_its_data(tmp_path: Path, cut: int) -> None:
    write_model(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-cut])
    line = refusal(tmp_path)
    assert f"cut off: {len(whole) - cut} bytes of {len(whole)}" in line


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234",
        b"\x10\0\0\0\0\0\0\0",
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x07\0\0\0\0\0\0\0{'a':1}",
        b'\x07\0\0\0\0\0\0\0{"a":1}',
        b'\x18\0\0\0\0\0\0\0{"a":{"data_offsets":1}}',
        b"\xff" * 64,
    ],
)
def test_a_file_that_is_no_safetensors_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert "is no safetensors file" in refusal(tmp_path)


def test_a_git_lfs_pointer(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n")
    assert "git lfs pull" in refusal(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", json.dumps({"weight_map": []})])
def test_an_index_that_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert "no weight_map" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "neither model.safetensors nor model.safetensors.index.json"),
        (["model-00001-of-00002.safetensors"], "model-00001-of-00002.safetensors is there, but"),
        (["pytorch_model.bin"], "pickled"),
        (["x.gguf"], "only x.gguf; convert"),
    ],
)
def test_no_weights(tmp_path: Path, files: list[str], words: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    line = refusal(tmp_path)
    assert "has no weights" in line
    assert words in line
