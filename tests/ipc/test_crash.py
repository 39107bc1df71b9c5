"""kill -9 at a random moment, many times: survivors end with data or a named error, never torn, never for ever.

The moment is drawn on the scale of the work under way: a random number of µs after the child's first message, while
small, wrapping and arena messages go through a small ring.
"""

from __future__ import annotations

import os
import random
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from launcher.clock import now
from launcher.errors import PeerDiedError
from launcher.ipc import QueueReader, QueueWriter, Ring
from tests.ipc.conftest import CODEC, Forked, flood, soon

QUICK, ALL = 100, 1000
SEED = 20_000
"""The kill number is added: a failure names its own."""


def message(number: int) -> Any:
    """Mostly small; some turn the ring, some take the arena, some are arrays."""
    size = number * 7919 % (60_000 if number % 9 == 0 else 3000)
    data = bytes([number % 251]) * size
    if number % 40 == 7:
        return np.frombuffer(data * 30, np.uint8)
    return [number, zlib.crc32(data), data]


def check(number: int, got: Any) -> None:
    if number % 40 == 7:
        wanted = message(number)
        assert got.shape == wanted.shape
        assert zlib.crc32(got) == zlib.crc32(wanted)
        return
    assert got[0] == number
    assert zlib.crc32(got[2]) == got[1]
    assert len(got[2]) == len(message(number)[2])


def attach(ring: Ring, index: int) -> QueueReader:
    return QueueReader(*ring.reader_handle(index), codec=CODEC, own_fds=False)


def write_for_ever(ring: Ring) -> None:
    writer = QueueWriter(*ring.writer_handle(), codec=CODEC, own_fds=False)
    number = 0
    while True:
        writer.enqueue(message(number), deadline=soon())
        number += 1


def read_for_ever(ring: Ring, index: int) -> None:
    reader = attach(ring, index)
    number = 0
    while True:
        check(number, reader.dequeue(deadline=soon()))
        number += 1


def kill_after(child: Forked, seconds: float) -> Callable[[], None]:
    """To be called often: kills once the time is over."""
    at = now() + seconds
    killed = False

    def look() -> None:
        nonlocal killed
        if not killed and now() >= at:
            killed = True
            child.kill()

    return look


def writer_is_killed(chance: random.Random, start: Callable[[Callable[[], Any]], Forked]) -> None:
    """Two readers here, in turns; both get all whole messages, in order, then the death."""
    ring = Ring.create("crash", 2, 1 << 14)
    child = start(lambda: write_for_ever(ring))
    readers = [attach(ring, index) for index in range(2)]
    counts = [0, 0]

    def read(index: int) -> None:
        check(counts[index], readers[index].dequeue(deadline=soon()))
        counts[index] += 1

    for index, reader in enumerate(readers):
        reader.watch(child.peer(0))
        read(index)
    look = kill_after(child, chance.random() * 0.004)

    def both() -> None:
        look()
        read(0)
        read(1)

    with pytest.raises(PeerDiedError, match=rf"Child_0 \(rank 0, pid {child.pid}\) died; it had written"):
        flood(both)
    with pytest.raises(PeerDiedError):
        flood(lambda: read(1))
    assert counts[0] == counts[1], "both have read all that was written"
    for reader in readers:
        reader.close()
    ring.close()


def reader_is_killed(chance: random.Random, start: Callable[[Callable[[], Any]], Forked]) -> None:
    """The writer hears who died as soon as it is held up; without the dead one it goes on, and no region is lost."""
    ring = Ring.create("crash", 2, 1 << 14)
    child = start(lambda: read_for_ever(ring, 1))
    writer = QueueWriter(*ring.writer_handle(), codec=CODEC, own_fds=False)
    writer.watch(1, child.peer(1))
    reader = attach(ring, 0)
    sent = 0

    def step() -> None:
        nonlocal sent
        writer.enqueue(message(sent), deadline=soon())
        check(sent, reader.dequeue(deadline=soon()))
        sent += 1

    while child_has_read(ring) == 0:
        step()
    look = kill_after(child, chance.random() * 0.004)

    def looking() -> None:
        look()
        step()

    with pytest.raises(PeerDiedError, match=rf"Child_1 \(rank 1, pid {child.pid}\) died while record"):
        flood(looking)
    writer.declare_dead(1)
    for _ in range(5):
        step()
    writer._arena.reclaim()
    assert not writer._arena.regions
    assert writer.admit(1) == sent
    writer.close()
    reader.close()
    ring.close()


def child_has_read(ring: Ring) -> int:
    from launcher.ipc.layout import READERS_AT

    return int.from_bytes(os.pread(ring.writer_handle()[1][0], 8, READERS_AT + 64 + 8), "little")


def killing(count: int) -> None:
    for number in range(count):
        chance = random.Random(SEED + number)
        made: list[Forked] = []

        def start(body: Callable[[], Any], made: list[Forked] = made) -> Forked:
            made.append(Forked(body))
            return made[-1]

        began = time.monotonic()
        try:
            (writer_is_killed if number % 2 else reader_is_killed)(chance, start)
        except BaseException as error:
            error.add_note(f"kill {number}")
            raise
        finally:
            for child in made:
                child.close()
        assert time.monotonic() - began < 15


def test_killed_at_random_moments() -> None:
    killing(QUICK)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_a_thousand_random_moments() -> None:
    killing(ALL)
