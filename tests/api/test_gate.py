from __future__ import annotations

import pytest

from launcher.api.gate import EVENTS, STATES, TABLE, Gate


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", EVENTS)
def test_every_cell(state, event) -> None:
    gate = Gate()
    gate.state = state
    after = gate.feed(event, "why")
    assert after == TABLE[state][event]
    assert gate.phase == "why"
    assert gate.admits == (after == "ready")
    # The two rules behind the table: the way out is one way, and elsewhere the tree's word counts.
    if state == "stopping":
        assert after == "stopping"
    elif state == "draining":
        assert after == ("stopping" if event in ("stop", "tree:stopping") else "draining")
    else:
        plain = {"drain": "draining", "stop": "stopping"}
        assert after == plain.get(event, event.removeprefix("tree:"))


def test_was_ready_stays() -> None:
    gate = Gate()
    assert not gate.was_ready
    gate.feed_tree("ready")
    gate.feed_tree("starting", "restarting")
    assert gate.was_ready
    assert not gate.admits


def test_an_unknown_tree_state_closes_the_gate_and_is_told() -> None:
    gate = Gate()
    gate.feed_tree("ready")
    assert gate.feed_tree("sleeping") == "failed"
    assert gate.phase == "sleeping"
