"""The workers of this machine: their processes, the rings to and from them, and what becomes of them.

One calls ring (1 writer, N readers), one answer ring of each worker, one page of marks. The workers are started by the
constructor, all at once, before this process has a thread, a ring or a ZMQ context: so that they can be forked. Rings
are made afterwards and handed over as descriptors. What the rings carry is the owner's business: an executor's objects
(`MultiprocExecutor`), or messages as they are (`Relay`).

Workers are numbered here by their place on this machine, 0 … N-1; their ranks are in their specs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from launcher.clock import Deadline
from launcher.config import RING_BYTES, WorkerSettings
from launcher.errors import ChildFailedError, ClosedError
from launcher.ipc import Codec, QueueReader, QueueWriter, Ring, Watched
from launcher.process.nursery import Child, Nursery
from launcher.process.reports import Handover
from launcher.process.spec import ChildMethod, ProcessSpec
from launcher.worker.marks import MarkPage, Place
from launcher.worker.rpc import GROUP, QUEUES, GroupPlace, Queues

if TYPE_CHECKING:
    from launcher.process.child import ChildContext

_ANSWER_RING = 4 << 20
"""Bytes. Larger answers travel beside the ring."""


class LocalGroup:
    """`hand_over_group` (several nodes only), `hand_over_queues`, then calls and answers; in the end `stop`."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        method: ChildMethod,
        *,
        ctx: ChildContext | None = None,
        ring_bytes: int = RING_BYTES,
    ) -> None:
        """Starts the workers. Raises what `Nursery.start_all` raises; then none is left."""
        self._ring_bytes = ring_bytes
        self._rings: list[Ring] = []
        self._pidfds: list[int] = []
        self._calls: QueueWriter | None = None
        self._marks: MarkPage | None = None
        self._stopped = False
        self.readers: list[QueueReader] = []
        """The answer rings; empty before `hand_over_queues`."""
        self.nursery = Nursery(method, ctx=ctx)
        try:
            self.children: list[Child] = self.nursery.start_all(specs)
        except BaseException:
            self.nursery.close()
            raise

    # --- start -----------------------------------------------------------------------------------------------------

    def hand_over_group(self, place: GroupPlace, store_fd: int | None = None) -> None:
        """For workers that wait for it (`WorkerSettings.awaits_group`). `store_fd`: a listening TCP socket on which the
        first of them serves the rendezvous; borrowed."""
        payload = msgspec.msgpack.encode(place)
        for index, child in enumerate(self.children):
            fds = [store_fd] if store_fd is not None and index == 0 else []
            self.nursery.send(child, Handover(GROUP, payload), fds)

    def hand_over_queues(self, calls: Codec, answers: Codec) -> None:
        """Make the rings; the codecs are those of our ends."""
        ring = self._own(Ring.create("calls", len(self.children), self._ring_bytes))
        self._calls = QueueWriter(*ring.writer_handle(), codec=calls, own_fds=False)
        self._marks = MarkPage(len(self.children))
        for index, child in enumerate(self.children):
            back = self._own(Ring.create(f"answers{child.spec.rank}", 1, min(_ANSWER_RING, self._ring_bytes)))
            self.readers.append(QueueReader(*back.reader_handle(0), codec=answers, own_fds=False))
            if child.pidfd >= 0:
                # A descriptor of our own: the nursery closes its one when it reaps the child.
                self._pidfds.append(os.dup(child.pidfd))
                self._calls.watch(index, Watched(self._pidfds[-1], child.title, child.spec.rank, child.pid))
            (call_handle, call_fds), (answer_handle, answer_fds) = ring.reader_handle(index), back.writer_handle()
            payload = msgspec.msgpack.encode(Queues(call_handle, answer_handle))
            self.nursery.send(child, Handover(QUEUES, payload), [*call_fds, *answer_fds, self._marks.fd])

    def _own(self, ring: Ring) -> Ring:
        self._rings.append(ring)
        return ring

    @property
    def calls(self) -> QueueWriter:
        """`ClosedError` before `hand_over_queues`."""
        if self._calls is None:
            raise ClosedError("the executor has not been started: call start() first")
        return self._calls

    @property
    def has_queues(self) -> bool:
        return self._calls is not None and not self._stopped

    # --- what becomes of the workers -------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Readable when `look` has something to hear."""
        return self.nursery.fileno()

    def look(self, wait: float = 0.0) -> ChildFailedError | None:
        """Hear what the workers and the kernel have to say, for at most `wait` seconds; the first cause of a failure.

        After a failure it takes up to 0.5 s more, to hear of others that may have caused it.
        """
        if self._stopped or (not self.nursery.pump() and not wait and not self.nursery.failures()):
            return None
        deadline = Deadline.after(wait)
        while not self.nursery.failures() and not deadline.expired:
            self.nursery.poll(deadline.remaining())
        try:
            self.nursery.raise_if_failed()
        except ChildFailedError as error:
            return error
        return None

    def behind(self) -> list[Child]:
        """Those that are not READY yet."""
        return [child for child in self.children if not child.is_ready]

    def places(self) -> list[Place]:
        """Where each of them is, by their own marks; empty without queues."""
        if self._marks is None or self._stopped:
            return []
        return [self._marks.place(index) for index in range(len(self.children))]

    def may_end(self) -> None:
        """They were told to: the end of one is no failure from now on."""
        for child in self.children:
            child.wanted = True

    # --- end -------------------------------------------------------------------------------------------------------

    def stop(self, budget: float) -> list[str]:
        """End all within `budget` seconds and give everything back; titles of those cut short. Idempotent."""
        if self._stopped:
            return []
        self._stopped = True
        try:
            return [child.title for child in self.nursery.stop(budget)]
        finally:
            self.nursery.close()
            for end in (self._calls, *self.readers, *self._rings, self._marks):
                if end is not None:
                    end.close()
            for fd in self._pidfds:
                os.close(fd)


def of_generation(spec: ProcessSpec, generation: int) -> ProcessSpec:
    """The same worker, told which life of its core it belongs to."""
    settings = msgspec.msgpack.decode(spec.payload, type=WorkerSettings)
    payload = msgspec.msgpack.encode(msgspec.structs.replace(settings, generation=generation))
    return msgspec.structs.replace(spec, payload=payload)
