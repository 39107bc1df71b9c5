"""``--model``: a directory as it is, a hub id by way of the cache; everything else one line."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from launcher.errors import HostError, UsageError
from launcher.plan.model_source import resolve_model
from tests.plan.model_files import write_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def refused(value: str, kind: type[Exception] = UsageError) -> str:
    with pytest.raises(kind) as caught:
        resolve_model(value)
    line = str(caught.value)
    assert "\n" not in line
    assert value in line
    return line


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("org/é b").mkdir(parents=True)
    assert resolve_model(str(tmp_path / "org")) == tmp_path / "org"
    assert resolve_model("org/é b") == tmp_path / "org" / "é b"
    assert resolve_model("~/org") == tmp_path / "org"
    assert resolve_model(".") == tmp_path


@pytest.mark.parametrize(
    "value",
    ["/nowhere/at/all", "./org/name", "../x", "~/no such", "no_slash", "a/b/c", "org/", "a b/c", "here/name"],
)
def test_what_looks_like_a_path_is_never_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("here").mkdir()
    assert "no such directory" in refused(value)


def test_an_empty_value() -> None:
    with pytest.raises(UsageError, match="--model is empty"):
        resolve_model("")


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    assert "is a file" in refused(str(tmp_path / "x"))


def test_a_path_that_cannot_be_looked_at() -> None:
    assert "cannot be read: File name too long" in refused("/" + "x" * 300)
    assert "no home directory" in refused("~nobody-of-that-name-here/x")


def test_without_the_hubs_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "xserve[serve]" in refused("org/name")


# --- with the library, in its own process --------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub's with one whole model, ``org/whole``, and no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    snapshot = tmp_path / "models--org--whole" / "snapshots" / COMMIT
    write_model(snapshot)
    refs = tmp_path / "models--org--whole" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    return tmp_path


def test_a_cached_model(hub: Path) -> None:
    assert resolve_model("org/whole") == hub / "models--org--whole" / "snapshots" / COMMIT


def test_a_model_that_is_not_cached(hub: Path) -> None:
    line = refused("org/other")
    assert "no such directory" in line
    assert "HF_HUB_OFFLINE" in line


def test_an_id_that_the_hub_would_never_have(hub: Path) -> None:
    assert "no Hugging Face id" in refused("org/na..me")


def test_a_cached_model_is_not_asked_for_again(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert resolve_model("org/whole").name == COMMIT


@pytest.mark.slow
def test_a_hub_that_does_not_answer(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "could not give it" in refused("org/other", HostError)
