"""Waiting for whichever of many queues has something: the engine core sleeps on all its answer rings at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from launcher.clock import Deadline
from launcher.ipc.handle import Watched
from launcher.ipc.reader import QueueReader
from launcher.ipc.waiting import Parking, Spin, wait


class WaitResult(NamedTuple):
    """All empty: the deadline passed."""

    readers: list[QueueReader]
    """Those whose `dequeue` would return, or raise `ClosedError`, at once; in the order given."""
    dead: list[Watched]
    fds: list[int]


class _Any:
    """Waiting for the first of several readers."""

    def __init__(self, readers: Sequence[QueueReader]) -> None:
        self._readers = readers

    def ready(self) -> list[QueueReader]:
        return [reader for reader in self._readers if reader.is_ready()]

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
    """Sleep until a reader has something, a watched peer (the readers' own included) died, or a descriptor is readable.

    Readers come first: `dead` and `fds` are looked at only while no reader has anything, so whatever a dead writer left
    is read before its death is told. A death stays true: it is told again at every later call.
    """
    group = _Any(readers)
    ready = group.ready()
    if ready:
        return WaitResult(ready, [], [])

    def park() -> Parking:
        peers = [*watched, *(peer for reader in readers for peer in reader.watched)]
        return Parking([reader.event for reader in readers], peers, extra_fds)

    _, woken = wait(group, park, readers[0].spin if readers else Spin(), deadline)
    ready = group.ready()
    if ready:
        return WaitResult(ready, [], [])
    return WaitResult([], list(woken.dead), list(woken.extra))
