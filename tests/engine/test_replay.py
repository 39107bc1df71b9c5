"""Every cell of the replay table; the trials of suspects are `test_replay_trials`'s."""

from __future__ import annotations

import pytest

from launcher.engine.replay import CLEARED_AFTER, SUSPECT_AFTER, Action, Replay, Send


def table(core: str, *names: str) -> Replay:
    """A table with these requests sent, or kept when it starts away."""
    replay = Replay()
    if core != "away":
        replay.up(new_life=False)
    for name in names:
        replay.add(name)
    if core == "leaving":
        replay.leave()
    return replay


def die(replay: Replay) -> list[Action]:
    """The core's death and its next life."""
    replay.leave()
    replay.down()
    return replay.up(new_life=True)


def suspects(*names: str) -> tuple[Replay, list[Action]]:
    """These were at `SUSPECT_AFTER` deaths: what the next life begins with."""
    replay = table("up", *names)
    actions: list[Action] = []
    for _ in range(SUSPECT_AFTER):
        actions = die(replay)
    return replay, actions


# --- one cell each ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("core", "actions"), [("away", []), ("up", [Send("a")]), ("leaving", [])])
def test_add(core: str, actions: list[Action]) -> None:
    assert table(core).add("a") == actions


def test_add_while_there_are_suspects() -> None:
    replay, _ = suspects("a")
    assert replay.add("b") == []
    assert not replay.is_sent("b")


@pytest.mark.parametrize("new_life", [False, True])
def test_up_when_away(new_life: bool) -> None:
    replay = table("away", "a", "b")
    assert replay.up(new_life=new_life) == [Send("a"), Send("b")]
    assert replay.core == "up"
    assert replay.watched == set(), "they were not there"


def test_up_again_with_the_same_life() -> None:
    replay = table("up", "a")
    assert replay.up(new_life=False) == []
    assert replay.is_sent("a")


@pytest.mark.parametrize("core", ["up", "leaving"])
def test_up_with_a_new_life(core: str) -> None:
    replay = table(core, "a")
    assert replay.up(new_life=True) == [Send("a")]
    assert (replay.core, replay.watched, replay.deaths) == ("up", {"a"}, 1)


def test_up_when_leaving_is_a_connection_that_fell() -> None:
    replay = table("leaving", "a")
    assert replay.up(new_life=False) == [Send("a")]
    assert replay.watched == set()


@pytest.mark.parametrize(("core", "after"), [("away", "away"), ("up", "leaving"), ("leaving", "leaving")])
def test_leave(core: str, after: str) -> None:
    replay = table(core, "a")
    replay.leave()
    assert replay.core == after


@pytest.mark.parametrize("core", ["away", "up", "leaving"])
def test_down(core: str) -> None:
    replay = table(core, "a")
    replay.down()
    assert replay.core == "away"
    assert not replay.is_sent("a")
    assert replay.up(new_life=True) == [Send("a")]
    assert replay.watched == (set() if core == "away" else {"a"}), "present is what had been sent"


@pytest.mark.parametrize("then", [False, True])
def test_an_orderly_end_is_no_death(then: bool) -> None:
    replay = table("up", "a")
    replay.leave(orderly=True)
    replay.leave(orderly=then)
    replay.down()
    assert replay.up(new_life=True) == [Send("a")]
    assert replay.watched == set()
    assert die(replay) == [Send("a")]
    assert replay.watched == {"a"}, "it held for that one end only"


def test_a_connection_that_falls_is_no_death() -> None:
    replay = table("up", "a")
    replay.leave()
    replay.down()
    assert replay.up(new_life=False) == [Send("a")]
    assert replay.watched == set()


@pytest.mark.parametrize("core", ["away", "up", "leaving"])
def test_tokens_clear(core: str) -> None:
    replay = table("up", "a")
    die(replay)
    if core == "leaving":
        replay.leave()
    if core == "away":
        replay.down()
    assert replay.tokens("a", CLEARED_AFTER - 1) == []
    assert replay.watched == {"a"}
    assert replay.tokens("a", 1) == []
    assert replay.watched == set()
    assert replay.tokens("a", 1) == replay.tokens("unknown", 1) == []


@pytest.mark.parametrize("core", ["away", "up", "leaving"])
def test_forget(core: str) -> None:
    replay = table(core, "a", "b")
    assert replay.forget("a") == []
    assert "a" not in replay
    assert replay.forget("a") == []
    die(replay)
    assert "a" not in replay.watched
