"""What a child of the forkserver has of it: the modules, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from launcher.process import kernel
from launcher.process.helper import HelperSettings
from launcher.process.helper_client import Helper, helper_spec
from launcher.process.nursery import Child, Nursery
from launcher.process.wires import Wires
from tests.conftest import eventually
from tests.process.conftest import LAUNCH_ID, spec

_SUBREAPER = 36


class Silent:
    def feed(self, title: str, pid: int, data: bytes) -> None:
        """Not looked at."""

    def finish(self, title: str, pid: int) -> None:
        """Not looked at."""

    def tail(self, title: str) -> tuple[str, ...]:
        return ()


@pytest.fixture
def helper() -> Iterator[tuple[Helper, dict[str, Any]]]:
    """A warm helper whose preload has left a mess; what it said of itself."""
    kernel.become_subreaper()
    wires = Wires(Silent(), lambda _: 0)
    settings = HelperSettings(preload=("tests.process.dirty",), launch_id=LAUNCH_ID)
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    made = Helper(helper_spec("forkserver", settings, environment), wires, None)
    said: dict[str, Any] = {}
    made.on_ready = said.update
    made.start()

    def ready() -> bool:
        made.pump()
        assert made.failure is None, made.failure
        return bool(said)

    eventually(ready, 40, "the helper's preload")
    yield made, said
    made.close()
    wires.close()
    kernel._prctl(_SUBREAPER, 0)


def test_children_inherit_nothing(helper: tuple[Helper, dict[str, Any]]) -> None:
    forker, said = helper
    assert said["unsafe_to_fork"] == [], "torch and numpy are loaded: one thread, no device"
    cpu = min(os.sched_getaffinity(0))
    nursery = Nursery("forkserver", forker=forker)
    try:
        specs = [spec("confesses", rank, cpus=(cpu,), memory_nodes=(0,)) for rank in range(3)]
        children = nursery.start_all(specs)
        nursery.wait_ready(20)
        confessions = [_of(child) for child in children]
        for rank, one in enumerate(confessions):
            assert one["title"] == f"xserve::Worker_{rank}"
            assert one["comm"] == f"xs:w{rank}"
            assert one["blocked"] == []
            assert one["handlers"] == []
            kinds = sorted(target.partition(":")[0] for fd, target in one["fds"].items() if int(fd) > 2)
            assert kinds == ["anon_inode", "socket"], f"its poll and its line to the parent: {one['fds']}"
            assert "dirty" not in one["title"]
        draws = list(zip(*(one["draws"] for one in confessions), strict=True))
        for source, numbers in zip(("python", "numpy", "torch"), draws, strict=True):
            assert len(set(numbers)) == 3, f"{source}: {numbers}"
        assert [(one["cpus"], one["nodes"]) for one in confessions] == [([cpu], [0])] * 3
    finally:
        nursery.close()


def _of(child: Child) -> dict[str, Any]:
    assert child.ready_info is not None
    return child.ready_info
