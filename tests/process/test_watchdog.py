"""Who counts as hung, by the clock alone."""

from __future__ import annotations

from launcher.process.watchdog import Watchdog


def test_off() -> None:
    watchdog = Watchdog(0)
    assert watchdog.until_turn(5.0) == float("inf")
    assert watchdog.turn(5.0, {"A": 1}) is None


def test_a_turn_each_quarter_of_the_limit() -> None:
    watchdog = Watchdog(8.0)
    assert watchdog.turn(100.0, {"A": 1}) == (["A"], [])
    assert watchdog.turn(101.9, {"A": 1}) is None
    assert watchdog.until_turn(101.0) == 1.0
    assert watchdog.turn(102.0, {"A": 1, "B": 2}) == (["A", "B"], [])
    assert watchdog.number == 2


def test_who_answers_is_not_late_and_who_does_not_is() -> None:
    watchdog = Watchdog(8.0)
    both = {"A": 1, "B": 2}
    late = []
    for now in (0.0, 2.0, 4.0, 6.0, 8.0):
        turn = watchdog.turn(now, both)
        assert turn is not None
        late = turn.late
        watchdog.heard("A", now + 0.1)
    assert late == [("B", 8.0)]


def test_an_answer_of_somebody_who_is_not_watched_counts_for_nothing() -> None:
    watchdog = Watchdog(8.0)
    watchdog.heard("A", 1.0)
    assert watchdog.turn(20.0, {"A": 1}) == (["A"], [])


def test_who_took_a_dead_ones_place_between_two_turns_is_not_blamed_for_its_silence() -> None:
    watchdog = Watchdog(8.0)
    for now in (0.0, 2.0, 4.0, 6.0):
        watchdog.turn(now, {"A": 1})
    assert watchdog.turn(8.0, {"A": 1}) == (["A"], [("A", 8.0)])
    assert watchdog.turn(10.0, {"A": 77}) == (["A"], [])
    assert watchdog.turn(12.0, {"A": 77}) == (["A"], []), "its own time has begun"


def test_a_supervisor_that_slept_blames_nobody() -> None:
    watchdog = Watchdog(8.0)
    watchdog.turn(0.0, {"A": 1})
    assert watchdog.turn(100.0, {"A": 1}) == (["A"], [])
