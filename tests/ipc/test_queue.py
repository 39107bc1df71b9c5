"""One writer, N readers in one process, against a list."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.clock import now
from launcher.errors import ClosedError, DeadlineError, InternalError, UsageError
from launcher.ipc import EMPTY, QueueReader, QueueWriter, Ring, RingHandle, layout
from tests.ipc.conftest import CODEC, Note, Queue, Queues, flood, soon

steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.one_of(st.integers(0, 200), st.integers(0, 1100), st.integers(1100, 70_000))),
        st.tuples(st.just("read"), st.integers(0, 3)),
    ),
    max_size=80,
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps, st.integers(1, 4), st.sampled_from([4096, 8192, 20_480]), st.sampled_from([1 << 18, 512, 4096]))
def test_every_reader_gets_everything_once_in_order(
    steps: list[tuple[str, int]], readers: int, capacity: int, hot: int
) -> None:
    """Sizes from 0 to 17 rings, wrap-around, early turns, a full ring, large messages mixed with small ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launcher.ipc.layout.HOT_BYTES", hot)
        patch.setattr("launcher.ipc.layout.HOT_RECORDS", 1)
        check_against_a_list(Queue(readers, capacity), steps)


def check_against_a_list(queue: Queue, steps: list[tuple[str, int]]) -> None:
    readers = len(queue.readers)
    sent: list[bytes] = []
    got = [0] * readers

    def read(index: int) -> bool:
        message = queue.readers[index].try_dequeue()
        if message is EMPTY:
            assert got[index] == len(sent)
            return False
        assert message == sent[got[index]]
        got[index] += 1
        return True

    try:
        for what, number in steps:
            if what == "read":
                read(number % readers)
                continue
            data = bytes([number % 251]) * number
            while True:
                try:
                    queue.send(data, seconds=0)
                    break
                except DeadlineError:
                    slowest = got.index(min(got))
                    assert read(slowest), "a full ring has something to read"
            sent.append(data)
        for index in range(readers):
            while read(index):
                pass
        assert got == [len(sent)] * readers
        queue.writer._arena.reclaim()
        assert not queue.writer._arena.regions
    finally:
        queue.close()


def test_back_pressure_names_the_slowest_reader(queues: Queues) -> None:
    queue = queues(2, 4096)
    queue.send(bytes(1000))
    queue.receive(1)

    def step() -> None:
        queue.receive(0)
        queue.send(bytes(1000), seconds=0.05)

    with pytest.raises(DeadlineError, match=r"no room for record 5 within .*; waiting for reader 1 at record 1$"):
        flood(step)
    queue.receive(1)
    queue.send(b"and on")


def test_ordinary_traffic_stays_in_the_hot_part(queues: Queues) -> None:
    """Readers that keep up let the ring go back to its start early; one that lags gets all of it."""
    queue = queues(2, 16 << 20)
    for number in range(3000):
        queue.send(bytes([number % 256]) * (number * 7919 % 5000))
        for index in range(2):
            assert queue.receive(index) == bytes([number % 256]) * (number * 7919 % 5000)
    assert os.fstat(queue.ring.writer_handle()[1][0]).st_blocks * 512 < 2 * layout.HOT_BYTES
    sent = 0

    def step() -> None:
        nonlocal sent
        queue.send(bytes(100_000), seconds=0)
        queue.receive(0)
        sent += 1

    with pytest.raises(DeadlineError):
        flood(step)
    assert sent >= 150, "of 16 MiB"
    for _ in range(sent):
        assert queue.receive(1) == bytes(100_000)


def test_one_deadline_for_the_whole_call(queues: Queues) -> None:
    queue = queues()
    start = now()
    with pytest.raises(DeadlineError, match=r"no record 0 within 0.1 s from its writer"):
        queue.receive(seconds=0.1)
    assert 0.1 <= now() - start < 1.0


def test_dead_readers_hold_nothing_up(queues: Queues) -> None:
    queue = queues(2, 4096)
    queue.writer.declare_dead(1)
    for number in range(50):
        queue.send(bytes(900) if number % 10 else bytes(20_000))
        queue.receive(0)
    queue.writer._arena.reclaim()
    assert not queue.writer._arena.regions


def test_closed_readers_hold_nothing_up(queues: Queues) -> None:
    queue = queues(2, 4096)
    queue.readers[1].close()
    for _ in range(50):
        queue.send(bytes(900))
        queue.receive(0)


def test_shutdown_delivers_what_was_written(queues: Queues) -> None:
    queue = queues(1)
    queue.send(1)
    queue.writer.shutdown()
    with pytest.raises(ClosedError, match="is closed"):
        queue.send(2)
    assert queue.receive() == 1
    for read in (queue.receive, queue.readers[0].try_dequeue):
        with pytest.raises(ClosedError):
            read()
    assert queue.readers[0].closed


def test_owner_can_shut_down_too(queues: Queues) -> None:
    queue = queues(1)
    queue.ring.shutdown()
    with pytest.raises(ClosedError):
        queue.receive()
    with pytest.raises(ClosedError):
        queue.send(1)


def test_ends_after_close(queues: Queues) -> None:
    queue = queues(1)
    queue.close()
    queue.close()
    queue.writer.shutdown()
    with pytest.raises(ClosedError):
        queue.send(1)
    with pytest.raises(ClosedError):
        queue.receive()
    with pytest.raises(ClosedError):
        queue.readers[0].try_dequeue()


def test_a_message_that_cannot_be_decoded_does_not_stop_the_queue(queues: Queues) -> None:
    queue = queues(1)
    queue.send(Exploding())
    queue.send(2)
    with pytest.raises(InternalError, match=re.escape("record 0 cannot be decoded: ZeroDivisionError: as asked")):
        queue.receive()
    assert queue.receive() == 2


def test_what_cannot_be_sent_leaves_the_queue_as_it_was(queues: Queues) -> None:
    queue = queues(1)
    with pytest.raises(UsageError, match="a generator cannot be sent"):
        queue.send(i for i in range(3))
    queue.send(Note(3))
    assert queue.receive() == Note(3)


def explode() -> Any:
    raise ZeroDivisionError("as asked")


class Exploding:
    def __reduce__(self) -> Any:
        return explode, ()


@pytest.mark.parametrize(("readers", "capacity"), [(0, 4096), (65, 4096), (1, 100), (1, 1 << 33)])
def test_bad_numbers(readers: int, capacity: int) -> None:
    with pytest.raises(UsageError, match="ring 'x'"):
        Ring.create("x", readers, capacity)


def test_handles_travel_as_msgpack(queues: Queues) -> None:
    ring = queues(3).ring
    handle, fds = ring.reader_handle(2)
    assert RingHandle.decode(handle.encode()) == handle
    assert len(fds) == handle.descriptors == 4
    assert ring.writer_handle()[0].descriptors == 4
    with pytest.raises(UsageError, match="readers 0 to 2, not 3"):
        ring.reader_handle(3)


def test_wrong_end_or_wrong_memory(queues: Queues) -> None:
    one, other = queues(1, 4096).ring, queues(1, 8192).ring
    with pytest.raises(InternalError, match="a writer cannot attach with a reader's handle"):
        QueueWriter(*one.reader_handle(0), codec=CODEC, own_fds=False)
    with pytest.raises(InternalError, match="its memory says"):
        QueueReader(one.reader_handle(0)[0], other.reader_handle(0)[1], codec=CODEC, own_fds=False)


def test_a_reader_that_attaches_late_gets_the_first_message() -> None:
    ring = Ring.create("late", 1, 4096)
    writer = QueueWriter(*ring.writer_handle(), codec=CODEC, own_fds=False)
    writer.enqueue("first", deadline=soon())
    reader = QueueReader(*ring.reader_handle(0), codec=CODEC, own_fds=False)
    ring.close()
    assert reader.dequeue(deadline=soon()) == "first"
    reader.close()
    writer.close()
