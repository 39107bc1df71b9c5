from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.launch import Launch


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A short path: sockets lie below it."""
    path = Path(tempfile.mkdtemp(prefix="xs"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def launch(runtime: Path) -> Iterator[Callable[..., Launch]]:
    made: list[Launch] = []

    def start(*arguments: str, **options: object) -> Launch:
        here = runtime / str(len(made))
        here.mkdir()
        made.append(Launch(here, *arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    yield start
    for each in made:
        each.close()
