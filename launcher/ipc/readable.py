"""Waiting for whichever of many queues has something: the engine core sleeps on all its answer rings at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from launcher.clock import Deadline
from launcher.ipc import native
from launcher.ipc.handle import Watched
from launcher.ipc.layout import MAX_READERS
from launcher.ipc.reader import QueueReader
from launcher.ipc.waiting import NOBODY, SPIN_MANY_NS, Parking, Spin, park, sleep_ms


class WaitResult(NamedTuple):
    """All empty: the deadline passed."""

    readers: list[QueueReader]
    """Those whose `dequeue` would return, or raise `ClosedError`, at once; in the order given."""
    dead: list[Watched]
    fds: list[int]


class WaitSet:
    """Queues, peers and descriptors on which one thread waits again and again. Make it when all peers are watched.

    Readers come first: `dead` and `fds` are looked at only while no reader has anything, so whatever a dead writer left
    is read before its death is told. A death stays true: it is told again at every later call. The readers' own peers
    count as well.
    """

    def __init__(
        self, readers: Sequence[QueueReader], *, watched: Sequence[Watched] = (), extra_fds: Sequence[int] = ()
    ) -> None:
        self._readers = tuple(readers)
        self._watched = (*watched, *(peer for reader in readers for peer in reader.watched))
        self._extra = tuple(extra_fds)
        self._parking: Parking | None = None
        self._spin = Spin(SPIN_MANY_NS)
        natives = tuple(reader.native for reader in readers if reader.native is not None)
        self._natives = natives if len(natives) == len(readers) <= MAX_READERS else None
        """All readers in C, or None."""

    def wait(self, deadline: Deadline, first: QueueReader | None = None) -> WaitResult:
        """Sleep until a reader has something, a watched peer died, or a descriptor is readable.

        Who knows that `first` is next to have something says so: before the sleep it alone is looked at, which is
        cheaper than to look at all.
        """
        woken = NOBODY
        if not self._comes(deadline, first):
            _, woken = park(self, self._parking or self._park(), self._spin, deadline)
        ready = self.ready()
        if ready:
            return WaitResult([self._readers[index] for index in ready], [], [])
        return WaitResult([], list(woken.dead), list(woken.extra))

    def ready(self) -> list[int]:
        """Without waiting: which readers have something, by their places in the order given."""
        if self._natives is not None and native.MODULE is not None:
            found: list[int] = native.MODULE.ready(self._natives)
            return found
        return [index for index, reader in enumerate(self._readers) if reader.is_ready()]

    def _comes(self, deadline: Deadline, first: QueueReader | None) -> bool:
        """The usual wait: True once a reader has something; False: it takes long, or something else has happened."""
        if self._natives and native.MODULE is not None:
            epoll = -1 if self._parking is None else self._parking.fd
            look = None if first is None else first.native
            return bool(native.MODULE.wait(self._natives, self._spin, look, epoll, sleep_ms(deadline)))
        return self.is_ready() or (first.comes_within(self._spin) if first else self._spin.run(self.is_ready))

    def _park(self) -> Parking:
        self._parking = Parking([reader.event for reader in self._readers], self._watched, self._extra)
        return self._parking

    def close(self) -> None:
        """Give the descriptors back. (A later wait takes new ones.)"""
        self._parking = self._natives = None

    def is_ready(self) -> bool:
        for reader in self._readers:  # noqa: SIM110  # a generator costs more than all the looks
            if reader.is_ready():
                return True
        return False

    def is_closed(self) -> bool:
        return False  # a closed reader counts as ready

    def arm(self) -> bool:
        for reader in self._readers:
            reader.arm()
        # One fence orders all the announcements before all the looks that follow.
        for reader in self._readers[:1]:
            reader.fence()
        return self.is_ready()

    def disarm(self) -> None:
        for reader in self._readers:
            reader.disarm()

    def late(self, seconds: float) -> None:
        """The caller knows what it waits for, and says so."""


def wait_readable(
    readers: Sequence[QueueReader],
    *,
    deadline: Deadline,
    watched: Sequence[Watched] = (),
    extra_fds: Sequence[int] = (),
) -> WaitResult:
    """Wait once; see `WaitSet`, which is cheaper for who waits again on the same."""
    return WaitSet(readers, watched=watched, extra_fds=extra_fds).wait(deadline)
