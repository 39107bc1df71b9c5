"""`mp`: one process per rank, children of this process; calls over one broadcast ring, answers over a ring per rank.

    engine core ──► calls ring (1 writer, N readers) ──► worker 0 … N-1
                ◄── answer ring of each rank (1 writer, 1 reader) ◄──

The workers are started by the constructor (`local_group`). Every wait also hears the workers' deaths, and a death ends
the executor: the group is of no use without one of its ranks. `multinode` adds ranks on other machines.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launcher.clock import Deadline
from launcher.config import EngineSettings
from launcher.errors import ClosedError, Failure, InternalError, PeerDiedError, UsageError, XserveError
from launcher.executor.base import Executor
from launcher.executor.hangs import HangWatch, Late, is_idle
from launcher.executor.local_group import LocalGroup, of_generation
from launcher.executor.replies import PendingCall, Replies
from launcher.ipc import EMPTY, Codec, WaitSet
from launcher.process.nursery import Child
from launcher.process.spec import ChildMethod, ProcessSpec
from launcher.worker.marks import Place
from launcher.worker.rpc import (
    ALL_RANKS,
    Call,
    ErrorReply,
    Reply,
    ShutdownCall,
    answer_of,
    make_call,
    make_codec,
    remote_error,
)

if TYPE_CHECKING:
    from launcher.process.child import ChildContext

log = logging.getLogger(__name__)

SEND_LIMIT = 60.0
"""Seconds that a call may wait for room: what a rank that long behind has is no longer a load."""
AFTER_SUPERVISOR = 3.0
"""Seconds by which a supervisor's limit of the start comes first: it can show everybody's stacks, and ends us."""


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
    """See the module. Without a `ctx` (library, tests) `specs` and `method` say what to start and how.

    A subclass with ranks elsewhere overrides the methods that begin with ``_`` and have a docstring.
    """

    cause_wait = 0.5
    """Seconds to look for a death behind an error that says that a peer is gone."""
    trusted = True
    """Callables and objects of any kind may be sent: pickled, to processes of our own on this machine."""

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
        if len(specs) != self._local_size:
            raise InternalError(f"{len(specs)} workers are planned for {self._local_size} of {self.world_size} ranks")
        self._answers: WaitSet | None = None
        """All answer rings, and news of the children."""
        self._replies = Replies([])
        self._next = 1
        self._ended: XserveError | None = None
        """Why no call can be made any more."""
        self._closed = False
        self._hangs = HangWatch()
        self._codec = make_codec(trusted=self.trusted)
        specs = [of_generation(spec, settings.generation) for spec in specs]
        self._group = LocalGroup(specs, method or "spawn", ctx=ctx, ring_bytes=settings.ring_bytes)

    # --- start and end ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Hand over the rings, then wait until every rank is READY."""
        self._strike("init")
        try:
            self._bring_up()
            self._replies = Replies(self._names())
        except BaseException as error:
            if isinstance(error, XserveError):
                self._end(error)
            raise

    def _bring_up(self) -> None:
        """Return when every rank is READY."""
        self._group.hand_over_queues(self._calls_codec, self._codec)
        self._group.nursery.wait_ready(self.settings.ready_timeout + (AFTER_SUPERVISOR if self.ctx else 0.0))

    def shutdown(self, budget: float) -> list[str]:
        if self._closed:
            return []
        self._closed = True
        self._strike("cleanup")
        if self._group.has_queues and self._ended is None and budget > 0:
            # In order behind the calls that were sent; the nursery's Stop, which comes next, is for those that wait.
            with contextlib.suppress(XserveError):
                self._deliver(ShutdownCall(self._next), Deadline.after(min(0.5, budget / 4)))
        self._part(budget)
        self._end(ClosedError("the executor was shut down"))
        try:
            return self._group.stop(budget)
        finally:
            if self._answers is not None:
                self._answers.close()

    def _part(self, budget: float) -> None:
        """The last words to ranks elsewhere, before those here are ended; `_ended` is None if all is well."""

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
        self._look()
        if self._ended is not None:
            raise self._ended
        self._take()
        if (held := self._replies.take_held()) is not None:
            raise held
        deadline = Deadline.after(timeout)
        message = make_call(self._next, reply_rank, method, tuple(args), kwargs, trusted=self.trusted)
        self._send(message, deadline.earlier(SEND_LIMIT))
        wanted = range(self.world_size) if unique_reply_rank is None else (reply_rank,)
        label = method if isinstance(method, str) else getattr(method, "__qualname__", repr(method))
        call = self._replies.sent(self._next, label, wanted, single=unique_reply_rank is not None, deadline=deadline)
        self._next += 1
        return CallFuture(self, call)

    def _send(self, call: Call, deadline: Deadline) -> None:
        try:
            self._deliver(call, deadline)
        except PeerDiedError:
            self._look(self.cause_wait)
            raise self._ended or InternalError("a worker's death was seen on the ring, but not by its parent") from None

    def _deliver(self, call: Call, deadline: Deadline) -> None:
        """To every rank. After an error nothing was sent, or the executor has ended."""
        self._group.calls.enqueue(call, deadline=deadline)

    @property
    def _calls_codec(self) -> Codec:
        """Of what `_deliver` writes into the ring."""
        return self._codec

    def try_settle(self, call: PendingCall) -> bool:
        """Take in what has arrived; whether the call has its outcome."""
        if not self._replies.is_settled(call):
            self._take()
            self._look()
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
            self._sleep(replies.earliest(deadline), replies.next_rank(call))

    def _sleep(self, deadline: Deadline, rank: int) -> None:
        """Until there is something to take, or to hear of the workers; `rank` is likely to be the next to answer."""
        ready = self._answer_set().wait(deadline, self._group.readers[rank])
        if ready.fds and not ready.readers:
            # Answers first: a worker may have answered and died, and the answer is good.
            self._look()

    def _take(self) -> None:
        """Feed every answer that has arrived to the book."""
        if self._closed or not self._group.has_queues:
            return
        for rank in self._answer_set().ready():
            reader = self._group.readers[rank]
            while (reply := reader.try_dequeue()) is not EMPTY:
                self._took(rank, reply)

    def _answer_set(self) -> WaitSet:
        if self._answers is None:
            self._answers = WaitSet(self._group.readers, extra_fds=[self._group.fileno()])
        return self._answers

    def _took(self, rank: int, reply: Reply) -> None:
        if isinstance(reply, ErrorReply):
            if reply.peer_lost:
                # "Connection closed by peer" is seldom the cause. The peer's own end comes to us a moment later.
                self._look(self.cause_wait)
            error = remote_error(reply, rank=rank, **self._where(rank))
            self._replies.error(reply.call_id, error)
        else:
            self._replies.answer(rank, reply.call_id, answer_of(reply))

    # --- workers ---------------------------------------------------------------------------------------------------

    @property
    def _local_size(self) -> int:
        """How many of the ranks are on this machine: the first ones."""
        return self.world_size

    def _names(self) -> list[str]:
        """For messages, in rank order."""
        return [f"rank {rank} ({child.title}, pid {child.pid})" for rank, child in enumerate(self.children)]

    def _where(self, rank: int) -> dict[str, Any]:
        """For messages: `title`, and what else `remote_error` takes."""
        return {"title": self.children[rank].title}

    def _look(self, wait: float = 0.0) -> None:
        """Hear what the workers and the kernel have to say; a failure of a worker ends the executor."""
        if self._closed or self._ended is not None:
            return
        if (error := self._group.look(wait)) is not None:
            self._end(error)

    def _places(self) -> list[Place]:
        """Of all ranks, in rank order; empty before the start and after the end."""
        return self._group.places()

    def is_idle(self) -> bool:
        return all(is_idle(place, self._next - 1) for place in self._places())

    def hung(self, limit: float) -> Failure | None:
        """See `Executor.hung`; to be asked a few times within `limit`. The marks tell; no rank is asked."""
        late = self._hangs.late(self._places(), self._next - 1, limit)
        return None if late is None else self._hang(late, limit)

    def _hang(self, late: Late, limit: float) -> Failure:
        child = self.children[late.rank]
        return late.failure(limit, child.title, pid=child.pid)

    def watch_fds(self) -> list[int]:
        """One descriptor; it is readable as well when a worker has only reported something: ask `raise_if_dead`."""
        return [] if self._closed else [self._group.fileno()]

    def raise_if_dead(self) -> None:
        self._look()
        if self._ended is not None:
            raise self._ended
        self._take()
        if (held := self._replies.take_held()) is not None:
            raise held

    @property
    def children(self) -> list[Child]:
        """The worker processes of this machine, in rank order."""
        return self._group.children
