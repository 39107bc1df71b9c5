"""What holds for every executor: the same calls, the same tokens, the same errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from launcher.errors import ClosedError, RemoteError, UsageError
from launcher.executor.base import Executor
from launcher.worker.reference import expected_tokens
from tests.executor.rig import generate, mp, settings_of, uni

Start = Callable[..., AbstractContextManager[Executor]]


@pytest.fixture(params=["uni", "mp"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    settings = settings_of(1, worker_extension="tests.executor.workers:Extension")
    start: Start = uni if request.param == "uni" else mp
    with start(settings) as started:
        yield started


def _add(worker: object, a: int, b: int = 0) -> int:
    return a + b


def test_calls_and_errors(executor: Executor) -> None:
    """One start for many looks: a worker's start is what costs."""
    assert generate(executor, list(range(30)), 40) == expected_tokens(list(range(30)), 40)

    rpc = executor.collective_rpc
    assert rpc("echo", (1, "x"), {"k": [2]}) == [(0, (1, "x"), {"k": [2]})]
    assert rpc("echo", unique_reply_rank=0) == (0, (), {})
    assert rpc("from_extension") == ["extended"]
    assert rpc(_add, (2,), {"b": 3}) == [5]
    assert rpc(lambda worker: worker.settings.ranks.world_size) == [1]

    futures = [rpc("bump", non_block=True, unique_reply_rank=0) for _ in range(5)]
    assert futures[4].result(10) == 5
    assert [f.result() for f in futures] == [1, 2, 3, 4, 5]
    assert all(f.done() for f in futures)

    future = rpc("fail", (0, "first line\nsecond"), non_block=True)
    with pytest.raises(RemoteError) as error:
        future.result()
    assert error.value.headline == "rank 0 raised ValueError: first line"
    assert error.value.type_name == "ValueError"
    assert error.value.rank == 0
    assert "raise ValueError(text)" in error.value.remote_traceback
    assert "second" in str(error.value)

    with pytest.raises(RemoteError, match="raised SystemExit: 3"):
        rpc("exit_all")
    with pytest.raises(RemoteError, match=r"has no method 'no_such'.*--worker-extension"):
        rpc("no_such")
    with pytest.raises(UsageError, match="unique_reply_rank=1"):
        rpc("who", unique_reply_rank=1)
    with pytest.raises(UsageError, match="2 KV configs for 1 ranks"):
        executor.initialize_from_config([None, None])  # type: ignore[list-item]

    executor.check_health()
    executor.raise_if_dead()
    assert executor.shutdown(10) == []
    assert executor.shutdown(10) == []
    with pytest.raises(ClosedError):
        rpc("who")


@pytest.mark.parametrize("start", [uni, mp])
def test_before_the_start(start: Start) -> None:
    from launcher.executor.multiproc import MultiprocExecutor
    from launcher.executor.uniproc import UniProcExecutor
    from tests.executor.rig import specs_of

    settings = settings_of(1)
    executor: Executor = (
        UniProcExecutor(settings) if start is uni else MultiprocExecutor(settings, specs=specs_of(settings))
    )
    try:
        with pytest.raises(ClosedError, match=r"call start\(\) first"):
            executor.collective_rpc("who")
    finally:
        executor.shutdown(5)


def test_uni_refuses_a_larger_world() -> None:
    with pytest.raises(UsageError, match="2 are asked for; use --backend mp"), uni(settings_of(2)):
        pass
