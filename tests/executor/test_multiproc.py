"""`mp` over several ranks: who answers, whose error counts, who died."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from typing import Any

import pytest

from launcher.clock import Deadline
from launcher.errors import ChildFailedError, ClosedError, DeadlineError, RemoteError, UsageError
from launcher.executor.base import Executor
from launcher.worker.reference import expected_tokens
from tests.conftest import eventually
from tests.executor.rig import generate, mp, settings_of

WORLD = 3


def test_ranks_answers_and_errors() -> None:
    with mp(settings_of(WORLD)) as executor:
        rpc = executor.collective_rpc
        assert generate(executor, [5, 6, 7], 20) == expected_tokens([5, 6, 7], 20)

        who = rpc("who")
        assert [rank for rank, _ in who] == [0, 1, 2]
        assert [pid for _, pid in who] == [child.pid for child in executor.children]
        assert rpc("who", unique_reply_rank=1)[0] == 1

        # All execute, whoever replies.
        assert rpc("bump", unique_reply_rank=2) == 1
        assert rpc("bump") == [2, 2, 2]

        # Futures with different repliers settle in the order of sending.
        slow = rpc("nap", (2, 0.3), non_block=True, unique_reply_rank=2)
        quick = rpc("nap", (2, 0.0), non_block=True, unique_reply_rank=0)
        assert not quick.done()
        assert quick.result(10) == "napped on 0"
        assert slow.done()
        assert slow.result() == "napped on 2"

        # An error comes at once, though another rank is still busy, and the late answer is not taken for a new one.
        begin = time.monotonic()
        with pytest.raises(RemoteError, match="rank 1 raised AttributeError"):
            rpc(_nap_or_fail, (2, 1, 2.5))
        assert time.monotonic() - begin < 2
        assert rpc("echo", ("fresh",)) == [(rank, ("fresh",), {}) for rank in range(WORLD)]

        # An error of a rank that is not to reply is the call's error, or else the next one's.
        with pytest.raises(RemoteError) as error:
            _error_of_a_silent_rank(rpc)
        assert error.value.rank == 1
        assert error.value.title == "Worker_DP0_PP0_TP1"
        assert rpc("bump") == [3, 3, 3]


def _nap_or_fail(worker: Any, napper: int, failing: int, seconds: float) -> str:
    if worker.rank == failing:
        raise AttributeError("failing")
    return str(worker.nap(napper, seconds))


def _error_of_a_silent_rank(rpc: Any) -> None:
    rpc("slow_fail", (1, 0.2), unique_reply_rank=0)  # rank 0 answers before rank 1 fails
    time.sleep(0.0)
    deadline = Deadline.after(10)
    while not deadline.expired:
        rpc("who", unique_reply_rank=0)
    raise AssertionError("the error was lost")


def test_deadlines_name_the_silent_and_stale_answers_are_dropped() -> None:
    with mp(settings_of(WORLD)) as executor:
        rpc = executor.collective_rpc
        pid = executor.children[1].pid
        with pytest.raises(DeadlineError) as error:
            rpc("nap", (1, 0.6), timeout=0.2)
        expected = f"nap: no answer within 0.2 s from rank 1 (Worker_DP0_PP0_TP1, pid {pid})"
        assert str(error.value) == expected
        assert rpc("echo", ("next",)) == [(rank, ("next",), {}) for rank in range(WORLD)]

        # result(timeout) gives up the wait, not the call.
        future = rpc("nap", (0, 0.4), non_block=True)
        with pytest.raises(DeadlineError, match="from rank 0"):
            future.result(0.05)
        assert future.result(10) == ["napped on 0", "napped on 1", "napped on 2"]

        # The deadline runs from the sending, shared by all ranks; an answer that came in time is good, asked for late.
        future = rpc("who", non_block=True, timeout=0.3)
        time.sleep(0.35)
        assert len(future.result()) == WORLD


def test_what_does_not_pickle() -> None:
    with mp(settings_of(2)) as executor:
        with pytest.raises(RemoteError, match=r"raised UsageError: a RpcReply cannot be sent: .*pickle"):
            executor.collective_rpc("unpicklable")
        with pytest.raises(UsageError, match=r"cannot be sent: .*pickle"):
            executor.collective_rpc("echo", (threading.Lock(),))
        # Only the caller has this module: the workers can't make the object, and say so.
        with pytest.raises(RemoteError, match="not_there_module"):
            executor.collective_rpc("echo", (_Elsewhere(),))
        assert executor.collective_rpc("bump") == [1, 1]


class _Elsewhere:
    def __reduce__(self) -> Any:
        return __import__, ("not_there_module",)


def test_arrays_and_tensors() -> None:
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    with mp(settings_of(2)) as executor:
        array = numpy.arange(1 << 19, dtype=numpy.float32)  # 2 MiB: twice the ring
        tensor = torch.ones(1000, dtype=torch.float64)
        future = executor.collective_rpc("total", (array,), non_block=True)
        array[:] = 0  # the sender may go on at once
        n = 1 << 19
        assert future.result(20) == pytest.approx([n * (n - 1) / 2] * 2, rel=1e-3)
        assert executor.collective_rpc("total", (tensor,)) == [1000.0, 1000.0]
        _, (back,), _ = executor.collective_rpc("echo", (tensor,), unique_reply_rank=1)
        assert torch.equal(back, tensor)


@pytest.mark.parametrize("during", ["call", "idle"])
def test_a_killed_worker_is_named_at_once(during: str) -> None:
    with mp(settings_of(WORLD)) as executor:
        executor.check_health()  # all have got as far as serving
        pid = executor.children[1].pid
        future = executor.collective_rpc("nap", (1, 60.0), non_block=True) if during == "call" else None
        begin = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ChildFailedError) as error:
            future.result() if future is not None else _hear_of_it(executor)
        assert time.monotonic() - begin < 1.0
        assert str(error.value) == (f"rank 1 (Worker_DP0_PP0_TP1), pid {pid}, step serving: died of signal 9 (SIGKILL)")
        with pytest.raises(ChildFailedError):
            executor.collective_rpc("who")


def _hear_of_it(executor: Executor) -> None:
    """As the idle core does."""
    assert select.select(executor.watch_fds(), [], [], 5)[0]
    eventually(executor.raise_if_dead, 5)


def test_a_lost_connection_is_not_the_cause() -> None:
    with mp(settings_of(WORLD)) as executor, pytest.raises(ChildFailedError, match=r"rank 1 .*SIGKILL"):
        executor.collective_rpc("lost_peer")


def test_a_worker_that_ends_by_itself() -> None:
    with mp(settings_of(2)) as executor:
        os.kill(executor.children[0].pid, signal.SIGTERM)
        with pytest.raises(ChildFailedError, match=r"rank 0 .*ended by itself \(exit 0\)"):
            eventually(lambda: executor.raise_if_dead(), 10)


def test_shutdown_ends_pending_calls_and_cuts_the_stuck_short() -> None:
    with mp(settings_of(2)) as executor:
        future = executor.collective_rpc("nap", (1, 60.0), non_block=True)
        begin = time.monotonic()
        assert executor.shutdown(1.0) == ["Worker_DP0_PP0_TP1"]
        assert time.monotonic() - begin < 3
        with pytest.raises(ClosedError):
            future.result()
        assert executor.watch_fds() == []


def test_idle_costs_nothing() -> None:
    import psutil

    with mp(settings_of(2)) as executor:
        executor.check_health()
        workers = [psutil.Process(child.pid) for child in executor.children]
        before = [sum(w.cpu_times()[:2]) for w in workers]
        time.sleep(1.0)  # the time that is measured, not a wait for something
        assert [sum(w.cpu_times()[:2]) for w in workers] == pytest.approx(before, abs=0.011)
