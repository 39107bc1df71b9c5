"""Suspects and their trials: who is sent, who is failed, over stories of several lives."""

from __future__ import annotations

import random

import pytest

from launcher.engine.replay import CLEARED_AFTER, CONVICTED_AFTER, SUSPECT_AFTER, Action, Fail, Park, Replay, Send
from launcher.process.restart import RestartSettings
from tests.engine.test_replay import die, suspects, table

VERDICT = SUSPECT_AFTER + CONVICTED_AFTER
"""Deaths of the core by one poison."""


def die_alone(replay: Replay, name: str) -> list[Action]:
    """Deaths in trials of `name`, up to the verdict."""
    for _ in range(CONVICTED_AFTER - 1):
        assert die(replay) == [Send(name)], "it is tried again"
    return die(replay)


def sent(replay: Replay, *names: str) -> list[str]:
    return [name for name in names if name in replay and replay.is_sent(name)]


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


def test_the_restarts_that_are_allowed_by_default_are_enough() -> None:
    assert RestartSettings().max_restarts > VERDICT


@pytest.mark.parametrize("tokens", [0, 1, CLEARED_AFTER - 1])
def test_one_that_dies_alone_is_tried_again_and_then_failed(tokens: int) -> None:
    replay, actions = suspects("a", "b")
    for _ in range(CONVICTED_AFTER - 1):
        assert actions == [Send("a")]
        replay.tokens("a", tokens)
        actions = die(replay)
    assert actions == [Send("a")]
    replay.tokens("a", tokens)
    assert die(replay) == [Fail("a", VERDICT), Send("b")], "too few tokens clear nobody"


@pytest.mark.parametrize("trial", range(CONVICTED_AFTER))
def test_one_that_gets_on_in_any_of_its_trials_begins_anew(trial: int) -> None:
    replay, _ = suspects("a")
    for _ in range(trial):
        assert die(replay) == [Send("a")]
    replay.tokens("a", CLEARED_AFTER)
    for _ in range(VERDICT - 1):
        assert die(replay) == [Send("a")]
    assert die(replay) == [Fail("a", VERDICT)]


def test_a_convict_explains_the_others_deaths_but_one() -> None:
    replay, actions = suspects("poison", "b", "c")
    assert actions == [Send("poison")]
    assert die_alone(replay, "poison") == [Fail("poison", VERDICT), Send("b"), Send("c")]
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
    assert die_alone(replay, "poison") == [Fail("poison", VERDICT), Send("old")]
    assert replay.suspects == []


def test_what_a_convict_was_not_present_at_stays() -> None:
    replay, _ = suspects("old", "poison")
    replay.down()
    assert replay.up(new_life=False) == [Send("old")]
    replay.tokens("old", 1)
    assert die(replay) == [Send("old")], "of three deaths the poison was at two"
    replay.tokens("old", CLEARED_AFTER)
    assert die_alone(replay, "poison") == [Fail("poison", VERDICT), Send("old")]
    assert replay.watched == set()


def test_one_that_is_alone_by_chance_is_not_on_trial() -> None:
    replay = table("up", "a")
    for _ in range(VERDICT - 1):
        assert die(replay) == [Send("a")]
    assert die(replay) == [Fail("a", VERDICT)]


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
    assert die_alone(replay, "a") == [Fail("a", VERDICT), Send("b")]


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
    assert deaths <= VERDICT + (poisons - 1) * (VERDICT - 1), "one death in company is remembered"


@pytest.mark.parametrize("seed", range(30))
def test_blows_from_outside_convict_nobody(seed: int) -> None:
    """As many as one poison deals but one, in quick succession, and again after a while."""
    rng = random.Random(seed)
    replay = table("up", *(f"r{i}" for i in range(rng.randint(1, 20))))
    for _ in range(20):
        for _blow in range(VERDICT - 1):
            assert not [action for action in die(replay) if isinstance(action, Fail)]
            for _step in range(rng.randint(0, 3)):
                for name in sorted(replay.watched):
                    if name in replay and replay.is_sent(name):
                        replay.tokens(name, 1)
        while replay.watched:
            (name, *_) = [name for name in sorted(replay.watched) if replay.is_sent(name)]
            replay.tokens(name, CLEARED_AFTER)
