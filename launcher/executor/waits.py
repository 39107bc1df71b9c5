"""One sleep for everything: answer rings, room in the calls ring, data links, plain descriptors.

What `ipc.WaitSet` is for rings, with sockets of ZMQ beside them. A socket of ZMQ cannot be left to its descriptor,
which tells an event once and to whoever calls the socket first: so each is asked before every sleep.
"""

from __future__ import annotations

import math
import os
import select
from collections.abc import Sequence

from launcher.clock import Deadline
from launcher.executor.data_link import Link
from launcher.ipc import QueueReader, QueueWriter
from launcher.ipc.fences import RECHECK_SECONDS

_HELD_BACK = 0.05
"""Seconds of a sleep while a link holds something back: what makes room is not always told."""


class Waits:
    """One thread. Descriptors stay watched by duplicates, though their owners close them."""

    def __init__(
        self,
        readers: Sequence[QueueReader],
        links: Sequence[Link],
        fds: Sequence[int],
        writer: QueueWriter | None = None,
    ) -> None:
        self._readers = tuple(readers)
        self._links = tuple(links)
        self._writer = writer
        self._epoll = select.epoll()
        self._kept: dict[int, int] = {}
        wakers = {reader.event for reader in readers} | ({writer.event} if writer is not None else set())
        for fd in wakers:
            # Nobody reads these: each wake-up is told once.
            self._epoll.register(fd, select.EPOLLIN | select.EPOLLET)
        for fd in [*(fd for link in links for fd in link.fds()), *fds]:
            kept = os.dup(fd)
            self._epoll.register(kept, select.EPOLLIN)
            self._kept[kept] = fd
        self._plain = frozenset(fds)
        self._links_fds = frozenset(self._kept.values()) - self._plain
        self.has_heard = True
        """After a sleep: some link may have something. After no sleep this is to be supposed as well."""

    def sleep(
        self, deadline: Deadline, *, answers: bool = True, room: bool = False, only: QueueReader | None = None
    ) -> list[int]:
        """Until a reader has something (if `answers`; `only`: no other one), the writer has room (if `room`), a link
        has news, a plain descriptor is readable, or time is up. The plain descriptors that are readable."""
        readers: Sequence[QueueReader] = ()
        if answers:
            readers = self._readers if only is None else (only,)
        try:
            ready = self._arm(readers, room)
            news = self._has_news()
            events = self._epoll.poll(0 if ready or news else self._seconds(deadline))
            self.has_heard = news or any(self._kept.get(fd, -1) in self._links_fds for fd, _ in events)
        finally:
            for reader in readers:
                reader.disarm()
            if room and self._writer is not None:
                self._writer.disarm()
        return [self._kept[fd] for fd, _ in events if self._kept.get(fd) in self._plain]

    def _arm(self, readers: Sequence[QueueReader], room: bool) -> bool:
        """Say in shared memory that we are about to sleep, then look: is there reason not to?"""
        for reader in readers:
            reader.arm()
        for reader in readers[:1]:
            reader.fence()
        has_room = room and self._writer is not None and self._writer.arm()
        return has_room or any(reader.is_ready() for reader in readers)

    def _has_news(self) -> bool:
        # Every link is asked, whatever the first one says: it takes its wake-up off the descriptor.
        news = [link.has_news() for link in self._links]
        return any(news)

    def _seconds(self, deadline: Deadline) -> float | None:
        seconds = deadline.remaining()
        if any(link.is_held_back for link in self._links):
            seconds = min(seconds, _HELD_BACK)
        if RECHECK_SECONDS is not None:
            seconds = min(seconds, RECHECK_SECONDS)
        return None if math.isinf(seconds) else seconds

    def close(self) -> None:
        for kept in self._kept:
            os.close(kept)
        self._kept = {}
        self._epoll.close()
