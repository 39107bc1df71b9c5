"""Every cell of the replay table, and stories of several lives."""

from __future__ import annotations

import random

import pytest

from launcher.engine.replay import CLEARED_AFTER, SUSPECT_AFTER, Action, Fail, Park, Replay, Send


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


def sent(replay: Replay, *names: str) -> list[str]:
    return [name for name in names if name in replay and replay.is_sent(name)]


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


# --- suspects --------------------------------------------------------------------------------------------------------


def test_suspects_are_sent_one_at_a_time() -> None:
    replay, actions = suspects("a", "b", "c")
    replay.add("new")
    assert actions == [Send("a")]
    assert replay.suspects == ["a", "b", "c"]
    assert replay.forget("a") == [Send("b")], "it ended: it was not it"
    assert replay.forget("b") == [Send("c")]
    assert replay.forget("c") == [Send("new")]


def test_those_with_most_deaths_and_least_progress_come_first() -> None:
    replay = table("up", "a", "b", "c")
    die(replay)
    replay.add("d")
    replay.tokens("a", 3)
    replay.tokens("b", 1)
    assert die(replay) == [Send("c")], "it died without a token each time"
    assert replay.suspects == ["c", "b", "a"]
    replay.tokens("c", 1)
    assert die(replay) == [Send("c")], "three deaths"


def test_one_that_dies_alone_is_failed_and_explains_the_others() -> None:
    replay, actions = suspects("poison", "b", "c")
    assert actions == [Send("poison")]
    assert die(replay) == [Fail("poison", SUSPECT_AFTER + 1), Send("b"), Send("c")]
    assert "poison" not in replay
    assert replay.suspects == []
    assert die(replay) == [Send("b")], "a second poison shows with the next death"
    assert replay.suspects == ["b", "c"]


def test_a_convict_explains_only_where_it_was() -> None:
    replay = table("up", "old")
    die(replay)
    replay.add("poison")
    assert die(replay) == [Send("old")]
    assert replay.tokens("old", CLEARED_AFTER) == [Send("poison")]
    assert die(replay) == [Send("poison")]
    assert replay.suspects == ["poison"]
    assert die(replay) == [Fail("poison", 3), Send("old")]
    assert replay.suspects == []


def test_what_a_convict_was_not_present_at_stays() -> None:
    replay, _ = suspects("old", "poison")
    replay.down()
    assert replay.up(new_life=False) == [Send("old")]
    replay.tokens("old", 1)
    assert die(replay) == [Send("old")], "of three deaths the poison was at two"
    replay.tokens("old", CLEARED_AFTER)
    assert die(replay) == [Fail("poison", 3), Send("old")]
    assert replay.watched == set()


def test_one_that_gets_on_alone_is_failed_only_the_second_time() -> None:
    replay, _ = suspects("a", "b")
    replay.tokens("a", 1)
    assert die(replay) == [Send("a")]
    replay.tokens("a", 1)
    assert die(replay) == [Fail("a", SUSPECT_AFTER + 2), Send("b")]
    replay, _ = suspects("a")
    replay.tokens("a", 1)
    die(replay)
    replay.tokens("a", CLEARED_AFTER)
    for _ in range(SUSPECT_AFTER):
        assert die(replay) == [Send("a")], "it begins anew"
    replay.tokens("a", 1)
    assert die(replay) == [Send("a")]


def test_one_that_is_alone_by_chance_is_not_failed_before_it_is_a_suspect() -> None:
    replay = table("up", "a")
    for _ in range(SUSPECT_AFTER):
        assert die(replay) == [Send("a")]
    assert die(replay) == [Fail("a", SUSPECT_AFTER + 1)]


def test_a_long_suspect_that_gets_on_is_parked_for_the_next() -> None:
    replay, _ = suspects("a", "b", "c")
    assert replay.tokens("a", CLEARED_AFTER) == [Park("a"), Send("b")]
    assert sent(replay, "a", "b", "c") == ["b"]
    assert replay.tokens("b", CLEARED_AFTER) == [Park("b"), Send("c")]
    assert replay.tokens("c", CLEARED_AFTER) == [Send("a"), Send("b")], "the last one just goes on"
    assert sent(replay, "a", "b", "c") == ["a", "b", "c"]


def test_a_trial_that_nobody_waits_for_any_more() -> None:
    replay, _ = suspects("a", "b")
    assert replay.forget("a") == [Send("b")]
    replay.add("c")
    assert replay.forget("b") == [Send("c")]


def test_a_suspect_that_is_not_on_trial_and_leaves() -> None:
    replay, _ = suspects("a", "b")
    assert replay.forget("b") == []
    replay.add("c")
    assert replay.tokens("a", CLEARED_AFTER) == [Send("c")]


def test_a_trial_whose_client_left_while_the_core_was_away() -> None:
    replay, _ = suspects("a", "b")
    replay.down()
    replay.forget("a")
    assert replay.up(new_life=True) == [Send("b")]


def test_last_words_of_a_trial_start_no_other() -> None:
    replay, _ = suspects("a", "b")
    replay.leave()
    assert replay.forget("a") == []
    assert replay.tokens("b", 1) == []
    replay.down()
    assert replay.up(new_life=True) == [Send("b")]
    assert "b" in replay, "it was not there: its trial is still to come"


def test_a_trial_goes_on_over_an_orderly_end_and_a_fallen_connection() -> None:
    replay, _ = suspects("a", "b")
    replay.leave(orderly=True)
    replay.down()
    assert replay.up(new_life=True) == [Send("a")]
    replay.down()
    assert replay.up(new_life=False) == [Send("a")]
    assert die(replay) == [Fail("a", 3), Send("b")]


@pytest.mark.parametrize("poisons", [1, 2])
@pytest.mark.parametrize("seed", range(30))
def test_only_the_poison_is_failed_whatever_else_happens(seed: int, poisons: int) -> None:
    """A core that dies of some requests only, in random company: they are found in few deaths, nothing else is lost."""
    rng = random.Random(seed)
    replay = table("up")
    left = {f"r{i}": rng.randint(1, 40) for i in range(rng.randint(poisons, 20))}
    poison = set(rng.sample(list(left), poisons))
    at_core: list[str] = []
    failed: list[str] = []
    deaths = 0

    def carry_out(actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                assert action.request_id not in at_core
                at_core.append(action.request_id)
                assert len(at_core) == 1 or not replay.suspects, "a trial is alone"
            elif isinstance(action, Park):
                at_core.remove(action.request_id)
            else:
                failed.append(action.request_id)
                del left[action.request_id]

    for name in left:
        carry_out(replay.add(name))
    for _ in range(10_000):
        if not left:
            break
        if poison & set(at_core):
            deaths += 1
            at_core.clear()
            carry_out(die(replay))
            continue
        assert at_core, f"nobody is served, {left} wait"
        name = rng.choice(at_core)
        left[name] -= 1
        if left[name] == 0 or rng.random() < 0.02:
            del left[name]
            at_core.remove(name)
            carry_out(replay.forget(name))
        else:
            carry_out(replay.tokens(name, 1))
    assert not left
    assert set(failed) == poison
    assert deaths <= SUSPECT_AFTER - 1 + 2 * poisons
