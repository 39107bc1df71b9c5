"""The grammar of XSERVE_FAULT, row by row, and who fires when."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.worker.faults import KINDS, Fault, Schedule, parse_faults
from launcher.worker.injury import _DEEDS

GOOD = [
    ("", ()),
    (" ; ", ()),
    ("init_raise:2", (Fault("init_raise", "2", 0.0, None, False),)),
    ("init_sleep:0", (Fault("init_sleep", "0", 15.0, None, False),)),
    ("init_sleep:0:2.5", (Fault("init_sleep", "0", 2.5, None, False),)),
    ("step_raise:03@7", (Fault("step_raise", "3", 0.0, 7, False),)),
    ("step_sleep:*:.5@2,once", (Fault("step_sleep", "*", 0.5, 2, True),)),
    ("oom:core", (Fault("oom", "core", 0.0, None, False),)),
    (
        "step_hang:1,once; slow_cleanup:0:3",
        (Fault("step_hang", "1", 0.0, None, True), Fault("slow_cleanup", "0", 3.0, None, False)),
    ),
]

BAD = [
    ("init_raise", "write <kind>:<rank>"),
    ("boom:1", "there is no kind 'boom'; kinds are import_sleep, init_raise"),
    ("init_raise:x", "'x' is no rank"),
    ("init_raise:-1", "'-1' is no rank"),
    ("init_raise:1:3", "takes no seconds; leave out ':3'"),
    ("init_sleep:1:abc", "'abc' is no number of seconds; write for example init_sleep:0:15"),
    ("init_sleep:1:", "'' is no number of seconds"),
    ("init_sleep:1:-1", "no number of seconds"),
    ("init_sleep:1@2", "does not happen at a step; leave out '@2'"),
    ("step_raise:1@0", "'0' is no step"),
    ("step_raise:1@", "'' is no step"),
    ("step_raise:1,twice", "only ,once is known"),
    ("init_raise:1;step_raise:", "XSERVE_FAULT='step_raise:'"),
]


@pytest.mark.parametrize(("text", "faults"), GOOD)
def test_good_text(text: str, faults: tuple[Fault, ...]) -> None:
    assert parse_faults(text) == faults


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_text_is_named(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_faults(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_every_kind_has_its_deed() -> None:
    assert set(KINDS) == set(_DEEDS)


WHO = [
    ("1", 1, True),
    ("1", 11, False),
    ("*", 5, True),
    ("*", "core", False),
    ("core", "core", True),
    ("core", 0, False),
]


@pytest.mark.parametrize(("text", "who", "strikes"), WHO)
def test_who_is_struck(text: str, who: int, strikes: bool) -> None:
    schedule = Schedule(parse_faults(f"init_raise:{text}"), who)
    assert bool(schedule) is strikes
    assert len(schedule.due("init")) == strikes


def test_steps_are_counted_from_one() -> None:
    schedule = Schedule(parse_faults("step_sleep:0@2;step_raise:0"), 0)
    fired = [[f.kind for f in schedule.due("step")] for _ in range(3)]
    assert fired == [["step_raise"], ["step_sleep", "step_raise"], ["step_raise"]]
    assert schedule.due("init") == []


def test_once_without_a_directory_means_the_first_life() -> None:
    faults = parse_faults("step_raise:0,once")
    first = Schedule(faults, 0)
    assert [len(first.due("step")) for _ in range(3)] == [1, 0, 0]
    assert Schedule(faults, 0, generation=1).due("step") == []


def test_once_with_a_directory_leaves_a_mark_for_each_rank(tmp_path: Path) -> None:
    faults = parse_faults("step_raise:*@2,once")
    for generation, fires in ((0, 1), (1, 0)):
        for rank in (0, 1):
            schedule = Schedule(faults, rank, generation=generation, marker_dir=tmp_path)
            assert sum(len(schedule.due("step")) for _ in range(3)) == fires
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_raise-0-2", "step_raise-1-2"]
