"""The line of a slow start: who is where, for how long, and since when silent."""

from __future__ import annotations

import pytest

from launcher.process.reports import ReadyReport, Step, StepReport
from launcher.process.spec import ProcessSpec
from launcher.process.start_lines import EVERY, StartLines, describe
from launcher.process.tree import Tree


def tree_of(workers: int) -> Tree:
    def made(title: str, rank: int | None, role: str) -> ProcessSpec:
        return ProcessSpec(title=title, role=role, target="a:b", rank=rank)  # type: ignore[arg-type]

    specs = [made(f"W{rank}", rank, "worker") for rank in range(workers)]
    tree = Tree([made("Core", None, "engine_core"), *specs], "Supervisor")
    for number, record in enumerate(tree, start=100):
        tree.started(record.title, number, 1)
    return tree


def test_ranks_in_one_state_are_one_group() -> None:
    tree = tree_of(4)
    for record in tree:
        record.since, record.last_progress = 1000.0, 50.0
    tree.note("W2", StepReport(Step.DEVICE))
    tree["W2"].since, tree["W2"].last_progress = 1001.0, 51.0
    text = describe(tree, now=60.0, wall=1010.0)
    assert text == (
        "rank 2 device for 9 s, silent for 9 s; ranks 0,1,3 spawned for 10 s, silent for 10 s;"
        " Core spawned for 10 s, silent for 10 s"
    )


def test_progress_is_shown_and_is_no_silence() -> None:
    tree = tree_of(1)
    tree.note("W0", StepReport(Step.MODEL, done=120, total=538, unit="MB"))
    tree["W0"].since, tree["W0"].last_progress = 1000.0, 59.9
    assert describe([tree["W0"]], now=60.0, wall=1030.0) == "rank 0 model 120/538 MB for 30 s"


def test_ready_and_gone_and_unborn() -> None:
    tree = tree_of(3)
    tree.note("W0", ReadyReport())
    tree.gone("W1", wanted=True)
    tree["W2"].pid = 0
    assert describe([tree[f"W{n}"] for n in range(3)], 60.0, 1000.0) == "rank 2 not started yet; rank 0 ready"


def test_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("launcher.process.start_lines.clock.now", lambda: now[0])
    lines = StartLines()
    said = []
    for _ in range(35):
        said.append(lines.due(tree_of(1)) is not None)
        now[0] += 1
    assert [at for at, one in enumerate(said) if one] == [int(EVERY), 2 * int(EVERY), 3 * int(EVERY)]
    lines.reset()
    assert lines.due(tree_of(1)) is None, "a later start (a restart) begins anew"
    now[0] += EVERY
    assert (lines.due(tree_of(1)) or "").startswith("still starting after 10 s: ")
