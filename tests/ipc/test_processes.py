"""Real processes: broadcast, idle CPU, kill -9 of either side, shutdown across processes."""

from __future__ import annotations

import hashlib
import logging
import os
import select
import signal
import threading
import time
from typing import Any

import pytest

from launcher.clock import now
from launcher.errors import ClosedError, DeadlineError, PeerDiedError
from launcher.ipc import QueueReader, QueueWriter, Ring, Watched, wait_readable
from tests.conftest import eventually
from tests.ipc.conftest import CODEC, Fork, Note, flood, soon


def attach_reader(ring: Ring, index: int) -> QueueReader:
    return QueueReader(*ring.reader_handle(index), codec=CODEC, own_fds=False)


def attach_writer(ring: Ring) -> QueueWriter:
    return QueueWriter(*ring.writer_handle(), codec=CODEC, own_fds=False)


def parent() -> Watched:
    pid = os.getppid()
    return Watched(os.pidfd_open(pid), "Parent", None, pid)


def numbers(count: int) -> list[Any]:
    """Messages of many sizes; some go round a small ring many times, some do not fit into it."""
    return [os.urandom(n * 37 % 3000 if n % 50 else 40_000) for n in range(count)]


def digest_of(reader: QueueReader, count: int) -> str:
    digest = hashlib.sha256()
    for _ in range(count):
        digest.update(reader.dequeue(deadline=soon()))
    return digest.hexdigest()


@pytest.mark.parametrize("readers", [1, 2, 3, 4, 8, 16, 64])
def test_broadcast_to_processes(readers: int, fork: Fork) -> None:
    ring = Ring.create("broadcast", readers, 1 << 15)
    count = 300
    children = [fork(lambda i=i: digest_of(attach_reader(ring, i), count)) for i in range(readers)]  # type: ignore[misc]
    writer = attach_writer(ring)
    for i, child in enumerate(children):
        writer.watch(i, child.peer(i))
    ring.close()
    digest = hashlib.sha256()
    for message in numbers(count):
        digest.update(message)
        writer.enqueue(message, deadline=soon(60))
    assert [child.answer() for child in children] == [digest.hexdigest()] * readers
    writer.close()


def test_answers_from_many_processes_on_one_wait(fork: Fork) -> None:
    """The engine core's side: one ring down, N rings up, one sleep for all of them."""
    count, ranks = 50, 4
    plans = Ring.create("plans", ranks, 1 << 16)
    answers = [Ring.create(f"answers {i}", 1, 1 << 16) for i in range(ranks)]

    def work(rank: int) -> int:
        plan, answer = attach_reader(plans, rank), attach_writer(answers[rank])
        plan.watch(parent())
        for _ in range(count):
            note = plan.dequeue(deadline=soon())
            answer.enqueue(Note(note.number, str(rank)), deadline=soon())
        return 0

    children = [fork(lambda r=r: work(r)) for r in range(ranks)]  # type: ignore[misc]
    writer = attach_writer(plans)
    readers = [attach_reader(ring, 0) for ring in answers]
    for reader, child in zip(readers, children, strict=True):
        reader.watch(child.peer())
    for number in range(count):
        writer.enqueue(Note(number), deadline=soon())
        missing = list(readers)
        while missing:
            result = wait_readable(missing, deadline=soon())
            assert result.readers
            for reader in result.readers:
                assert reader.dequeue(deadline=soon()) == Note(number, str(readers.index(reader)))
                missing.remove(reader)
    assert [child.answer() for child in children] == [0] * ranks
    # All are gone now: told once the rings are empty, and told again.
    for _ in range(2):
        assert len(wait_readable(readers, deadline=soon()).dead) == ranks
    for ring in (plans, *answers):
        ring.close()
    writer.close()
    for reader in readers:
        reader.close()


def test_idle_readers_use_no_cpu(fork: Fork) -> None:
    ring = Ring.create("idle", 2)

    def read(index: int) -> float:
        reader = attach_reader(ring, index)
        reader.watch(parent())
        for _ in range(3):
            reader.dequeue(deadline=soon())
        return now()

    children = [fork(lambda i=i: read(i)) for i in range(2)]  # type: ignore[misc]
    writer = attach_writer(ring)
    writer.enqueue(1, deadline=soon())
    writer.enqueue(2, deadline=soon())
    eventually(lambda: all(child.sleeps() for child in children), what="both readers sleep")
    before = [child.cpu_seconds() for child in children]
    here = time.process_time()
    time.sleep(1.0)  # the measured idle time itself
    assert [child.cpu_seconds() for child in children] == before
    assert time.process_time() - here < 0.1
    sent = now()
    writer.enqueue(3, deadline=soon())
    assert all(child.answer() - sent < 1.0 for child in children), "and they wake"
    writer.close()
    ring.close()


def test_killed_reader_ends_a_blocked_enqueue(fork: Fork) -> None:
    ring = Ring.create("plans", 2, 4096)
    child = fork(lambda: signal.pause())
    reader = attach_reader(ring, 0)
    writer = attach_writer(ring)
    writer.watch(1, child.peer(7))
    writer.enqueue(bytes(1000), deadline=soon())

    def step() -> None:
        writer.enqueue(bytes(1000), deadline=soon())
        while reader.is_ready():
            reader.dequeue(deadline=soon())

    threading.Timer(0.2, child.kill).start()
    start = now()
    with pytest.raises(
        PeerDiedError, match=r"queue 'plans': Child_7 \(rank 7, pid \d+\) died while record \d+ waited"
    ) as caught:
        flood(step)
    assert now() - start < 5
    assert (caught.value.rank, caught.value.pid, caught.value.title) == (7, child.pid, "Child_7")
    writer.declare_dead(1)
    for number in range(20):
        writer.enqueue(number, deadline=soon())
        while reader.is_ready():
            reader.dequeue(deadline=soon())
    for end in (writer, reader, ring):
        end.close()


def test_reader_that_left_before_it_ended_is_no_failure(fork: Fork) -> None:
    ring = Ring.create("plans", 2, 4096)
    child = fork(lambda: attach_reader(ring, 1).close())
    child.answer()
    reader, writer = attach_reader(ring, 0), attach_writer(ring)
    writer.watch(1, child.peer(1))
    with pytest.raises(DeadlineError, match=r"waiting for reader 0 at record 0$"):
        flood(lambda: writer.enqueue(bytes(1000), deadline=soon(0.05)))
    for end in (writer, reader, ring):
        end.close()


def test_killed_writer_ends_a_dequeue_after_the_last_message(fork: Fork) -> None:
    ring = Ring.create("answers 3", 1, 4096)
    told, tell = os.pipe()

    def write() -> None:
        writer = attach_writer(ring)
        for number in range(3):
            writer.enqueue(number, deadline=soon())
        # Half a record, not published: it must never be seen.
        body = writer._reserve(100, soon())
        writer._bytes[body : body + 100] = b"x" * 100
        os.write(tell, b".")
        signal.pause()

    child = fork(write)
    reader = attach_reader(ring, 0)
    reader.watch(child.peer(3))
    assert reader.dequeue(deadline=soon()) == 0
    assert select.select([told], [], [], 30)[0], "all three are written"
    os.close(told)
    os.close(tell)
    child.kill()
    child.reap()
    assert [reader.dequeue(deadline=soon()) for _ in range(2)] == [1, 2], "what a dead writer wrote is delivered"
    for _ in range(2):
        with pytest.raises(
            PeerDiedError, match=r"'answers 3': Child_3 \(rank 3, pid \d+\) died; it had written 3 records"
        ):
            reader.dequeue(deadline=soon())
    reader.close()
    ring.close()


def test_kill_while_the_reader_sleeps_wakes_it_at_once(fork: Fork) -> None:
    ring = Ring.create("answers 0", 1, 4096)
    child = fork(lambda: signal.pause())
    reader = attach_reader(ring, 0)
    reader.watch(child.peer(0))
    killed: list[float] = []

    def kill() -> None:
        killed.append(now())
        child.kill()

    threading.Timer(0.2, kill).start()
    with pytest.raises(PeerDiedError):
        reader.dequeue(deadline=soon())
    assert now() - killed[0] < 1.0
    reader.close()
    ring.close()


@pytest.mark.parametrize("round_", range(12))
def test_kill_at_a_random_moment(round_: int, fork: Fork) -> None:
    """The writer is killed amid small and large messages: whole messages, in order, then a named death."""
    ring = Ring.create("crash", 1, 1 << 14)

    def write() -> None:
        writer = attach_writer(ring)
        number = 0
        while True:
            writer.enqueue([number, bytes([number % 256]) * (number * 7919 % 9000)], deadline=soon())
            number += 1

    child = fork(write)
    reader = attach_reader(ring, 0)
    reader.watch(child.peer(0))
    killing = threading.Timer(0.02 + round_ * 0.004, child.kill)
    expected = 0

    def read() -> None:
        nonlocal expected
        number, data = reader.dequeue(deadline=soon())
        assert number == expected
        assert data == bytes([number % 256]) * (number * 7919 % 9000)
        expected += 1

    read()
    killing.start()
    with pytest.raises(PeerDiedError):
        flood(read)
    killing.join()
    reader.close()
    ring.close()


def test_stopped_reader_is_named_in_the_log_and_in_the_error(fork: Fork, caplog: pytest.LogCaptureFixture) -> None:
    ring = Ring.create("plans", 1, 4096)

    def read() -> None:
        reader = attach_reader(ring, 0)
        reader.dequeue(deadline=soon())
        os.kill(os.getpid(), signal.SIGSTOP)

    child = fork(read)
    writer = attach_writer(ring)
    writer.warn_after = 0.1
    writer.watch(0, child.peer(5))
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(DeadlineError, match=r"waiting for Child_5 \(rank 5, pid \d+\) at record 1$"),
    ):
        flood(lambda: writer.enqueue(bytes(1000), deadline=soon(0.5)))
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) >= 2, "repeats at doubling intervals"
    assert all("missing: Child_5 (rank 5" in text for text in warnings)
    writer.close()
    ring.close()


def test_missing_writer_is_named_in_the_log(fork: Fork, caplog: pytest.LogCaptureFixture) -> None:
    ring = Ring.create("answers 1", 1, 4096)
    child = fork(lambda: signal.pause())
    reader = attach_reader(ring, 0)
    reader.watch(child.peer(1))
    reader.warn_after = 0.05
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(DeadlineError, match=r"no record 0 within .* from Child_1"),
    ):
        reader.dequeue(deadline=soon(0.2))
    assert "nothing for 0 s from Child_1 (rank 1" in caplog.text
    reader.close()
    ring.close()


def test_shutdown_wakes_processes_on_both_sides(fork: Fork) -> None:
    ring = Ring.create("plans", 2, 4096)

    def read() -> str:
        try:
            attach_reader(ring, 0).dequeue(deadline=soon())
        except ClosedError as error:
            return str(error)
        return "got something"

    def write() -> str:
        writer = attach_writer(ring)
        try:
            while True:
                writer.enqueue(bytes(1000), deadline=soon())
        except ClosedError as error:
            return str(error)

    writing = fork(write)
    eventually(writing.sleeps, what="the writer is blocked by reader 1")
    ring.shutdown()
    assert "was shut down while record" in writing.answer()
    ring.close()

    ring = Ring.create("plans", 2, 4096)
    reading = fork(read)
    eventually(reading.sleeps, what="the reader sleeps")
    writer = attach_writer(ring)
    writer.shutdown()
    assert reading.answer() == "queue 'plans' was shut down after record 0"
    writer.close()
    ring.close()


def test_shutdown_from_another_thread() -> None:
    ring = Ring.create("plans", 1, 4096)
    writer = attach_writer(ring)
    timer = threading.Timer(0.1, writer.shutdown)
    timer.start()
    with pytest.raises(ClosedError):
        flood(lambda: writer.enqueue(bytes(1000), deadline=soon()))
    timer.join()
    writer.close()
    ring.close()
