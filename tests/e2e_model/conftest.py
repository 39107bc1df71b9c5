"""Models, made once per run, and a runtime directory with a short path for each test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import envs
from launcher.models.demo import demo_directory, is_whole
from launcher.models.tiny import make_tiny

ALL_NAMED = 261
"""A vocabulary of just the byte tokenizer's tokens: each has bytes of its own, so an answer's tokens can be told."""


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("llama"), vocab_size=ALL_NAMED)


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", seed=1, vocab_size=ALL_NAMED)


@pytest.fixture
def demo() -> Path:
    directory = demo_directory(envs.cache_dir())
    if not is_whole(directory):
        pytest.skip(f"no demo model in {directory}: make it with scripts/make_demo_model")
    return directory


@pytest.fixture
def runtime() -> Iterator[Path]:
    # pytest's own directories have paths too long for sockets.
    directory = Path(tempfile.mkdtemp(prefix="xs-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory)
