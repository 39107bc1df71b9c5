"""A test per cell of the table in `launcher.nodes.membership`, then the rules that hold in every state."""

from __future__ import annotations

import msgspec
import pytest

from launcher.errors import Failure
from launcher.nodes.actions import Accept, Action, Drop, Fence, Lose, Miss, Refuse, Start, Unknown
from launcher.nodes.agreement import Ours
from launcher.nodes.membership import HOLD, Membership
from launcher.nodes.messages import PROTOCOL, Beat, Join, Leaving, Member

LAUNCH = "launch"
LIMIT, TIMEOUT = 10.0, 300.0
T = 1000.0
"""When the tests begin."""
PEER, OTHER_PEER = b"one", b"two"


def table(nnodes: int = 2) -> Membership:
    ours = Ours(Member(0, "head", "10.0.0.1"), nnodes, "1", {"--max-model-len": "4096", "--dtype": "auto"})
    return Membership(ours, LAUNCH, silence_limit=LIMIT, join_timeout=TIMEOUT, time_of_day=lambda at: f"<{at - T:.1f}>")


JOIN = Join(
    node_rank=1,
    nnodes=2,
    protocol=PROTOCOL,
    version="1",
    host="host",
    address="10.0.0.2",
    owner="owner",
    incarnation="life",
    agreement={"--max-model-len": "4096", "--dtype": "auto"},
)


def join(**changes: object) -> Join:
    return msgspec.structs.replace(JOIN, **changes)


def beat(number: int = 1, generation: int = -1, incarnation: str = "life", rank: int = 1) -> Beat:
    return Beat(rank, incarnation, number, generation)


def leaving(number: int = 1, incarnation: str = "life", failure: Failure | None = None) -> Leaving:
    return Leaving(1, incarnation, number, "its operator stopped it", failure)


def kinds(actions: list[Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def only(actions: list[Action], kind: type) -> Action:
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, actions
    return found[0]


def in_state(state: str, *, complete: bool) -> Membership:
    """Node 1 in `state`; `complete`: in generation 5, or lost with it."""
    made = table()
    if complete:
        made.open(5, T)
    if state == "absent":
        return made
    made.join(PEER, "10.0.0.2", JOIN, T)
    made.tick(T)
    if complete:
        assert made.is_complete
        made.beat(PEER, beat(0, 5), T)
    if state == "silent":
        for second in range(1, 12):
            made.tick(T + second)
    if state == "left":
        made.leaving(leaving(0 if not complete else 1), T)
    assert made.node(1).state == state
    return made


LATER = T + 12.0
EVENTS = {
    "join =": lambda t: t.join(OTHER_PEER, "", JOIN, LATER),
    "join = in its group": lambda t: t.join(OTHER_PEER, "", join(generation=5, launch_id=LAUNCH), LATER),
    "join owner": lambda t: t.join(OTHER_PEER, "", join(incarnation="next"), LATER),
    "join other": lambda t: t.join(OTHER_PEER, "", join(incarnation="x", owner="y"), LATER),
    "beat =": lambda t: t.beat(OTHER_PEER, beat(9), LATER),
    "beat = in its group": lambda t: t.beat(OTHER_PEER, beat(9, 5), LATER),
    "beat else": lambda t: t.beat(OTHER_PEER, beat(9, -1, "x"), LATER),
    "leaving =": lambda t: t.leaving(leaving(9), LATER),
    "leaving .": lambda t: t.leaving(leaving(9, "x"), LATER),
    "gone": lambda t: t.gone(1) or [],
    "tick": lambda t: t.tick(T + 1.0),
    "tick, silent": lambda t: [a for s in range(1, 12) for a in t.tick(LATER + s)],
}
CELLS = [
    # event, state, complete → actions, next state
    ("join =", "absent", False, ["Accept"], "joined"),
    ("join =", "absent", True, ["Accept", "Start"], "joined"),
    ("join =", "joined", False, ["Accept"], "joined"),
    ("join =", "joined", True, ["Accept"], "joined"),
    ("join =", "silent", False, ["Accept"], "joined"),
    ("join =", "silent", True, ["Accept"], "joined"),
    ("join =", "left", False, ["Drop"], "left"),
    ("join =", "left", True, ["Drop"], "left"),
    ("join = in its group", "absent", False, ["Accept"], "joined"),
    ("join = in its group", "absent", True, ["Accept", "Start"], "joined"),
    ("join = in its group", "joined", True, ["Accept"], "joined"),
    ("join = in its group", "silent", True, ["Fence"], "silent"),
    ("join = in its group", "left", True, ["Drop"], "left"),
    ("join owner", "absent", False, ["Accept"], "joined"),
    ("join owner", "joined", False, ["Miss", "Accept"], "joined"),
    ("join owner", "joined", True, ["Lose", "Accept"], "joined"),
    ("join owner", "silent", False, ["Accept"], "joined"),
    ("join owner", "silent", True, ["Accept"], "joined"),
    ("join owner", "left", True, ["Accept"], "joined"),
    ("join other", "absent", False, ["Accept"], "joined"),
    ("join other", "joined", False, [], "joined"),
    ("join other", "joined", True, [], "joined"),
    ("join other", "silent", False, ["Accept"], "joined"),
    ("join other", "silent", True, ["Accept"], "joined"),
    ("join other", "left", True, ["Accept"], "joined"),
    ("beat =", "absent", False, ["Unknown"], "absent"),
    ("beat =", "joined", False, [], "joined"),
    ("beat =", "joined", True, ["Start"], "joined"),
    ("beat =", "silent", False, ["Accept"], "joined"),
    ("beat =", "silent", True, ["Accept"], "joined"),
    ("beat =", "left", True, ["Drop"], "left"),
    ("beat = in its group", "absent", True, ["Unknown"], "absent"),
    ("beat = in its group", "joined", True, [], "joined"),
    ("beat = in its group", "silent", True, ["Fence"], "silent"),
    ("beat = in its group", "left", True, ["Drop"], "left"),
    ("beat else", "absent", False, ["Unknown"], "absent"),
    ("beat else", "joined", True, ["Unknown"], "joined"),
    ("beat else", "silent", True, ["Unknown"], "silent"),
    ("beat else", "left", True, ["Unknown"], "left"),
    ("leaving =", "absent", False, ["Drop"], "absent"),
    ("leaving =", "joined", False, ["Miss"], "left"),
    ("leaving =", "joined", True, ["Lose"], "left"),
    ("leaving =", "silent", True, [], "left"),
    ("leaving =", "left", True, ["Drop"], "left"),
    ("leaving .", "absent", False, ["Drop"], "absent"),
    ("leaving .", "joined", True, ["Drop"], "joined"),
    ("leaving .", "silent", True, ["Drop"], "silent"),
    ("leaving .", "left", True, ["Drop"], "left"),
    *[("gone", state, True, [], state) for state in ("absent", "joined", "silent", "left")],
    *[("tick", state, True, [], state) for state in ("absent", "joined")],
    ("tick, silent", "joined", False, ["Miss"], "silent"),
    ("tick, silent", "joined", True, ["Lose"], "silent"),
    ("tick, silent", "silent", True, [], "silent"),
    ("tick, silent", "left", True, [], "left"),
]


@pytest.mark.parametrize(("event", "state", "complete", "actions", "after"), CELLS)
def test_cell(event: str, state: str, complete: bool, actions: list[str], after: str) -> None:
    made = in_state(state, complete=complete)
    assert kinds(EVENTS[event](made)) == actions
    assert made.node(1).state == after


# --- the group -------------------------------------------------------------------------------------------------------


def test_the_group_is_complete_once_when_the_last_node_comes() -> None:
    made = table(3)
    assert made.missing == (1, 2)
    assert kinds(made.join(PEER, "", join(nnodes=3), T)) == ["Accept"]
    assert made.open(0, T) == []
    assert made.missing == (2,)
    second = join(nnodes=3, node_rank=2, incarnation="l2", owner="o2", host="h2")
    done = made.join(OTHER_PEER, "", second, T)
    assert kinds(done) == ["Accept", "Start"]
    assert only(done, Start) == Start((PEER, OTHER_PEER), is_complete=True)
    assert made.missing == ()
    assert [m.node_rank for m in made.members] == [0, 1, 2]
    assert made.open(0, T) == []
    assert kinds(made.join(OTHER_PEER, "", second, T)) == ["Accept"]


def test_open_with_everybody_there_is_complete_at_once() -> None:
    made = in_state("joined", complete=False)
    assert made.open(0, T) == [Start((PEER,), is_complete=True)]


def test_a_lost_group_is_not_completed_again_but_the_next_one_is() -> None:
    made = in_state("joined", complete=True)
    only(made.join(OTHER_PEER, "", join(incarnation="next"), LATER), Lose)
    assert made.missing == ()
    assert made.beat(OTHER_PEER, beat(0, -1, "next"), LATER) == []
    assert made.open(6, LATER) == [Start((OTHER_PEER,), is_complete=True)]


def test_who_is_still_in_an_older_group_is_fenced_and_counts_as_missing_until_it_comes_anew() -> None:
    made = in_state("joined", complete=True)
    assert made.open(6, LATER) == [Fence(PEER, LAUNCH, 5)]
    assert made.missing == (1,)
    assert made.beat(PEER, beat(2, 5), LATER) == [Fence(PEER, LAUNCH, 5)]
    assert kinds(made.join(PEER, "", join(generation=5, launch_id=LAUNCH), LATER)) == ["Fence"]
    done = made.join(OTHER_PEER, "", join(incarnation="next"), LATER)
    assert kinds(done) == ["Miss", "Accept", "Start"]


def test_a_node_that_was_told_to_start_an_older_group_is_fenced_before_it_says_that_it_has() -> None:
    made = in_state("joined", complete=False)
    made.open(5, T)
    assert made.is_complete
    assert made.open(6, T) == [Fence(PEER, LAUNCH, 5)]
    assert made.missing == (1,)
    assert made.beat(PEER, beat(2, -1), T) == []  # it crossed our word
    assert made.missing == (1,)
    assert made.beat(PEER, beat(3, -1), T) == [Start((PEER,), is_complete=True)]  # our word got lost
    assert made.beat(PEER, beat(4, 6), T) == []


def test_a_closed_group_stays_closed() -> None:
    made = in_state("joined", complete=True)
    made.close(5)
    assert made.wanted == -1
    assert made.beat(PEER, beat(2, 5), T) == [Fence(PEER, LAUNCH, 5)]
    made.open(6, T)
    made.close(4)
    assert made.wanted == 6


def test_a_new_agent_takes_the_nodes_of_the_running_group_back() -> None:
    made = table()
    back = join(generation=7, launch_id=LAUNCH)
    assert kinds(made.join(PEER, "", back, T)) == ["Accept"]
    assert made.beat(PEER, beat(50, 7), T) == []  # no core has spoken yet
    assert made.missing == (1,)
    assert made.open(7, T) == [Start((PEER,), is_complete=True)]
    assert made.beat(PEER, beat(51, 7), T) == []


def test_a_new_agent_sends_nodes_of_another_group_away() -> None:
    made = table()
    made.join(PEER, "", join(generation=6, launch_id=LAUNCH), T)
    assert made.open(7, T) == [Fence(PEER, LAUNCH, 6)]
    other = table()
    assert other.join(PEER, "", join(generation=0, launch_id="older"), T) == [Fence(PEER, "older", 0)]
    assert other.node(1).state == "absent"


def test_a_node_that_was_given_up_and_wakes_is_fenced_even_after_the_next_group_began() -> None:
    made = in_state("silent", complete=True)
    made.open(6, LATER)
    assert made.beat(PEER, beat(2, 5), LATER) == [Fence(PEER, LAUNCH, 5)]
    assert made.node(1).state == "silent"


def test_a_node_that_did_not_hear_the_start_is_told_again_only_while_the_group_lives() -> None:
    made = in_state("joined", complete=True)
    assert made.beat(PEER, beat(2, -1), T) == [Start((PEER,))]
    made.close(5)
    assert made.beat(PEER, beat(3, -1), T) == []


# --- losses ----------------------------------------------------------------------------------------------------------


def test_what_is_said_about_a_silent_node() -> None:
    made = in_state("joined", complete=True)
    made.gone(1)
    lost = [made.tick(T + 0.3 + second) for second in range(11)]
    assert lost[:10] == [[]] * 10
    failure = only(lost[10], Lose).failure  # type: ignore[attr-defined]
    assert failure.headline == (
        "node 1 (host, 10.0.0.2) has been silent for 10.3 s: last heard at <0.0>, its connection has closed"
    )
    assert (failure.title, failure.role, failure.kind) == ("NodeAgent_N1", "node_agent", "peer_lost")
    assert (failure.node, failure.host, failure.node_lost) == (1, "host", True)


def test_the_limit_counts_from_the_last_word_and_is_exact() -> None:
    made = in_state("joined", complete=True)
    for second in range(1, 6):
        assert made.tick(T + second) == []
    made.beat(PEER, beat(1, 5), T + 5)
    assert [made.tick(T + second) for second in (*range(6, 15), 14.99)] == [[]] * 10
    assert kinds(made.tick(T + 15)) == ["Lose"]
    assert made.tick(T + 16) == []


def test_time_in_which_we_were_stopped_ourselves_is_not_the_others_silence() -> None:
    made = in_state("joined", complete=True)
    assert made.tick(T + 60) == []
    assert [made.tick(T + 60 + second) for second in range(1, 9)] == [[]] * 8
    assert kinds([a for s in (9, 10) for a in made.tick(T + 60 + s)]) == ["Lose"]


def test_a_restarted_agent_is_said_and_its_own_failure_is_passed_on() -> None:
    made = in_state("joined", complete=True)
    lost = only(made.join(OTHER_PEER, "", join(incarnation="next"), T), Lose)
    assert lost.failure.headline == "node 1 (host) restarted its agent"  # type: ignore[attr-defined]
    made = in_state("joined", complete=True)
    cause = Failure(title="Worker_TP3", role="worker", kind="raised", headline="ValueError: no", rank=3, node=1)
    assert made.leaving(leaving(9, failure=cause), T) == [Lose(cause)]


def test_a_node_that_is_stopped_by_its_operator() -> None:
    made = in_state("joined", complete=True)
    lost = only(made.leaving(leaving(9), T), Lose)
    assert lost.is_leaving  # type: ignore[attr-defined]
    assert "is leaving: its operator stopped it" in lost.failure.headline  # type: ignore[attr-defined]
    assert made.node(1).peer == PEER  # it still hears us
    made.gone(1)
    assert made.known == ()


def test_numbers_that_do_not_ascend_are_dropped_and_do_not_keep_a_node_alive() -> None:
    made = in_state("joined", complete=True)
    made.beat(PEER, beat(5, 5), T)
    for number in (5, 4, -1):
        assert kinds(made.beat(PEER, beat(number, 5), T + 5)) == ["Drop"]
    assert kinds(made.leaving(leaving(5), T + 5)) == ["Drop"]
    assert made.node(1).heard_at == T


def test_lives_that_are_over_are_dropped_whoever_replays_them() -> None:
    made = in_state("joined", complete=False)
    made.join(PEER, "", join(incarnation="next"), T)
    assert kinds(made.join(PEER, "", JOIN, T)) == ["Drop"]
    assert kinds(made.beat(PEER, beat(100), T)) == ["Drop"]
    assert kinds(made.leaving(leaving(100), T)) == ["Drop"]
    assert made.node(1).incarnation == "next"


def test_lives_that_are_over_are_not_remembered_without_end() -> None:
    made = table()
    for number in range(1000):
        made.join(PEER, "", join(incarnation=str(number)), T)
    assert len(made.node(1).past) <= 32


# --- two claims to one rank ------------------------------------------------------------------------------------------

NEWCOMER = join(incarnation="x", owner="y", host="intruder", address="10.0.0.9")


def test_a_second_node_of_a_rank_is_refused_when_the_first_is_alive() -> None:
    made = in_state("joined", complete=True)
    assert made.join(OTHER_PEER, "10.0.0.9", NEWCOMER, T + 4) == []
    assert made.beat(PEER, beat(3, 5), T + 4.1) == []  # may have been on its way before
    refused = only(made.beat(PEER, beat(4, 5), T + 5.1), Refuse)
    assert refused == Refuse(
        OTHER_PEER,
        "x",
        "--node-rank 1 is taken: host (10.0.0.2) joined 5 s ago and is alive; "
        "give intruder (10.0.0.9) another --node-rank",
    )
    assert made.node(1).owner == "owner"
    assert made.beat(PEER, beat(5, 5), T + 6) == []


@pytest.mark.parametrize("complete", [False, True])
def test_it_replaces_a_silent_holder(complete: bool) -> None:
    made = in_state("joined", complete=complete)
    done = [made.tick(T + second) for second in (1, 2, 3)]
    made.join(OTHER_PEER, "10.0.0.9", NEWCOMER, T + 4)
    done += [made.tick(T + 4 + second) for second in (0, 1, 2, 2.9)]
    assert done == [[]] * 7
    done = [made.tick(T + 4 + HOLD)]
    assert kinds(done[0]) == ["Lose" if complete else "Miss", "Accept"]
    assert made.node(1).owner == "y"
    assert made.node(1).state == "joined"


def test_it_may_say_so_again_while_it_waits_and_a_third_one_has_to_come_later() -> None:
    made = in_state("joined", complete=True)
    made.join(OTHER_PEER, "", NEWCOMER, T + 1)
    assert made.join(b"new line", "", NEWCOMER, T + 2) == []
    assert kinds(made.join(b"three", "", join(incarnation="z", owner="z"), T + 2)) == ["Drop"]
    assert only(made.beat(PEER, beat(4, 5), T + 2), Refuse).peer == b"new line"  # type: ignore[attr-defined]


def test_our_own_pause_does_not_decide_for_the_newcomer() -> None:
    made = in_state("joined", complete=True)
    made.join(OTHER_PEER, "", NEWCOMER, T + 1)
    made.tick(T + 1)
    assert made.tick(T + 61) == []
    assert kinds(made.beat(PEER, beat(4, 5), T + 62)) == ["Refuse"]


def test_a_claim_to_a_rank_whose_holder_leaves_is_granted() -> None:
    made = in_state("joined", complete=False)
    made.join(OTHER_PEER, "", NEWCOMER, T + 1)
    made.leaving(leaving(5), T + 1)
    assert kinds(made.tick(T + 2)) == ["Accept"]


# --- joins that never fit --------------------------------------------------------------------------------------------


def refusal(change: Join, *, nnodes: int = 2, complete: bool = False) -> Refuse:
    made = in_state("absent", complete=False) if not complete else in_state("joined", complete=True)
    refused = made.join(PEER, "10.0.0.9", change, T)
    assert isinstance(refused[0], Refuse)
    return refused[0]


def test_options_that_differ_are_all_named_with_both_values() -> None:
    refused = refusal(join(agreement={"--max-model-len": "2048", "--tp": "4"}))
    assert refused.reason == (
        "--dtype: node 1 (host) has no such option, node 0 has auto; "
        "--max-model-len: node 1 (host) has 2048, node 0 has 4096; "
        "--tp: node 1 (host) has 4, node 0 has no such option"
    )
    assert refused.is_mismatch


def test_versions_and_protocols_that_differ() -> None:
    assert refusal(join(version="2")).reason == (
        "node 1 (host) runs xserve 2, node 0 (head) runs xserve 1: install the same version on all nodes"
    )
    refused = refusal(join(protocol=PROTOCOL + 1))
    assert f"protocol {PROTOCOL + 1}" in refused.reason
    assert f"protocol {PROTOCOL}" in refused.reason
    assert refused.is_mismatch


def test_another_number_of_nodes() -> None:
    refused = refusal(join(nnodes=3))
    assert refused.reason == "--nnodes: node 1 (host) has 3, node 0 (head) has 2"
    assert refused.is_mismatch


@pytest.mark.parametrize("rank", [2, 5, -1, 1 << 40])
def test_a_rank_out_of_range(rank: int) -> None:
    refused = refusal(join(node_rank=rank))
    assert f"--node-rank {rank} of host (10.0.0.9) is not below --nnodes 2" in refused.reason
    assert "joined so far: 0 (head); missing: 1" in refused.reason
    assert not refused.is_mismatch


def test_rank_0_twice() -> None:
    refused = refusal(join(node_rank=0))
    assert refused.reason.startswith("--node-rank 0 was given twice: to host (10.0.0.9) and to head (10.0.0.1)")
    assert not refused.is_mismatch


def test_once_a_group_was_complete_a_misfit_is_only_refused() -> None:
    assert not refusal(join(version="2", incarnation="x", owner="y"), complete=True).is_mismatch


def test_a_misfit_under_a_rank_that_is_held_does_not_end_the_launch() -> None:
    made = in_state("joined", complete=False)
    refused = only(made.join(OTHER_PEER, "", join(version="2", incarnation="x", owner="y"), T), Refuse)
    assert not refused.is_mismatch  # type: ignore[attr-defined]


def test_a_strangers_words_are_made_plain_and_short() -> None:
    bad = "x\n\x1b[2J" + "y" * 5000
    refused = refusal(join(host=bad, agreement={f"{bad}{n}": bad for n in range(500)}))
    assert "\n" not in refused.reason
    assert "\x1b" not in refused.reason
    assert len(refused.reason) < 20 * 700


# --- the join timeout ------------------------------------------------------------------------------------------------


def test_nodes_that_do_not_come() -> None:
    made = table(4)
    assert made.tick(T) == []
    made.open(0, T)
    made.join(PEER, "", join(nnodes=4), T)
    done = []
    for second in range(301):
        if second % 5 == 0:
            made.beat(PEER, beat(second), T + second)
        done += made.tick(T + second)
    failure = only(done, Lose).failure  # type: ignore[attr-defined]
    assert failure.headline == (
        "nodes 2, 3 did not join within --join-timeout 300 s; joined: node 0 (head, 10.0.0.1), node 1 (host, "
        "10.0.0.2); missing: 2, 3"
    )
    assert failure.node_lost
    assert failure.node == 2
    assert made.tick(T + 400) == []


def test_it_counts_only_while_a_group_is_wanted_and_anew_for_the_next() -> None:
    made = table()
    made.tick(T)
    made.tick(T + 1000)
    made.open(0, T + 1000)
    assert made.open(0, T + 1200) == []
    assert made.tick(T + 1299) == []
    made.open(1, T + 1299)
    assert made.tick(T + 1301) == []
    assert kinds(made.tick(T + 1599)) == ["Lose"]


def test_what_is_about_no_node_is_dropped() -> None:
    made = table()
    for rank in (0, 2, -1, 1 << 60):
        assert kinds(made.beat(PEER, beat(1, rank=rank), T)) == ["Drop"]
        assert kinds(made.leaving(Leaving(rank, "life", 1, ""), T)) == ["Drop"]


def test_the_address_that_is_seen_counts_before_the_one_that_is_said() -> None:
    made = table()
    assert only(made.join(PEER, "10.7.7.7", JOIN, T), Accept).member.address == "10.7.7.7"  # type: ignore[attr-defined]
    assert Unknown(PEER) in made.beat(PEER, beat(1, -1, "who"), T)
    assert isinstance(Miss("x"), Miss)
    assert isinstance(Drop("x"), Drop)
