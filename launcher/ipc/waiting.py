"""How every wait of a queue goes: yield for a moment, then sleep until somebody wakes us, somebody dies, or time is up.

The yield phase is bounded by time (at most 100 µs), never by a count: a count costs cores when there are many readers.
It tunes itself: a message that came in time doubles it, a sleep that lasted longer halves it, so that a
reader of a 20 ms step burns a few µs a step, and an idle one nothing at all.

The sleep is a poll of the endpoint's own eventfd and of the pidfds of its peers. Before it, the sleeper says that it
sleeps, passes a full fence and looks once more; the waker publishes, passes a full fence and looks for
sleepers. One of the two sees the other.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from launcher.clock import Deadline, now
from launcher.errors import InternalError
from launcher.ipc.fences import RECHECK_SECONDS
from launcher.ipc.handle import Watched
from launcher.ipc.segment import drain

SPIN_MAX_NS = 100_000
SPIN_MIN_NS = 4_000
WARN_SECONDS = 5.0


class Outcome(Enum):
    READY = "ready"
    CLOSED = "closed"
    DIED = "a watched peer died, and it left nothing"
    EXTRA = "another descriptor is readable"
    EXPIRED = "the deadline passed"


class Woken(NamedTuple):
    dead: list[Watched]
    extra: list[int]


NOBODY = Woken([], [])


class Waitable(Protocol):
    """What is waited for. Calls come from the waiting thread alone."""

    def is_ready(self) -> bool: ...
    def is_closed(self) -> bool: ...
    def arm(self) -> None:
        """Say in shared memory that we are about to sleep, then pass a full fence."""

    def disarm(self) -> None:
        """Take it back."""

    def late(self, seconds: float) -> None:
        """Called after `WARN_SECONDS`, then at doubling intervals: log who is missing."""


class Spin:
    """The yield phase of one endpoint; `budget` in ns."""

    __slots__ = ("budget",)

    def __init__(self) -> None:
        self.budget = SPIN_MAX_NS

    def run(self, is_ready: Callable[[], bool]) -> bool:
        """Yield until ready or over budget. True: ready."""
        clock, give_way = time.monotonic_ns, os.sched_yield
        end = clock() + self.budget
        while True:
            give_way()
            if is_ready():
                return self._in_time()
            if clock() >= end:
                return False

    def until_moved(self, words: memoryview, index: int, seen: int) -> bool:
        """`run` for what nearly every wait is for: until ``words[index]`` is no longer `seen`."""
        clock, give_way = time.monotonic_ns, os.sched_yield
        end = clock() + self.budget
        while True:
            give_way()
            if words[index] != seen:
                return self._in_time()
            if clock() >= end:
                return False

    def _in_time(self) -> bool:
        self.budget = min(SPIN_MAX_NS, self.budget * 2)
        return True

    def slept(self, waited_ns: int) -> None:
        """What the whole wait took: would a full budget have caught it?"""
        self.budget = SPIN_MAX_NS if waited_ns < SPIN_MAX_NS else max(SPIN_MIN_NS, self.budget >> 1)


class Parking:
    """Where an endpoint sleeps: its own eventfds, the peers whose death ends the sleep, other descriptors."""

    def __init__(self, wakers: Sequence[int], watched: Sequence[Watched] = (), extra: Sequence[int] = ()) -> None:
        self._poll = select.poll()
        self._wakers = frozenset(wakers)
        self._watched = {peer.pidfd: peer for peer in watched}
        for fd in (*wakers, *self._watched, *extra):
            self._poll.register(fd, select.POLLIN)

    def sleep(self, timeout_ms: int) -> Woken:
        """At most `timeout_ms`. Takes wake-ups off the eventfds, so that the next sleep is a real one."""
        woken = Woken([], [])
        for fd, events in self._poll.poll(timeout_ms):
            if events & select.POLLNVAL:
                raise InternalError(f"descriptor {fd} was closed while a queue waited on it")
            if fd in self._wakers:
                drain(fd)
            elif fd in self._watched:
                woken.dead.append(self._watched[fd])
            else:
                woken.extra.append(fd)
        return woken


def wait(
    what: Waitable, make_parking: Callable[[], Parking], spin: Spin, deadline: Deadline, warn_after: float | None = None
) -> tuple[Outcome, Woken]:
    """Yield, then `park`: wait until `what` is ready. What is already there comes before closed, dead and late."""
    if spin.run(what.is_ready):
        return Outcome.READY, NOBODY
    return park(what, make_parking, spin, deadline, warn_after)


def park(
    what: Waitable, make_parking: Callable[[], Parking], spin: Spin, deadline: Deadline, warn_after: float | None = None
) -> tuple[Outcome, Woken]:
    """Sleep until `what` is ready; the yield phase is over.

    `make_parking` is called only if it comes to a sleep: to register descriptors costs more than most waits take.
    """
    parking = make_parking()
    started = now()
    late_at = started + warn_after if warn_after is not None else None
    try:
        while True:
            what.arm()
            # Look again before and after every sleep. After a death is known, the dead one's last stores are visible.
            idle = not what.is_ready() and not what.is_closed()
            woken = parking.sleep(_sleep_ms(deadline, late_at)) if idle else NOBODY
            outcome = _judge(what, woken, deadline)
            if outcome is not None:
                spin.slept(int((now() - started) * 1e9) + spin.budget)
                return outcome, woken
            if late_at is not None and now() >= late_at:
                what.late(now() - started)
                late_at += late_at - started
    finally:
        what.disarm()


def _judge(what: Waitable, woken: Woken, deadline: Deadline) -> Outcome | None:
    if what.is_ready():
        return Outcome.READY
    if what.is_closed():
        return Outcome.CLOSED
    if woken.dead:
        return Outcome.DIED
    if woken.extra:
        return Outcome.EXTRA
    return Outcome.EXPIRED if deadline.expired else None


def _sleep_ms(deadline: Deadline, late_at: float | None) -> int:
    until = deadline
    if late_at is not None:
        until = until.earlier(max(0.0, late_at - now()))
    if RECHECK_SECONDS is not None:
        until = until.earlier(RECHECK_SECONDS)
    return until.remaining_ms()
