"""`mp`: one process per rank, children of this process; calls over one broadcast ring, answers over a ring per rank.

    engine core ──► calls ring (1 writer, N readers) ──► worker 0 … N-1
                ◄── answer ring of each rank (1 writer, 1 reader) ◄──

The workers are started by the constructor, all at once, before this process has a thread, a ring or a ZMQ context: so
that they can be forked. Rings are made afterwards and handed over as descriptors. Every wait also hears the workers'
deaths, and a death ends the executor: the group is of no use without one of its ranks.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from launcher import clock
from launcher.clock import Deadline
from launcher.config import EngineSettings, WorkerSettings
from launcher.errors import (
    ChildFailedError,
    ClosedError,
    Failure,
    InternalError,
    PeerDiedError,
    UsageError,
    XserveError,
)
from launcher.executor.base import Executor
from launcher.executor.replies import PendingCall, Replies
from launcher.ipc import EMPTY, QueueReader, QueueWriter, Ring, WaitSet, Watched
from launcher.process.nursery import Child, Nursery
from launcher.process.reports import Handover
from launcher.process.spec import ChildMethod, ProcessSpec
from launcher.worker.marks import MarkPage, Place
from launcher.worker.rpc import (
    ALL_RANKS,
    QUEUES,
    Call,
    ErrorReply,
    Queues,
    ShutdownCall,
    StepReply,
    make_call,
    make_codec,
    remote_error,
)

if TYPE_CHECKING:
    from launcher.process.child import ChildContext

log = logging.getLogger(__name__)

_SEND_LIMIT = 60.0
"""Seconds that a call may wait for room in the ring: what a rank that long behind has is no longer a load."""
_ANSWER_RING = 4 << 20
"""Bytes. Larger answers travel beside the ring."""
_AFTER_SUPERVISOR = 3.0
"""Seconds by which a supervisor's limit of the start comes first: it can show everybody's stacks, and ends us."""
_CAUSE_WAIT = 0.5
"""Seconds to look for a death behind an error that says that a peer is gone."""


class CallFuture:
    """See `launcher.executor.base.Future`."""

    __slots__ = ("_call", "_executor")

    def __init__(self, executor: MultiprocExecutor, call: PendingCall) -> None:
        self._executor = executor
        self._call = call

    def done(self) -> bool:
        return self._executor.try_settle(self._call)

    def result(self, timeout: float | None = None) -> Any:
        self._executor.wait_settled(self._call, timeout)
        return self._call.outcome()


class MultiprocExecutor(Executor):
    """See the module. Without a `ctx` (library, tests) `specs` and `method` say what to start and how."""

    def __init__(
        self,
        settings: EngineSettings,
        ctx: ChildContext | None = None,
        *,
        specs: Sequence[ProcessSpec] = (),
        method: ChildMethod | None = None,
    ) -> None:
        super().__init__(settings, ctx)
        if ctx is not None:
            specs, method = specs or ctx.spec.children, method or ctx.spec.child_method
        if len(specs) != self.world_size:
            raise InternalError(f"{len(specs)} workers are planned for a world of {self.world_size}")
        self._rings: list[Ring] = []
        self._pidfds: list[int] = []
        self._readers: list[QueueReader] = []
        self._calls: QueueWriter | None = None
        self._answers: WaitSet | None = None
        """All answer rings, and news of the children."""
        self._replies = Replies([])
        self._next = 1
        self._ended: XserveError | None = None
        """Why no call can be made any more."""
        self._closed = False
        self._nursery = Nursery(method or "spawn", ctx=ctx)
        self._marks: MarkPage | None = None
        self._behind: dict[int, tuple[Place | None, float]] = {}
        """Rank that is not idle → where it was seen, and since when it has been there."""
        try:
            self._children = self._nursery.start_all([_of_generation(spec, settings.generation) for spec in specs])
        except BaseException:
            self._nursery.close()
            raise

    # --- start and end ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Hand over the rings, then wait until every rank is READY."""
        self._strike("init")
        try:
            self._hand_over()
            self._nursery.wait_ready(self.settings.ready_timeout + (_AFTER_SUPERVISOR if self.ctx else 0.0))
        except BaseException as error:
            if isinstance(error, XserveError):
                self._end(error)
            raise

    def _hand_over(self) -> None:
        children = self._children
        self._replies = Replies([f"rank {rank} ({c.title}, pid {c.pid})" for rank, c in enumerate(children)])
        calls = Ring.create("calls", len(children), self.settings.ring_bytes)
        self._rings.append(calls)
        self._calls = QueueWriter(*calls.writer_handle(), codec=make_codec(), own_fds=False)
        self._marks = MarkPage(len(children))
        for rank, child in enumerate(children):
            answers = Ring.create(f"answers{rank}", 1, min(_ANSWER_RING, self.settings.ring_bytes))
            self._rings.append(answers)
            self._readers.append(QueueReader(*answers.reader_handle(0), codec=make_codec(), own_fds=False))
            if child.pidfd >= 0:
                # A descriptor of our own: the nursery closes its one when it reaps the child.
                self._pidfds.append(os.dup(child.pidfd))
                self._calls.watch(rank, Watched(self._pidfds[-1], child.title, rank, child.pid))
            (call_handle, call_fds), (answer_handle, answer_fds) = calls.reader_handle(rank), answers.writer_handle()
            payload = msgspec.msgpack.encode(Queues(call_handle, answer_handle))
            self._nursery.send(child, Handover(QUEUES, payload), [*call_fds, *answer_fds, self._marks.fd])

    def shutdown(self, budget: float) -> list[str]:
        if self._closed:
            return []
        self._closed = True
        self._strike("cleanup")
        if self._calls is not None and self._ended is None and budget > 0:
            # In order behind the calls that were sent; the nursery's Stop, which comes next, is for those that wait.
            with contextlib.suppress(XserveError):
                self._calls.enqueue(ShutdownCall(self._next), deadline=Deadline.after(min(0.5, budget / 4)))
        self._end(ClosedError("the executor was shut down"))
        try:
            return [child.title for child in self._nursery.stop(budget)]
        finally:
            self._nursery.close()
            for end in (self._answers, self._calls, *self._readers, *self._rings, self._marks):
                if end is not None:
                    end.close()
            for fd in self._pidfds:
                os.close(fd)

    def _end(self, error: XserveError) -> None:
        """No further call; those under way fail with `error`. The first reason stays."""
        self._ended = self._ended or error
        self._replies.end(self._ended)

    # --- calls -----------------------------------------------------------------------------------------------------

    def submit(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        unique_reply_rank: int | None = None,
    ) -> CallFuture:
        """Raises at once what stands in the way: a dead worker, or an error that no earlier call could deliver."""
        reply_rank = ALL_RANKS if unique_reply_rank is None else unique_reply_rank
        if unique_reply_rank is not None and not 0 <= unique_reply_rank < self.world_size:
            raise UsageError(f"unique_reply_rank={unique_reply_rank}: ranks are 0 to {self.world_size - 1}")
        # A rank that does not reply is not missed while the others answer fast: ask for deaths at every call (1 µs).
        self._look_after_children()
        if self._ended is not None:
            raise self._ended
        self._take()
        if (held := self._replies.take_held()) is not None:
            raise held
        deadline = Deadline.after(timeout)
        self._send(make_call(self._next, reply_rank, method, tuple(args), kwargs), deadline.earlier(_SEND_LIMIT))
        wanted = range(self.world_size) if unique_reply_rank is None else (reply_rank,)
        label = method if isinstance(method, str) else getattr(method, "__qualname__", repr(method))
        call = self._replies.sent(self._next, label, wanted, single=unique_reply_rank is not None, deadline=deadline)
        self._next += 1
        return CallFuture(self, call)

    def _send(self, call: Call, deadline: Deadline) -> None:
        if self._calls is None:
            raise ClosedError("the executor has not been started: call start() first")
        try:
            self._calls.enqueue(call, deadline=deadline)
        except PeerDiedError:
            self._look_after_children(_CAUSE_WAIT)
            raise self._ended or InternalError("a worker's death was seen on the ring, but not by its parent") from None

    def try_settle(self, call: PendingCall) -> bool:
        """Take in what has arrived; whether the call has its outcome."""
        if not self._replies.is_settled(call):
            self._take()
            self._look_after_children()
            self._replies.expire()
        return self._replies.is_settled(call)

    def wait_settled(self, call: PendingCall, timeout: float | None) -> None:
        """Until the call has its outcome. `DeadlineError` when `timeout` seconds pass first."""
        replies, deadline = self._replies, Deadline.after(timeout)
        while not replies.is_settled(call):
            self._take()
            if replies.is_settled(call):
                return
            replies.expire()
            if replies.is_settled(call):
                return
            if deadline.expired:
                raise replies.silence(call, deadline.seconds)
            if self._closed:
                raise ClosedError("the executor was shut down")
            if self._answers is None:
                self._answers = WaitSet(self._readers, extra_fds=[self._nursery.fileno()])
            ready = self._answers.wait(replies.earliest(deadline), self._readers[replies.next_rank(call)])
            if ready.fds and not ready.readers:
                # Answers first: a worker may have answered and died, and the answer is good.
                self._look_after_children()

    def _take(self) -> None:
        """Feed every answer that has arrived to the book."""
        if self._closed:
            return
        for rank, reader in enumerate(self._readers):
            while (reply := reader.try_dequeue()) is not EMPTY:
                if isinstance(reply, StepReply):
                    self._replies.answer(rank, reply.call_id, reply.output)
                elif isinstance(reply, ErrorReply):
                    self._take_error(rank, reply)
                else:
                    self._replies.answer(rank, reply.call_id, reply.value)

    def _take_error(self, rank: int, reply: ErrorReply) -> None:
        if reply.peer_lost:
            # "Connection closed by peer" is seldom the cause. The peer's own end comes to us a moment later.
            self._look_after_children(_CAUSE_WAIT)
        self._replies.error(reply.call_id, remote_error(reply, title=self._children[rank].title, rank=rank))

    # --- workers ---------------------------------------------------------------------------------------------------

    def _look_after_children(self, wait: float = 0.0) -> None:
        """Hear what the workers and the kernel have to say; a failure of a worker ends the executor."""
        if self._closed or self._ended is not None:
            return
        if not self._nursery.pump() and not wait:
            return
        deadline = Deadline.after(wait)
        while not self._nursery.failures() and not deadline.expired:
            self._nursery.poll(deadline.remaining())
        try:
            self._nursery.raise_if_failed()
        except ChildFailedError as error:
            self._end(error)

    def is_idle(self) -> bool:
        if self._marks is None or self._closed:
            return True
        places = [self._marks.place(rank) for rank in range(self.world_size)]
        return all(place.busy_since == 0 and place.call_id >= self._next - 1 for place in places)

    def hung(self, limit: float) -> Failure | None:
        """See `Executor.hung`; to be asked a few times within `limit`. The marks tell; no rank is asked.

        Of several that are late the culprit is, in this order: one that has not even taken its call, one that does not
        wait for other ranks, the one furthest behind.
        """
        if self._marks is None or self._closed:
            return None
        now, last = clock.now(), self._next - 1
        late = []
        for rank in range(self.world_size):
            place = self._marks.place(rank)
            if place.busy_since == 0 and place.call_id >= last:
                self._behind.pop(rank, None)  # idle, with nothing to do
                continue
            seen, since = self._behind.get(rank, (None, now))
            if seen != place:
                since = now
            self._behind[rank] = place, since
            if now - since >= limit:
                late.append((place.busy_since != 0, place.waiting, place.call_id, rank))
        if not late:
            return None
        taken, _, call_id, rank = min(late)
        return self._hang(rank, call_id if taken else last, taken, limit, len(late) - 1)

    def _hang(self, rank: int, call_id: int, taken: bool, limit: float, others: int) -> Failure:
        child = self._children[rank]
        what = f"in call {call_id}" if taken else f"has not taken call {call_id}"
        return Failure(
            title=child.title,
            role=child.spec.role,
            kind="timeout",
            headline=f"{what} for {limit:g} s (--watchdog-timeout {limit:g})"
            + (f"; {others} more ranks are late" if others else ""),
            step="serving",
            rank=rank,
            pid=child.pid,
            at=clock.now(),
        )

    def watch_fds(self) -> list[int]:
        """One descriptor; it is readable as well when a worker has only reported something: ask `raise_if_dead`."""
        return [] if self._closed else [self._nursery.fileno()]

    def raise_if_dead(self) -> None:
        self._look_after_children()
        if self._ended is not None:
            raise self._ended
        self._take()
        if (held := self._replies.take_held()) is not None:
            raise held

    @property
    def children(self) -> list[Child]:
        """The worker processes, in rank order."""
        return self._children


def _of_generation(spec: ProcessSpec, generation: int) -> ProcessSpec:
    """The same worker, told which life of its core it belongs to."""
    settings = msgspec.msgpack.decode(spec.payload, type=WorkerSettings)
    payload = msgspec.msgpack.encode(msgspec.structs.replace(settings, generation=generation))
    return msgspec.structs.replace(spec, payload=payload)
