"""The tables and pure parts of the room: every cell."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest

from launcher.errors import Failure
from launcher.process.causes import describe_exit, first_cause
from launcher.process.lifecycle import TABLE, Action, Event, State, next_cell
from launcher.process.oom import OomWatch, oom_kills
from launcher.process.reports import ChildGone, ChildStarted, FailureReport, ReadyReport, Step, StepReport
from launcher.process.restart import TABLE as TABLE_OF_RESTARTS
from launcher.process.restart import Budget, Kind, Policy, RestartSettings, kind_of
from launcher.process.spec import ProcessSpec
from launcher.process.stop import StopSequence
from launcher.process.tree import Tree

S, E, A = State, Event, Action


def test_the_table_is_total() -> None:
    assert set(TABLE) == set(State)
    for row in TABLE.values():
        assert set(row) == set(Event)


@pytest.mark.parametrize(
    ("state", "event", "after", "action"),
    [
        (S.STARTING, E.ALL_READY, S.READY, A.ANNOUNCE),
        (S.STARTING, E.STOP_ASKED, S.STOPPING, A.INTERRUPT),
        (S.STARTING, E.FAILED, S.STOPPING, A.FAIL),
        (S.STARTING, E.UNIT_FAILED, S.STARTING, A.RECOVER),
        (S.STARTING, E.DRAINED, S.STARTING, A.NOTHING),
        (S.STARTING, E.ALL_GONE, S.GONE, A.LEAVE),
        (S.READY, E.ALL_READY, S.READY, A.NOTHING),
        (S.READY, E.STOP_ASKED, S.DRAINING, A.DRAIN),
        (S.READY, E.FAILED, S.STOPPING, A.FAIL),
        (S.READY, E.UNIT_FAILED, S.RECOVERING, A.RECOVER),
        (S.READY, E.DRAINED, S.READY, A.NOTHING),
        (S.READY, E.ALL_GONE, S.GONE, A.LEAVE),
        (S.RECOVERING, E.ALL_READY, S.READY, A.RESUME),
        (S.RECOVERING, E.STOP_ASKED, S.DRAINING, A.CUT),
        (S.RECOVERING, E.UNIT_FAILED, S.RECOVERING, A.RECOVER),
        (S.RECOVERING, E.FAILED, S.STOPPING, A.FAIL),
        (S.RECOVERING, E.DRAINED, S.RECOVERING, A.NOTHING),
        (S.RECOVERING, E.ALL_GONE, S.GONE, A.LEAVE),
        (S.DRAINING, E.ALL_READY, S.DRAINING, A.NOTHING),
        (S.DRAINING, E.STOP_ASKED, S.STOPPING, A.FORCE),
        (S.DRAINING, E.UNIT_FAILED, S.STOPPING, A.FAIL),
        (S.DRAINING, E.FAILED, S.STOPPING, A.FAIL),
        (S.DRAINING, E.DRAINED, S.STOPPING, A.STOP),
        (S.DRAINING, E.ALL_GONE, S.GONE, A.LEAVE),
        (S.STOPPING, E.ALL_READY, S.STOPPING, A.NOTHING),
        (S.STOPPING, E.STOP_ASKED, S.STOPPING, A.FORCE),
        (S.STOPPING, E.UNIT_FAILED, S.STOPPING, A.NOTHING),
        (S.STOPPING, E.FAILED, S.STOPPING, A.NOTHING),
        (S.STOPPING, E.DRAINED, S.STOPPING, A.NOTHING),
        (S.STOPPING, E.ALL_GONE, S.GONE, A.LEAVE),
        *((S.GONE, event, S.GONE, A.NOTHING) for event in Event),
    ],
)
def test_cell(state: State, event: Event, after: State, action: Action) -> None:
    assert next_cell(state, event) == (after, action)


def failure(
    title: str, kind: str, at: float, role: str = "worker", number: int | None = None, node_lost: bool = False
) -> Failure:
    return Failure(
        title=title,
        role=role,
        kind=kind,  # type: ignore[arg-type]
        headline=kind,
        at=at,
        signal=number,
        node_lost=node_lost,
    )


@pytest.mark.parametrize(
    ("failures", "cause", "others"),
    [
        ([failure("a", "raised", 1)], "a", []),
        ([failure("a", "peer_lost", 1), failure("b", "raised", 2)], "b", ["a"]),
        ([failure("a", "raised", 1), failure("b", "died", 2)], "b", ["a"]),
        ([failure("a", "raised", 2), failure("b", "raised", 1)], "b", ["a"]),
        ([failure("a", "timeout", 1), failure("b", "raised", 2)], "b", ["a"]),
        ([failure("a", "peer_lost", 1), failure("b", "timeout", 2)], "b", ["a"]),
        # one process, two reports: the weightier one stands
        ([failure("a", "peer_lost", 1), failure("a", "died", 2)], "a", []),
        # workers that the kernel killed because their engine core had died
        (
            [
                failure("w0", "died", 1, number=9),
                failure("w1", "died", 1.1, number=9),
                failure("core", "died", 2, role="engine_core", number=9),
            ],
            "core",
            ["w0", "w1"],
        ),
        # a lost node explains closed connections, and nothing more
        ([failure("a", "peer_lost", 1), failure("n", "peer_lost", 2, node_lost=True)], "n", ["a"]),
        ([failure("n", "peer_lost", 1, node_lost=True), failure("a", "raised", 2)], "a", ["n"]),
        ([failure("n", "peer_lost", 1, node_lost=True), failure("a", "timeout", 2)], "a", ["n"]),
        # another node's death, passed on as the loss of that node
        ([failure("n", "died", 1, number=9, node_lost=True), failure("a", "died", 2)], "a", ["n"]),
        # a worker that was killed, and a core that only noticed
        (
            [failure("core", "peer_lost", 1, role="engine_core"), failure("w0", "died", 2, number=9)],
            "w0",
            ["core"],
        ),
    ],
)
def test_first_cause(failures: list[Failure], cause: str, others: list[str]) -> None:
    first, rest = first_cause(failures)
    assert first.title == cause
    assert [f.title for f in rest] == others


@pytest.mark.parametrize(
    ("policy", "kind", "restart"),
    [
        *(("never", kind, False) for kind in Kind),
        ("on-failure", Kind.PERMANENT, False),
        ("on-failure", Kind.FIRST_START, False),
        ("on-failure", Kind.SERVICE, True),
        ("always", Kind.PERMANENT, False),
        ("always", Kind.FIRST_START, True),
        ("always", Kind.SERVICE, True),
        ("on-failure", Kind.PEER_MISSING, False),
        ("on-failure", Kind.PEER_LOST, True),
        ("always", Kind.PEER_MISSING, True),
        ("always", Kind.PEER_LOST, True),
    ],
)
def test_restart_cell(policy: Policy, kind: Kind, restart: bool) -> None:
    assert set(TABLE_OF_RESTARTS) == {"never", "on-failure", "always"}
    assert all(set(row) == set(Kind) for row in TABLE_OF_RESTARTS.values())
    assert Budget(RestartSettings(policy=policy)).failed(0.0, kind).restart is restart
    assert not Budget(RestartSettings(policy=policy, max_restarts=0)).failed(0.0, kind).restart


@pytest.mark.parametrize(
    ("permanent", "node_lost", "been_ready", "joining", "kind"),
    [
        (False, False, False, False, Kind.FIRST_START),
        (False, False, False, True, Kind.FIRST_START),
        (False, False, True, False, Kind.SERVICE),
        (False, False, True, True, Kind.SERVICE),
        (False, True, False, False, Kind.PEER_MISSING),
        (False, True, False, True, Kind.PEER_MISSING),
        (False, True, True, False, Kind.PEER_LOST),
        (False, True, True, True, Kind.PEER_MISSING),
        *(
            (True, lost, been, joins, Kind.PERMANENT)
            for lost in (False, True)
            for been in (False, True)
            for joins in (False, True)
        ),
    ],
)
def test_what_failed(permanent: bool, node_lost: bool, been_ready: bool, joining: bool, kind: Kind) -> None:
    assert kind_of(permanent=permanent, node_lost=node_lost, been_ready=been_ready, joining=joining) is kind


def test_a_lost_node_is_not_counted() -> None:
    budget = Budget(RestartSettings(policy="on-failure", max_restarts=1))
    for at in range(0, 50, 5):
        budget.ready(at)
        decision = budget.failed(at + 1, Kind.PEER_LOST)
        assert (decision.restart, decision.delay, decision.number) == (True, 0.0, 0)
    assert budget.failed(60, Kind.SERVICE).number == 1
    assert budget.failed(61, Kind.PEER_LOST).restart, "though all others are spent"
    assert budget.failed(62, Kind.SERVICE).spent


def test_lives_that_never_serve_do_not_spin() -> None:
    budget = Budget(RestartSettings(policy="always", max_restarts=1))
    assert [budget.failed(0.0, Kind.PEER_LOST).delay for _ in range(5)] == [0, 1, 2, 4, 8]


def test_back_off_and_its_reset() -> None:
    budget = Budget(RestartSettings(policy="always", max_restarts=100))
    assert [budget.failed(0.0, Kind.SERVICE).delay for _ in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]
    budget.ready(100.0)
    assert budget.failed(159.0, Kind.SERVICE).delay == 30, "59 s of service are not enough"
    budget.ready(200.0)
    assert budget.failed(260.0, Kind.SERVICE).delay == 0


@pytest.mark.parametrize(("longest", "delays"), [(0, [0, 0, 0]), (0.2, [0, 0.2, 0.2]), (3, [0, 1, 2, 3])])
def test_the_longest_delay_can_be_set(longest: float, delays: list[float]) -> None:
    budget = Budget(RestartSettings(policy="always", max_restarts=100, longest_delay=longest))
    assert [budget.failed(0.0, Kind.SERVICE).delay for _ in delays] == delays


def test_a_spent_budget_and_a_window_that_moves() -> None:
    budget = Budget(RestartSettings(policy="on-failure", max_restarts=3, window=100))
    assert [budget.failed(t, Kind.SERVICE).number for t in (0.0, 10.0, 20.0)] == [1, 2, 3]
    spent = budget.failed(99.0, Kind.SERVICE)
    assert (spent.restart, spent.spent, spent.number) == (False, True, 3)
    again = budget.failed(100.0, Kind.SERVICE)
    assert (again.restart, again.number) == (True, 3)


def test_describe_exit() -> None:
    assert describe_exit(None, 11) == "died of signal 11 (SIGSEGV)"
    assert describe_exit(None, 9, out_of_memory=True).startswith("died of signal 9 (SIGKILL): out of memory")
    assert describe_exit(3, None) == "died with exit code 3 and no report"
    assert "nobody had asked" in describe_exit(0, None)


def test_an_oom_kill_explains_the_deaths_of_its_moment_only() -> None:
    counter = [7]
    watch = OomWatch(lambda: counter[0])
    assert not watch.struck(10.0), "it had risen before"
    counter[0] = 8
    assert watch.struck(20.0)
    assert watch.struck(20.1), "who asks second gets the same answer"
    assert not watch.struck(21.0), "a SIGKILL of somebody else's"
    counter[0] = 9
    assert watch.struck(21.0)


@pytest.mark.parametrize("version", [1, 2, 0])
def test_oom_counter(tmp_path: Path, version: int) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 3\noom_kill 7\n")
    if version == 2:
        (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
        (tmp_path / "sys/fs/cgroup/job").mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup/job/memory.events").write_text("low 0\noom 4\noom_kill 5\n")
    elif version == 1:
        (tmp_path / "proc/self/cgroup").write_text("9:cpu,memory:/job\n0::/\n")
        (tmp_path / "sys/fs/cgroup/memory/job").mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup/memory/job/memory.oom_control").write_text("under_oom 0\noom_kill 6\n")
    assert oom_kills(tmp_path) == {0: 7, 1: 6, 2: 5}[version]


def worker(rank: int) -> ProcessSpec:
    return ProcessSpec(title=f"W{rank}", role="worker", rank=rank, target="x:y")


def test_tree_takes_over_reports() -> None:
    core = ProcessSpec(title="C", role="engine_core", target="x:y", children=(worker(0), worker(1)))
    tree = Tree([core], "S")
    assert [r.title for r in tree] == ["C", "W0", "W1"]
    assert tree["W1"].parent == "C"
    tree.note("C", ChildStarted(title="W0", pid=10, start_time=5))
    assert tree.by_pid(10) is tree["W0"]
    assert tree.sessions() == {10: 5}
    assert tree.note("W0", StepReport(step=Step.MODEL, done=1, total=4, unit="MB"))
    assert not tree.note("W0", StepReport(step=Step.MODEL, done=2, total=4, unit="MB"))
    tree.note("W1", ReadyReport())
    assert tree.phase() == "W0: model 2/4 MB"
    tree.note("W0", ReadyReport())
    assert tree.phase() == "C: spawned"
    tree.note("C", ChildGone(title="W0", pid=10, exit_code=None, signal=9, wanted=False))
    assert tree["W0"].gone
    tree.started("W1", 11, 6)
    hung = msgspec.structs.replace(failure("W1", "timeout", 1), pid=11)
    tree.note("C", FailureReport(failure=failure("C", "peer_lost", 1), cause=hung))
    assert tree["W1"].failure == hung
    # A second word on the same process changes nothing.
    tree.note("C", FailureReport(failure=failure("C", "raised", 1), cause=failure("W1", "raised", 2)))
    assert tree["W1"].failure == hung


def test_who_waits_for_other_nodes() -> None:
    agent = ProcessSpec(title="A", role="node_agent", target="x:y", children=(worker(0),))
    tree = Tree([agent], "S")
    assert not tree.is_joining("A")
    tree.note("A", StepReport(step=Step.JOIN))
    tree.note("W0", StepReport(step=Step.JOIN))
    assert tree.is_joining("A")
    tree.gone("A", wanted=False)
    assert tree.is_joining("A"), "it did when it ended"
    tree.note("W0", StepReport(step=Step.STOPPING))
    assert tree.is_joining("A"), "its workers go with it, and say so"
    tree.note("W0", StepReport(step=Step.IMPORT))
    assert not tree.is_joining("A"), "the group had begun"


class FakeChild:
    def __init__(self, title: str, ready: bool = True) -> None:
        self.title, self.is_ready, self.is_gone = title, ready, False
        self.wanted = self.cut_short = False
        self.signals: list[int] = []

    def signal(self, number: int) -> None:
        self.signals.append(number)


def test_stop_sequence_escalates(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("launcher.clock.now", lambda: now[0])
    told: list[str] = []
    ready, loading = FakeChild("ready"), FakeChild("loading", ready=False)
    sequence = StopSequence([ready, loading], 10, lambda child, _: told.append(child.title))
    assert told == ["ready", "loading"]
    assert (ready.signals, loading.signals) == ([], [signal.SIGTERM])
    assert ready.wanted
    assert sequence.advance() == pytest.approx(7.5)
    now[0] += 7.5
    assert sequence.advance() == pytest.approx(2.5)
    assert ready.signals == [signal.SIGTERM]
    loading.is_gone = True
    now[0] += 2.5
    sequence.advance()
    assert ready.signals == [signal.SIGTERM, signal.SIGKILL]
    assert [c.title for c in sequence.cut_short] == ["ready"]
    assert not sequence.done
    ready.is_gone = True
    assert sequence.done


def test_a_forced_stop_spares_a_herald_for_a_moment_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("launcher.clock.now", lambda: now[0])
    told: list[str] = []
    herald, worker = FakeChild("herald"), FakeChild("worker")
    sequence = StopSequence([herald, worker], 0, lambda child, _: told.append(child.title))
    sequence.force({"herald"})
    assert (told, herald.signals, worker.signals) == (["herald"], [], [signal.SIGKILL])
    assert sequence.advance() == pytest.approx(0.5)
    now[0] += 0.5
    sequence.advance()
    assert herald.signals == [signal.SIGKILL]
    again = StopSequence([other := FakeChild("herald")], 0, lambda child, _: told.append(child.title))
    again.force({"herald"})
    again.force({"herald"})
    assert other.signals == [signal.SIGKILL]


def test_stop_sequence_with_no_budget_and_a_stuck_child(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("launcher.clock.now", lambda: now[0])
    told: list[str] = []
    stuck = FakeChild("stuck")
    sequence = StopSequence([stuck], 0, lambda child, _: told.append(child.title))
    sequence.advance()
    assert told == []
    assert stuck.signals == [signal.SIGKILL]
    now[0] += 5
    assert sequence.done
    assert sequence.alive == [stuck]
