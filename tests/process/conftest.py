from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from launcher.process.nursery import Nursery
from launcher.process.spec import ChildMethod, ProcessSpec

LAUNCH_ID = f"test-{uuid.uuid4().hex}"


def spec(target: str, rank: int = 0, **fields: object) -> ProcessSpec:
    env = {"XSERVE_LAUNCH_ID": LAUNCH_ID}
    return ProcessSpec(
        title=f"Worker_{rank}",
        comm=f"xs:w{rank}",
        role="worker",
        rank=rank,
        target=f"tests.process.kids:{target}",
        env=env,
        launch_id=LAUNCH_ID,
        **fields,  # type: ignore[arg-type]
    )


@pytest.fixture(params=["fork", "spawn"])
def method(request: pytest.FixtureRequest) -> ChildMethod:
    value: ChildMethod = request.param
    return value


@pytest.fixture
def nursery(method: ChildMethod) -> Iterator[Nursery]:
    made = Nursery(method)
    yield made
    made.close()


@pytest.fixture
def start(nursery: Nursery) -> Callable[..., Nursery]:
    def start_them(*targets: str) -> Nursery:
        nursery.start_all([spec(target, rank) for rank, target in enumerate(targets)])
        return nursery

    return start_them


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
