"""The wait itself, without queues: who comes first, and how the yield phase tunes itself."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from launcher.clock import now
from launcher.errors import InternalError
from launcher.ipc import Watched, wait_readable
from launcher.ipc.segment import create_eventfd, wake
from launcher.ipc.waiting import NOBODY, SHY_WAITS, SLICE_NS, SPIN_MAX_NS, SPIN_MIN_NS, Outcome, Parking, Spin, wait
from tests.ipc.conftest import Queues, soon


class Fake:
    def __init__(self, *, ready_after: int = 1 << 60, closed: bool = False) -> None:
        self.looks = 0
        self.ready_after = ready_after
        self.closed = closed
        self.armed = 0
        self.lates: list[float] = []

    def is_ready(self) -> bool:
        self.looks += 1
        return self.looks > self.ready_after

    def is_closed(self) -> bool:
        return self.closed

    def arm(self) -> bool:
        self.armed = 1
        return self.is_ready() or self.closed

    def disarm(self) -> None:
        self.armed = 0

    def late(self, seconds: float) -> None:
        self.lates.append(seconds)


@pytest.fixture
def event() -> Iterator[int]:
    fd = create_eventfd()
    yield fd
    os.close(fd)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def outcome_of(fake: Fake, parking: Parking, seconds: float = 0.05, warn_after: float | None = None) -> Outcome:
    spin = Spin()
    spin.budget = 0
    outcome, _ = wait(fake, lambda: parking, spin, soon(seconds), warn_after)
    assert not fake.armed, "disarmed whatever happened"
    return outcome


def test_outcomes(event: int, pipe: tuple[int, int]) -> None:
    reads, writes = pipe
    peer = Watched(reads, "Peer", None, 1)
    assert outcome_of(Fake(), Parking([event])) is Outcome.EXPIRED
    assert outcome_of(Fake(closed=True), Parking([event])) is Outcome.CLOSED
    assert outcome_of(Fake(ready_after=0), Parking([event])) is Outcome.READY
    os.write(writes, b"x")
    assert outcome_of(Fake(), Parking([event], [peer])) is Outcome.DIED
    assert outcome_of(Fake(), Parking([event], [], [reads])) is Outcome.EXTRA
    # 1 look in the yield phase, 1 before the sleep; ready only after it: data comes before death and closing.
    assert outcome_of(Fake(ready_after=2), Parking([event], [peer])) is Outcome.READY
    assert outcome_of(Fake(ready_after=1, closed=True), Parking([event], [peer])) is Outcome.READY
    assert outcome_of(Fake(closed=True), Parking([event], [peer])) is Outcome.CLOSED


def test_each_sleeper_hears_a_wake_up_once(event: int) -> None:
    one, other = Parking([event]), Parking([event])
    start = now()
    wake(event)
    assert one.sleep(20) == other.sleep(20) == NOBODY
    assert now() - start < 10
    start = now()
    one.sleep(0.05)
    assert now() - start >= 0.05, "the second sleep is a real one"
    wake(event)
    start = now()
    one.sleep(20)
    assert now() - start < 10, "nobody has taken the first off, and the second is heard all the same"


def test_a_watched_descriptor_may_be_closed(event: int) -> None:
    reads, writes = os.pipe()
    peer = Watched(reads, "Peer", None, 1)
    parking = Parking([event], [peer])
    os.close(reads)
    os.write(writes, b"x")
    os.close(writes)
    assert parking.sleep(20).dead == [peer]
    with pytest.raises(InternalError, match="descriptor 99999 was closed"):
        Parking([event], [Watched(99999, "Peer", None, 1)])


def test_late_is_told_at_doubling_intervals(event: int) -> None:
    fake = Fake()
    outcome_of(fake, Parking([event]), 0.4, warn_after=0.05)
    assert [round(seconds, 1) for seconds in fake.lates] == [pytest.approx(s, abs=0.1) for s in (0.1, 0.1, 0.2, 0.4)][
        : len(fake.lates)
    ]
    assert 2 <= len(fake.lates) <= 4


def test_spin_tunes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.ipc.waiting.os.sched_yield", lambda: None)  # on a busy machine one may take long
    spin = Spin()
    for _ in range(20):
        spin.slept(20_000_000)
    assert spin.budget == 0, "a 20 ms gap: no yielding"
    assert not spin.run(lambda: True)
    assert not spin.until_moved(memoryview(bytes(8)).cast("Q"), 0, 1)
    spin.slept(2 * SPIN_MAX_NS - 1)
    assert spin.budget == SPIN_MAX_NS, "without sleeps it may come in time"
    spin.budget = SPIN_MIN_NS
    assert spin.run(lambda: True)
    assert spin.budget == 2 * SPIN_MIN_NS
    assert not spin.run(lambda: False)


def test_who_met_a_process_that_does_not_yield_sleeps_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    spin = Spin()
    monkeypatch.setattr("launcher.ipc.waiting.os.sched_yield", lambda: time.sleep(2 * SLICE_NS / 1e9))
    assert spin.run(lambda: True)
    assert spin.budget == 0
    for _ in range(SHY_WAITS):
        assert not spin.run(lambda: True)
        spin.slept(1)
    assert spin.budget == 0
    spin.slept(1)
    assert spin.budget == SPIN_MAX_NS
    assert not spin.until_moved(memoryview(bytes(8)).cast("Q"), 0, 0)
    assert spin.shy == SHY_WAITS


def test_wait_readable(queues: Queues, pipe: tuple[int, int]) -> None:
    reads, writes = pipe
    queue = queues(3)
    assert wait_readable(queue.readers, deadline=soon(0.01)) == ([], [], [])
    os.write(writes, b"x")
    assert wait_readable(queue.readers, deadline=soon(), extra_fds=[reads]) == ([], [], [reads])
    peer = Watched(reads, "Peer", 1, 2)
    assert wait_readable(queue.readers, deadline=soon(), watched=[peer]) == ([], [peer], [])
    assert wait_readable([], deadline=soon(), watched=[peer]).dead == [peer]
    queue.send(1)
    queue.receive(1)
    result = wait_readable(queue.readers, deadline=soon(), watched=[peer])
    assert result == ([queue.readers[0], queue.readers[2]], [], []), "what is there comes before a death"
    queue.writer.shutdown()
    assert wait_readable(queue.readers, deadline=soon()).readers == queue.readers, "closed: dequeue raises at once"
