"""`xserve keygen`: a key for its owner alone, never over a file that is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.nodes.key_file import read_key


def test_a_key_that_can_be_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.key"
    assert main(["keygen", str(path)]) == 0
    assert path.stat().st_mode & 0o777 == 0o600
    key = read_key(path)
    shown = capsys.readouterr()
    assert f"--cluster-key-file {path}" in shown.out
    assert key.hex() not in shown.out + shown.err
    assert main(["keygen", str(path)]) != 0
    assert read_key(path) == key, "the old key stands"
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "keygen needs the file to write: xserve keygen cluster.key"),
        (["/nonexistent/folder/key"], "/nonexistent/folder/key"),
        (["~nobody-of-that-name/key"], "no home directory"),
    ],
)
def test_mistakes(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygen", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
