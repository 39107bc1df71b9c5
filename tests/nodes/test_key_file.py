from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.errors import HostError, UsageError
from launcher.nodes.key_file import read_key, write_key


def test_what_is_written_can_be_read_and_only_by_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    old = os.umask(0)
    try:
        write_key(path)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600
    key = read_key(path)
    assert len(key) == 32
    other = tmp_path / "other.key"
    write_key(other)
    assert read_key(other) != key


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    path.write_text("precious")
    with pytest.raises(UsageError, match="exists already"):
        write_key(path)
    assert path.read_text() == "precious"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="exists already"):
        write_key(link)


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="No such file"):
        write_key(tmp_path / "no" / "such")


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="xserve keygen"):
        read_key(tmp_path / "no.key")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_readable_by_others(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "cluster.key"
    write_key(path)
    path.chmod(mode)
    with pytest.raises(UsageError, match=rf"mode {mode:04o}\): chmod 600 {path}"):
        read_key(path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "# only a comment\n",
        "ab" * 31,
        "ab" * 33,
        "zz" * 32,
        "ab " * 32,
        "ab" * 32 + "\n" + "ab" * 32,
        "\udcff" * 64,
        "#" * 5000,
    ],
)
def test_no_key_in_it_and_it_is_not_repeated(tmp_path: Path, content: str) -> None:
    path = tmp_path / "cluster.key"
    path.write_bytes(content.encode(errors="surrogateescape"))
    path.chmod(0o600)
    with pytest.raises(UsageError) as caught:
        read_key(path)
    assert "abab" not in str(caught.value)


def test_comments_and_blanks_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    path.write_text("# one\n\n  " + "0f" * 32 + "  \r\n# two\n")
    path.chmod(0o600)
    assert read_key(path) == b"\x0f" * 32


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    with pytest.raises(UsageError, match="no regular file"):
        read_key(fifo)
    with pytest.raises(UsageError, match=r"regular file|cannot be read"):
        read_key(tmp_path)
