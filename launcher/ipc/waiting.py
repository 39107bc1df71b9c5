"""How every wait of a queue goes: yield for a moment, then sleep until somebody wakes us, somebody dies, or time is up.

The yield phase is bounded by time (100 µs), never by a count: a count costs cores when there are many readers.
It tunes itself: a message that came in time doubles it, a sleep that lasted longer halves it, down to none: a reader of
20 ms steps goes to sleep at once, and leaves its core to the others. A sleep that turns out short brings it back.
Beside processes that keep the core until their time slice is over yielding is no use, and is left off for a while.

The sleep is an epoll of an eventfd and of the pidfds of the endpoint's peers. Before it, the sleeper says that it
sleeps, passes a full fence and looks once more; the waker publishes, passes a full fence and looks for
sleepers. One of the two sees the other.
"""

from __future__ import annotations

import math
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
from launcher.ipc.native import SpinFields

SPIN_MAX_NS = 100_000
SPIN_MANY_NS = 400_000
"""For who waits on a set: the answers of many ranks take so long when they have few cores between them."""
SPIN_MIN_NS = 4_000
SLICE_NS = 2_000_000
"""A yield that lasted so long has met a process that does not yield, and was put behind it in line for the core."""
SHY_WAITS = 200
"""Then so many waits sleep at once: who wakes up is put before such a process."""
WARN_SECONDS = 5.0
_RECHECK_MS = -1 if RECHECK_SECONDS is None else math.ceil(1000 * RECHECK_SECONDS)


class Outcome(Enum):
    READY = "ready"
    CLOSED = "closed"
    DIED = "a watched peer died, and it left nothing"
    EXTRA = "another descriptor is readable"
    EXPIRED = "the deadline passed"


class Woken(NamedTuple):
    dead: Sequence[Watched]
    extra: Sequence[int]


NOBODY = Woken((), ())


class Waitable(Protocol):
    """What is waited for. Calls come from the waiting thread alone."""

    def is_ready(self) -> bool: ...
    def is_closed(self) -> bool: ...
    def arm(self) -> bool:
        """Say in shared memory that we are about to sleep, pass a full fence, look: is there reason not to sleep?"""

    def disarm(self) -> None:
        """Take it back."""

    def late(self, seconds: float) -> None:
        """Called after `WARN_SECONDS`, then at doubling intervals: log who is missing."""


class Spin(SpinFields):
    """The yield phase of one endpoint."""

    __slots__ = ()  # `SpinFields` has them

    def __init__(self, longest: int = SPIN_MAX_NS) -> None:
        self.longest = longest
        """ns"""
        self.budget = longest
        """ns that the next wait may yield."""
        self.shy = 0
        """Waits to come that do not yield."""

    def run(self, is_ready: Callable[[], bool]) -> bool:
        """Yield until ready or over budget. True: ready."""
        if not self.budget:
            return False
        clock, give_way = time.monotonic_ns, os.sched_yield
        last = clock()
        end = last + self.budget
        while True:
            give_way()
            if is_ready():
                return self._in_time(clock() - last)
            before, last = last, clock()
            if last >= end:
                return self._in_vain(last - before)

    def until_moved(self, words: memoryview, index: int, seen: int) -> bool:
        """`run` for what nearly every wait is for: until ``words[index]`` is no longer `seen`."""
        if not self.budget:
            return False
        clock, give_way = time.monotonic_ns, os.sched_yield
        last = clock()
        end = last + self.budget
        while True:
            give_way()
            if words[index] != seen:
                return self._in_time(clock() - last)
            before, last = last, clock()
            if last >= end:
                return self._in_vain(last - before)

    def _in_time(self, last_yield_ns: int) -> bool:
        if last_yield_ns > SLICE_NS:
            self._be_shy()
        else:
            self.budget = min(self.longest, self.budget * 2)
        return True

    def _in_vain(self, last_yield_ns: int) -> bool:
        if last_yield_ns > SLICE_NS:
            self._be_shy()
        return False

    def _be_shy(self) -> None:
        self.budget, self.shy = 0, SHY_WAITS

    def slept(self, waited_ns: int) -> None:
        """What the whole wait took, in the yield phase and in the sleep.

        Up to twice the longest yield is worth yielding again: sleeping makes waits longer, and processes that once
        sleep would else go on to wait for each other's wake-ups, though they could all be yielding.
        """
        if self.shy:
            self.shy -= 1
        elif waited_ns < 2 * self.longest:
            self.budget = self.longest
        else:
            self.budget = self.budget >> 1 if self.budget >= 2 * SPIN_MIN_NS else 0


class Parking:
    """Where an endpoint sleeps: the eventfds that wake it, the peers whose death ends the sleep, other descriptors.

    The eventfds are edge-triggered: each wake-up is heard once by each sleeper, and nobody takes it off. So readers can
    share one, and waking all of them is one system call. Watched descriptors stay watched though their owner closes
    them: a duplicate is kept.
    """

    __slots__ = ("_epoll", "_extra", "_kept", "_wakers", "_watched", "fd", "poll")

    def __init__(self, wakers: Sequence[int], watched: Sequence[Watched] = (), extra: Sequence[int] = ()) -> None:
        self._kept: list[int] = []
        self._epoll = select.epoll()
        self.poll = self._epoll.poll
        self.fd = self._epoll.fileno()
        self._wakers = frozenset(wakers)
        self._watched: dict[int, Watched] = {}
        self._extra: dict[int, int] = {}
        for fd in self._wakers:
            self._epoll.register(fd, select.EPOLLIN | select.EPOLLET)
        for peer in watched:
            self._watched[self._keep(peer.pidfd)] = peer
        for fd in extra:
            self._extra[self._keep(fd)] = fd

    def _keep(self, fd: int) -> int:
        """epoll silently forgets a descriptor that is closed: so it gets one that is ours."""
        try:
            kept = os.dup(fd)
        except OSError as error:
            raise InternalError(f"descriptor {fd} was closed before a queue waited on it") from error
        self._kept.append(kept)
        self._epoll.register(kept, select.EPOLLIN)
        return kept

    def sleep(self, seconds: float | None) -> Woken:
        """At most so long (None: for ever). Wake-ups may be old or another's: who sleeps looks whether it is ready."""
        return self.who(self.poll(seconds))

    def who(self, events: list[tuple[int, int]]) -> Woken:
        """What `poll` has returned, in our words."""
        found = [fd for fd, _ in events if fd not in self._wakers]
        dead = [self._watched[fd] for fd in found if fd in self._watched]
        return Woken(dead, [self._extra[fd] for fd in found if fd in self._extra]) if found else NOBODY

    def __del__(self) -> None:
        # The epoll closes itself.
        for fd in self._kept:
            os.close(fd)


def wait(
    what: Waitable, make_parking: Callable[[], Parking], spin: Spin, deadline: Deadline, warn_after: float | None = None
) -> tuple[Outcome, Woken]:
    """Yield, then `park`: wait until `what` is ready. What is already there comes before closed, dead and late.

    `make_parking` is called only if it comes to a sleep: to register descriptors costs more than most waits take.
    """
    if spin.run(what.is_ready):
        return Outcome.READY, NOBODY
    return park(what, make_parking(), spin, deadline, warn_after)


def park(
    what: Waitable, parking: Parking, spin: Spin, deadline: Deadline, warn_after: float | None = None
) -> tuple[Outcome, Woken]:
    """`wait`, when the yield phase is over.

    Who wakes up after milliseconds runs with cold caches, where a call costs a microsecond or two: so there are few on
    the way of the usual wait, which is one sleep and then READY.
    """
    clock = time.monotonic_ns
    started = clock()
    late_at = None if warn_after is None else started / 1e9 + warn_after
    simple = late_at is None and deadline.at == math.inf
    while True:
        events: list[tuple[int, int]] = []
        try:
            # Look again before and after every sleep. After a death is known, the dead one's last stores are visible.
            if not what.arm():
                events = parking.poll(RECHECK_SECONDS if simple else _sleep_seconds(deadline, late_at))
            ready = what.is_ready()
        finally:
            what.disarm()
        woken = NOBODY if ready else parking.who(events)
        outcome = Outcome.READY if ready else _judge(what, woken, deadline)
        if outcome is not None:
            spin.slept(clock() - started + spin.budget)
            return outcome, woken
        if late_at is not None and now() >= late_at:
            what.late(now() - started / 1e9)
            late_at += late_at - started / 1e9


def _judge(what: Waitable, woken: Woken, deadline: Deadline) -> Outcome | None:
    """Why a sleeper that is not ready woke up; None: for nothing."""
    if what.is_closed():
        # Once more: what came before the closing comes first.
        return Outcome.READY if what.is_ready() else Outcome.CLOSED
    if woken.dead:
        return Outcome.READY if what.is_ready() else Outcome.DIED
    if woken.extra:
        return Outcome.EXTRA
    return Outcome.EXPIRED if deadline.expired else None


def sleep_ms(deadline: Deadline) -> int:
    """For a sleep in C, in whose stead `park` looks around afterwards; -1: for ever."""
    if deadline.at == math.inf:
        return _RECHECK_MS
    left = deadline.remaining_ms()
    return left if _RECHECK_MS < 0 else min(left, _RECHECK_MS)


def _sleep_seconds(deadline: Deadline, late_at: float | None) -> float | None:
    until = deadline
    if late_at is not None:
        until = until.earlier(max(0.0, late_at - now()))
    if RECHECK_SECONDS is not None:
        until = until.earlier(RECHECK_SECONDS)
    return until.remaining()
