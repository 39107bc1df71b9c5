"""Readers that leave and come while the queue runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from launcher.errors import InternalError, UsageError
from launcher.ipc import EMPTY, QueueReader, QueueWriter, Ring
from tests.ipc.conftest import CODEC, Fork, Queue, Queues, flood, soon


def join(queue: Queue, index: int) -> tuple[int, QueueReader]:
    queue.readers[index].close()
    sequence = queue.writer.admit(index)
    reader = queue.readers[index] = QueueReader(*queue.ring.reader_handle(index), codec=CODEC, own_fds=False)
    return sequence, reader


def test_a_new_reader_starts_at_the_number_it_was_told(queues: Queues) -> None:
    queue = queues(3, 4096)
    for number in range(5):
        queue.send(number)
    queue.readers[1].close()
    sequence, reader = join(queue, 1)
    assert sequence == reader.sequence == 5
    assert reader.try_dequeue() is EMPTY
    queue.send("new")
    assert reader.try_dequeue() == "new"
    assert reader.sequence == 6
    assert [queue.receive(2) for _ in range(6)] == [0, 1, 2, 3, 4, "new"]


def test_a_place_can_stand_empty_until_someone_comes(queues: Queues) -> None:
    queue = queues(2, 4096)
    queue.writer.declare_dead(1)
    for _ in range(20):
        queue.send(bytes(1000))
        queue.receive(0)
    _, reader = join(queue, 1)
    for number in range(20):
        queue.send(number)
        assert reader.try_dequeue() == queue.receive(0) == number


def test_the_newcomer_counts(queues: Queues) -> None:
    queue = queues(2, 4096)
    queue.readers[1].close()
    join(queue, 1)

    def step() -> None:
        queue.send(bytes(1000), seconds=0.01)
        queue.receive(0)

    with pytest.raises(TimeoutError, match=r"waiting for reader 1 at record 0$"):
        flood(step)


def test_only_an_empty_place_is_given_away(queues: Queues) -> None:
    queue = queues(2)
    with pytest.raises(UsageError, match="reader 1 is still there"):
        queue.writer.admit(1)
    queue.readers[1].close()
    with pytest.raises(InternalError, match="reader 1 has left; the writer must admit it again"):
        QueueReader(*queue.ring.reader_handle(1), codec=CODEC, own_fds=False)


def test_arrays_that_the_old_one_holds_stand_in_the_way(queues: Queues) -> None:
    queue = queues(2)
    queue.send(np.ones(1 << 20))
    held = queue.receive(1)
    queue.readers[1].close()
    with pytest.raises(UsageError, match="reader 1 that left still holds 1 messages"):
        queue.writer.admit(1)
    assert held.sum() == 1 << 20
    del held
    join(queue, 1)


def test_who_leaves_without_reading_gives_back_what_was_lent(queues: Queues) -> None:
    queue = queues(2)
    for _ in range(3):
        queue.send(np.ones(1 << 20))
    queue.readers[1].close()
    for _ in range(3):
        queue.receive(0)
    queue.send(np.ones(1 << 20))
    assert len(queue.writer._arena.regions) == 1


@pytest.mark.parametrize("leave", [lambda queue: queue.readers[1].close(), lambda queue: queue.writer.declare_dead(1)])
def test_the_newcomer_does_not_answer_for_what_the_old_one_held(queues: Queues, leave: Callable[[Queue], None]) -> None:
    queue = queues(2)
    queue.send(np.ones(1 << 20))
    held = queue.receive(0)
    leave(queue)
    join(queue, 1)
    queue.send(np.full(1 << 20, 2.0))
    assert queue.receive(1)[0] == queue.receive(0)[-1] == 2.0
    assert held.sum() == 1 << 20
    del held
    queue.writer._arena.reclaim()


def test_killed_readers_are_replaced_while_the_others_read_on(fork: Fork) -> None:
    ring = Ring.create("replaced", 3, 1 << 14)
    writer = QueueWriter(*ring.writer_handle(), codec=CODEC, own_fds=False)
    rounds, each = 6, 120

    def follow(index: int, first: int, count: int) -> str:
        reader = QueueReader(*ring.reader_handle(index), codec=CODEC, own_fds=False)
        assert reader.sequence == first
        digest = hashlib.sha256()
        for number in range(first, first + count):
            message: Any = reader.dequeue(deadline=soon())
            assert message[0] == number
            digest.update(message[1])
        return digest.hexdigest()

    def message(number: int) -> bytes:
        return bytes([number % 256]) * (number * 7919 % 5000)

    def expected(first: int, count: int) -> str:
        return hashlib.sha256(b"".join(message(n) for n in range(first, first + count))).hexdigest()

    steady = [fork(lambda i=i: follow(i, 0, rounds * each)) for i in range(2)]  # type: ignore[misc]
    guest = fork(lambda: follow(2, 0, 1 << 30))
    for round_ in range(rounds):
        for number in range(round_ * each, (round_ + 1) * each):
            writer.enqueue([number, message(number)], deadline=soon())
        guest.kill()
        guest.reap()
        writer.declare_dead(2)
        if round_ < rounds - 1:
            first = writer.admit(2)
            assert first == (round_ + 1) * each
            guest = fork(lambda first=first: follow(2, first, 1 << 30))  # type: ignore[misc]
    assert [child.answer() for child in steady] == [expected(0, rounds * each)] * 2
    assert writer.admit(2) == rounds * each
    last = fork(lambda: follow(2, rounds * each, 3))
    for number in range(rounds * each, rounds * each + 3):
        writer.enqueue([number, message(number)], deadline=soon())
        for index in range(2):
            writer.declare_dead(index)
    assert last.answer() == expected(rounds * each, 3)
    writer.close()
    ring.close()
