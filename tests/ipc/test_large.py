"""Messages beyond the ring: any size, regions given back by the last reader, nothing leaked by a dead one."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import torch

from launcher.errors import DeadlineError, HostError
from launcher.host import Headroom
from launcher.ipc import QueueReader, QueueWriter, Ring, layout, segment
from tests.conftest import eventually
from tests.ipc.conftest import CODEC, Fork, Note, Queue, Queues, soon

MIB = 1 << 20


def used(queue: Queue) -> int:
    """Bytes of memory behind the arena."""
    return os.fstat(queue.writer._arena._fd).st_blocks * 512


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, MIB // 4, MIB // 4 + 1, MIB, 5 * MIB, 64 * MIB])
def test_bytes_of_any_size(size: int, queues: Queues) -> None:
    queue = queues(2)
    data = os.urandom(min(size, 4096)) * (size // 4096 or 1) if size >= 4096 else os.urandom(size)
    queue.send(data)
    assert queue.receive(0) == data
    assert queue.receive(1) == data
    queue.writer._arena.reclaim()
    assert not queue.writer._arena.regions


@pytest.mark.slow
def test_300_mib(queues: Queues) -> None:
    queue = queues(1)
    array = np.arange(300 * MIB // 8)
    queue.send(array)
    array[:] = 0
    got = queue.receive()
    assert got[-1] == len(array) - 1
    assert got.sum() == len(array) * (len(array) - 1) // 2
    del got
    assert used(queue) == 0


def test_sender_may_overwrite_at_once(queues: Queues) -> None:
    queue = queues(2)
    array, tensor = np.arange(MIB), torch.arange(MIB)
    for value in range(3):
        array[:] = value
        tensor[:] = value
        queue.send({"a": array, "t": tensor, "small": array[:10]})
    array[:] = -1
    tensor[:] = -1
    for index in range(2):
        for value in range(3):
            got = queue.receive(index)
            assert (got["a"] == value).all()
            assert (got["t"] == value).all()
            assert (got["small"] == value).all()


def test_views_are_ones_own(queues: Queues) -> None:
    """Readers may write into what they got: nobody else sees it, whether it is a view or a copy."""
    queue = queues(2)
    for size in (10, 4 * MIB):
        queue.send(np.zeros(size, np.uint8))
        first = queue.receive(0)
        first[:] = 7
        assert not queue.receive(1).any()
        assert (first == 7).all()


def test_views_outlive_reader_writer_and_ring() -> None:
    queue = Queue(1)
    queue.send(np.arange(MIB))
    array = queue.receive()
    for _ in range(3):
        queue.send(np.zeros(MIB, np.int64))  # must not land in the region that is still lent
        queue.receive()
    queue.close()
    part = array[10:20]
    del array
    assert part.tolist() == list(range(10, 20))


def test_region_is_reused_when_the_last_reader_lets_go(queues: Queues) -> None:
    queue = queues(2)
    arena = queue.writer._arena
    queue.send(np.ones(MIB))
    held = [queue.receive(0), queue.receive(1)]
    for still_out in (1, 0):
        held.pop()
        arena.reclaim()
        assert len(arena.regions) == still_out


def test_cold_memory_goes_back_to_the_kernel_without_the_writer(queues: Queues) -> None:
    queue = queues(2)
    size = layout.WARM_BYTES + MIB
    queue.send(bytes(size))
    assert used(queue) >= size
    queue.receive(0)
    assert used(queue) >= size, "reader 1 has not read it"
    queue.receive(1)
    assert used(queue) == 0
    queue.send(bytes(MIB))
    assert used(queue) == MIB, "the warm zone keeps what it has touched"


def test_views_kept_for_ever_do_not_stop_the_queue(queues: Queues) -> None:
    queue = queues(1, 4096)
    kept = []
    for number in range(layout.SLOTS + 50):
        queue.send(np.full(1000, number))
        kept.append(queue.receive())
    assert all((array == number).all() for number, array in enumerate(kept))
    queue.writer._arena.reclaim()
    assert queue.writer._arena.spare_slots == layout.VIEW_RESERVE, "the later ones were copied"


def test_dead_reader_leaks_no_region(fork: Fork, queues: Queues) -> None:
    queue = queues(2)

    def take_one_and_hang() -> None:
        reader = QueueReader(*queue.ring.reader_handle(1), codec=CODEC, own_fds=False)
        kept = reader.dequeue(deadline=soon())
        reader.dequeue(deadline=soon())
        signal.pause()
        del kept

    child = fork(take_one_and_hang)
    queue.writer.watch(1, child.peer(1))
    queue.send(np.ones(MIB))
    queue.send(b"go on")
    queue.send(bytes(layout.WARM_BYTES + MIB))  # reader 1 never reads it
    for _ in range(3):
        queue.receive(0)
    count = layout.reader_word(1) + 1
    eventually(lambda: queue.writer._words[count] == 2, what="the child holds one and has read two")
    child.kill()
    child.reap()
    queue.writer.declare_dead(1)
    assert not queue.writer._arena.regions
    assert used(queue) < 9 * MIB


def test_forked_child_releases_nothing(fork: Fork, queues: Queues) -> None:
    """A child inherits the mapping, not the loan."""
    queue = queues(1)
    queue.send(np.ones(MIB))
    array = queue.receive()
    child = fork(lambda: queue.close())
    child.answer()

    def drop() -> None:
        nonlocal array
        array = None

    fork(drop).answer()
    queue.writer._arena.reclaim()
    assert len(queue.writer._arena.regions) == 1
    assert array.sum() == MIB


def test_too_much_under_way_blocks(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.ipc.writer.IN_FLIGHT_BYTES", 10 * MIB)
    queue = queues(1)
    queue.send(bytes(20 * MIB))  # one is always let in
    with pytest.raises(DeadlineError, match="no room for record 1"):
        queue.send(bytes(4 * MIB), seconds=0.05)
    queue.receive()
    queue.send(bytes(4 * MIB))
    queue.send(bytes(4 * MIB))
    with pytest.raises(DeadlineError):
        queue.send(bytes(4 * MIB), seconds=0.05)
    assert [len(queue.receive()) for _ in range(2)] == [4 * MIB] * 2


def test_short_memory_is_an_error_not_a_kill(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = queues(1)
    monkeypatch.setattr(segment, "memory_headroom_of", lambda: Headroom(9 * MIB, "memory.max of /box"))
    with pytest.raises(HostError, match=r"a message of 20 MiB in queue 'test' needs 20 MiB .* only 9 MiB .*memory.max"):
        queue.send(bytes(20 * MIB))
    assert not queue.writer._arena.regions
    with pytest.raises(HostError, match="ring 'x' needs 16 MiB"):
        Ring.create("x", 1)
    queue.send(bytes(MIB))
    assert queue.receive() == bytes(MIB)


def test_short_memory_on_the_reading_side_can_be_tried_again(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = queues(1)
    queue.send(bytes(20 * MIB))
    with monkeypatch.context() as patch:
        patch.setattr(segment, "memory_headroom_of", lambda: Headroom(9 * MIB, "MemAvailable"))
        with pytest.raises(HostError, match="record 0 of queue 'test' needs 20 MiB"):
            queue.receive()
    assert queue.receive() == bytes(20 * MIB)


def test_failed_fill_gives_the_region_back(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = queues(1)

    def full(*args: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(segment, "write_at", full)
        with pytest.raises(OSError, match="disk full"):
            queue.send(bytes(MIB))
    assert not queue.writer._arena.regions
    queue.send(bytes(MIB))
    assert queue.receive() == bytes(MIB)


def test_structs_with_tensors(queues: Queues) -> None:
    queue = queues(1)
    for size in (8, 4 * MIB):
        queue.send(Note(1, payload=[torch.full((size,), 3, dtype=torch.bfloat16), "x"]))
        got = queue.receive()
        assert got.payload[0].dtype == torch.bfloat16
        assert bool((got.payload[0] == 3).all())


def test_large_messages_between_processes(fork: Fork) -> None:
    ring = Ring.create("large", 2, 1 << 16)

    def read(index: int) -> list[int]:
        reader = QueueReader(*ring.reader_handle(index), codec=CODEC, own_fds=False)
        return [int(reader.dequeue(deadline=soon()).sum()) for _ in range(20)]

    children = [fork(lambda i=i: read(i)) for i in range(2)]  # type: ignore[misc]
    writer = QueueWriter(*ring.writer_handle(), codec=CODEC, own_fds=False)
    array = np.empty(MIB, np.int64)
    for value in range(20):
        array[:] = value
        writer.enqueue(array, deadline=soon())
    for child in children:
        assert child.answer() == [value * MIB for value in range(20)]
    writer.close()
    ring.close()
