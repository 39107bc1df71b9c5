"""What is held back to go together, and what is not."""

from __future__ import annotations

import pytest

from launcher import clock
from launcher.executor import gather
from launcher.executor.gather import HOLD, SMALL, Answers, Gather
from launcher.ipc.codec import Message
from launcher.worker.rpc import ALL_RANKS, DataReply, ErrorReply, PlainReply, make_codec

CODEC = make_codec(trusted=False)


class Rig:
    """Ranks 4, 5 and 6."""

    def __init__(self) -> None:
        self.sent: list[list[tuple[int, int]]] = []
        self.gather = Gather((4, 5, 6), self._send)

    def _send(self, answers: Answers) -> None:
        self.sent.append([(rank, CODEC.decode(m[0], memoryview(m[1]), m[2]).call_id) for rank, m in answers])

    def add(self, rank: int, call_id: int, value: object = 0) -> None:
        self.gather.add(rank, CODEC.encode(DataReply(call_id, value)))


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_all_answer(rig: Rig) -> None:
    rig.gather.expect(1, ALL_RANKS)
    rig.add(5, 1)
    rig.add(4, 1)
    assert rig.sent == []
    assert 0 < rig.gather.due - clock.now() <= HOLD
    rig.add(6, 1)
    assert rig.sent == [[(5, 1), (4, 1), (6, 1)]]
    assert rig.gather.due == float("inf")


def test_the_only_one_that_answers_does_not_wait(rig: Rig) -> None:
    for call_id, reply_rank in ((1, 5), (2, 0)):  # 0 is on another node
        rig.gather.expect(call_id, reply_rank)
    rig.add(5, 1)
    assert rig.sent == [[(5, 1)]]
    assert rig.gather.only(clock.now()) is None  # nobody owes anything


def test_an_error_a_large_answer_and_one_that_nobody_asked_for_do_not_wait(rig: Rig) -> None:
    rig.gather.expect(1, ALL_RANKS)
    rig.gather.expect(2, 0)
    rig.add(4, 1)
    rig.gather.add(5, CODEC.encode(ErrorReply(2, "E", "m", "t")))
    assert rig.sent == [[(4, 1)], [(5, 2)]]  # what rank 5 owes it owes yet
    rig.add(5, 1)
    rig.gather.add(6, CODEC.encode(PlainReply(1, "x" * SMALL)))
    assert rig.sent[2:] == [[(5, 1)], [(6, 1)]]
    assert rig.gather.only(clock.now()) is None


def test_an_error_leaves_nobody_waiting_for_its_rank(rig: Rig) -> None:
    rig.gather.expect(1, ALL_RANKS)
    rig.gather.add(4, CODEC.encode(ErrorReply(1, "E", "m", "t")))
    rig.add(5, 1)
    rig.add(6, 1)
    assert rig.sent == [[(4, 1)], [(5, 1), (6, 1)]]


def test_answers_of_a_rank_stay_in_order(rig: Rig) -> None:
    for call_id in (1, 2):
        rig.gather.expect(call_id, ALL_RANKS)
    rig.add(4, 1)
    rig.add(5, 1)
    rig.add(4, 2)
    assert rig.sent == [[(4, 1), (5, 1)]]
    rig.add(6, 1)
    rig.add(6, 2)
    rig.add(5, 2)
    assert rig.sent[1:] == [[(4, 2)], [(6, 1)], [(6, 2), (5, 2)]]


def test_flush_and_then_the_rest(rig: Rig) -> None:
    rig.gather.expect(1, ALL_RANKS)
    rig.add(4, 1)
    rig.gather.flush()
    rig.gather.flush()
    rig.add(5, 1)
    rig.add(6, 1)
    assert rig.sent == [[(4, 1)], [(5, 1), (6, 1)]]


@pytest.mark.parametrize("message", [(9, b"", []), (0, b"\x80\x05.", []), (7, b"\x91\xc0", [])])
def test_what_is_no_answer_is_the_cores_to_judge(message: Message) -> None:
    sent: list[Answers] = []
    Gather((4, 5), sent.append).add(4, message)
    assert sent == [[(4, message)]]


def test_who_is_worth_waking_up_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    at = [100.0]
    monkeypatch.setattr(gather.clock, "now", lambda: at[0])
    assert rig.gather.only(at[0]) is None
    rig.gather.expect(1, ALL_RANKS)
    rig.gather.expect(2, ALL_RANKS)
    assert rig.gather.only(at[0]) == (6, 100 + HOLD)
    at[0] += HOLD
    assert rig.gather.only(at[0]) is None  # it takes long: whoever comes first
    rig.add(6, 1)
    assert rig.gather.only(at[0]) == (5, at[0] + HOLD)
    rig.gather.flush()
    assert rig.gather.only(at[0]) is None
