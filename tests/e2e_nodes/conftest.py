"""Nets and launches for a test, all of it gone after it."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from _testnet import NoNet, Testnet

from tests.e2e_nodes.hosts import Host

MakeNet = Callable[..., Testnet]
Start = Callable[..., Host]


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A short path: sockets lie below it."""
    path = Path(tempfile.mkdtemp(prefix="xs"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def make_net() -> Iterator[MakeNet]:
    with contextlib.ExitStack() as made:

        def make(nodes: int = 2, **how: bool) -> Testnet:
            try:
                return made.enter_context(Testnet(nodes, **how))
            except NoNet as reason:
                pytest.skip(str(reason))

        yield make


@pytest.fixture
def net(make_net: MakeNet) -> Testnet:
    """Two nodes with IPv4."""
    return make_net()


@pytest.fixture
def start(make_net: MakeNet, runtime: Path) -> Iterator[Start]:
    """start(net, node, *flags of launch, env=…, fault=…)"""
    made: list[Host] = []

    def launch(net: Testnet, node: int, *arguments: str, **options: object) -> Host:
        here = runtime / str(len(made))
        here.mkdir()
        made.append(Host(net, node, here, *arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    yield launch
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from launcher.models.tiny import make_tiny  # it imports torch, which the other tests here need not
    from tests.e2e_model.conftest import ALL_NAMED

    return make_tiny(tmp_path_factory.mktemp("llama"), vocab_size=ALL_NAMED)
