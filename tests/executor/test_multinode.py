"""`mp-nodes` over loopback: same answers as `mp`, and whose fault it was when it ends."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

import psutil
import pytest

from launcher.errors import ChildFailedError, ClosedError, Failure, RemoteError, UsageError
from launcher.executor.base import Executor, StepPlan
from launcher.nodes.messages import CloseGroup, OpenGroup
from launcher.worker.reference import expected_tokens
from tests.conftest import eventually
from tests.executor.nodes_rig import KEY, Agent, group
from tests.executor.rig import generate


def hear(executor: Executor, timeout: float = 10) -> None:
    """As the idle core does."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        select.select(executor.watch_fds(), [], [], 0.25)
        executor.raise_if_dead()
    raise AssertionError("nothing was heard")


@pytest.mark.parametrize("key", [b"", KEY], ids=["open", "key"])
def test_calls_and_errors(tmp_path: Path, key: bytes) -> None:
    """One start for many looks."""
    numpy = pytest.importorskip("numpy")
    with group(tmp_path, key=key) as made:
        executor, rpc = made.executor, made.executor.collective_rpc
        assert generate(executor, [5, 6, 7], 20) == expected_tokens([5, 6, 7], 20)
        who = rpc("who")
        assert [rank for rank, _ in who] == [0, 1, 2, 3]
        assert [pid for _, pid in who[2:]] == made.nodes[0].pids
        assert rpc("who", unique_reply_rank=3)[0] == 3
        specs = rpc("kv_cache_spec")
        assert len({spec.vocab_size for spec in specs}) == 1
        assert rpc("echo", (None, True, 1, 1.5, "x", b"y"), {"k": [1, {"a": b""}]}) == [
            [rank, [None, True, 1, 1.5, "x", b"y"], {"k": [1, {"a": b""}]}] for rank in range(4)
        ]

        # In order, whoever answers.
        calls = [rpc("bump", non_block=True, unique_reply_rank=number % 4) for number in range(1000)]
        assert [call.result() for call in calls] == list(range(1, 1001))

        # Arrays, both ways; the sender's memory is free at once.
        n = 1 << (22 if key else 24)
        array = numpy.arange(n, dtype=numpy.float32)  # 64 MiB: sixty-four times the ring
        total = rpc("total", (array,), non_block=True)
        array[:] = 0
        assert total.result(60) == pytest.approx([n * (n - 1) / 2] * 4, rel=1e-3)
        sent = numpy.arange(3_000_000, dtype=numpy.int16).reshape(3, -1)
        answer = rpc("echo", (sent,), unique_reply_rank=2)
        assert numpy.array_equal(answer[1][0], sent)

        # A remote exception has its own traceback, and says where it was.
        with pytest.raises(RemoteError) as error:
            rpc("fail", (3, "first\nsecond"))
        assert error.value.headline == "rank 3 on node 1 (far.example) raised ValueError: first"
        assert (error.value.title, error.value.node) == ("Worker_DP0_PP0_TP3", 1)
        assert "raise ValueError(text)" in error.value.remote_traceback

        # What cannot cross is told at once, and harms nothing.
        with pytest.raises(UsageError, match=r"<lambda> is a callable.*cannot cross nodes: give the method's name"):
            rpc(lambda worker: worker)
        with pytest.raises(UsageError, match=r"an argument of echo cannot cross nodes: it holds a builtins\.set"):
            rpc("echo", ([{1}],))
        with pytest.raises(RemoteError, match=r"raised UsageError: the answer cannot cross nodes: .*lock"):
            rpc("unpicklable")
        assert rpc("bump") == [1001] * 4
        executor.check_health()
        assert executor.shutdown(10) == []
        assert "ended orderly" in made.nodes[0].last_words()
        with pytest.raises(ClosedError):
            rpc("who")
        assert eventually(lambda: [word for word in made.agent.heard if isinstance(word, CloseGroup) and word.orderly])


def test_a_plan_crosses_once_and_idle_costs_nothing(tmp_path: Path) -> None:
    with group(tmp_path) as made:
        executor = made.executor
        outside = executor._outside
        assert outside is not None
        generate(executor, [1], 2)
        before = outside.link.sent_bytes[1]
        plan = StepPlan(99, freed=os.urandom(32768))
        with pytest.raises(RemoteError):
            executor.execute_model(plan)  # the reference worker knows no such slots
        assert 32768 <= outside.link.sent_bytes[1] - before <= 1.1 * 32768

        eventually(executor.is_idle, 5)
        processes = [psutil.Process(), psutil.Process(made.nodes[0].process.pid)]
        made.agent.close()  # the stand-in polls
        eventually(lambda: executor.raise_if_dead() or not select.select(executor.watch_fds(), [], [], 0.2)[0])
        used = [sum(process.cpu_times()[:2]) for process in processes]
        time.sleep(1.0)  # the time that is measured, not a wait for something
        assert [sum(process.cpu_times()[:2]) for process in processes] == pytest.approx(used, abs=0.011)


@pytest.mark.parametrize("during", ["call", "idle"])
def test_a_killed_worker_of_another_node(tmp_path: Path, during: str) -> None:
    with group(tmp_path) as made:
        executor = made.executor
        executor.check_health()
        future = executor.collective_rpc("nap", (1, 60.0), non_block=True) if during == "call" else None
        os.kill(made.nodes[0].pids[1], signal.SIGKILL)
        with pytest.raises(ChildFailedError) as error:
            future.result(20) if future is not None else hear(executor)
        cause = error.value.cause
        assert (cause.rank, cause.node, cause.host, cause.signal) == (3, 1, "far.example", 9)
        assert "rank 3 (Worker_DP0_PP0_TP3) on node 1 (far.example)" in str(error.value)
        assert error.value.exit_code == 1
        executor.shutdown(0.5)
        assert "ChildFailedError" in made.nodes[0].last_words()


def test_a_lost_connection_is_not_the_cause(tmp_path: Path) -> None:
    """Rank 1, on node 0, kills itself; all others say that a peer is gone."""
    with group(tmp_path) as made, pytest.raises(ChildFailedError, match=r"rank 1 .*SIGKILL"):
        made.executor.collective_rpc("lost_peer")


def test_a_killed_relay(tmp_path: Path) -> None:
    with group(tmp_path) as made:
        future = made.executor.collective_rpc("nap", (3, 60.0), non_block=True)
        os.kill(made.nodes[0].process.pid, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(ChildFailedError) as error:
            future.result(20)
        assert time.monotonic() - begin < 3
        assert error.value.exit_code == 69
        assert error.value.cause.node_lost
        assert "node 1 (far.example, 127.0.0.1) is gone: its connection was closed" in str(error.value)
        eventually(lambda: not any(psutil.pid_exists(pid) for pid in made.nodes[0].pids), 5)


def test_the_cause_of_a_failure_is_told_to_the_nodes(tmp_path: Path) -> None:
    with group(tmp_path) as made:
        os.kill(made.executor.children[0].pid, signal.SIGKILL)
        with pytest.raises(ChildFailedError):
            hear(made.executor)
        made.executor.shutdown(1)
        words = made.nodes[0].last_words()
        assert "ended failed rank 0 (Worker_DP0_PP0_TP0)" in words
        closed = eventually(lambda: [word for word in made.agent.heard if isinstance(word, CloseGroup)])
        assert isinstance(closed, list)
        assert closed[0].failure is not None
        assert closed[0].failure.rank == 0


def test_a_hung_rank_of_another_node_is_named(tmp_path: Path) -> None:
    with group(tmp_path) as made:
        executor = made.executor
        executor.check_health()
        assert executor.hung(0.5) is None
        eventually(executor.is_idle)  # it has not only answered, but says so itself
        os.kill(made.nodes[0].pids[1], signal.SIGSTOP)
        executor.collective_rpc("who", unique_reply_rank=0)
        begin = time.monotonic()
        found: list[Failure] = []
        eventually(lambda: found.extend(filter(None, [executor.hung(2.0)])) or found, 20)
        assert 2.0 <= time.monotonic() - begin < 6
        assert (found[0].rank, found[0].node, found[0].host) == (3, 1, "far.example")
        assert found[0].headline == "has not taken call 2 for 2 s (--watchdog-timeout 2)"
        os.kill(made.nodes[0].pids[1], signal.SIGCONT)
        eventually(executor.is_idle)
        assert executor.hung(2.0) is None


def test_an_agent_that_comes_again_is_told_of_the_group(tmp_path: Path) -> None:
    """While the core is idle: nobody repeats it by the clock."""
    with group(tmp_path) as made:
        executor = made.executor
        made.agent.close()
        again = Agent(f"ipc://{tmp_path}/agent.sock", [])
        try:
            end = time.monotonic() + 10
            while not again.heard and time.monotonic() < end:
                if select.select(executor.watch_fds(), [], [], 1)[0]:
                    executor.raise_if_dead()
            assert isinstance(again.heard[0], OpenGroup)
            assert executor.collective_rpc("bump") == [1] * 4
        finally:
            again.close()


def test_a_node_that_does_not_come(tmp_path: Path) -> None:
    lost = Failure(
        title="NodeAgent_N1",
        role="node_agent",
        kind="peer_lost",
        headline="node 1 did not join",
        node=1,
        node_lost=True,
    )
    with group(tmp_path, start=False, lost=lost, absent=True) as made:
        with pytest.raises(ChildFailedError, match="node 1 did not join") as error:
            made.executor.start()
        assert error.value.exit_code == 69


def test_a_node_that_takes_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its relay is stopped: what is sent waits in sockets, and then in us, but not for ever."""
    monkeypatch.setattr("launcher.executor.multinode.SEND_LIMIT", 1.0)
    with group(tmp_path) as made:
        os.kill(made.nodes[0].process.pid, signal.SIGSTOP)
        with pytest.raises(ChildFailedError, match="has taken nothing for 1 s") as error:
            _send_for_ever(made.executor)
        assert (error.value.cause.node, error.value.cause.kind) == (1, "timeout")
        with pytest.raises(ChildFailedError):
            made.executor.collective_rpc("who")
        made.executor.shutdown(0.5)


def _send_for_ever(executor: Executor) -> None:
    for _ in range(2000):
        executor.collective_rpc("echo", (bytes(1 << 20),), unique_reply_rank=0, non_block=True)
