"""`mp-nodes`: the first ranks are children of this process, the others those of the agents of other nodes.

    engine core ──► calls ring ──► worker 0 … L-1                        L ranks on each node
                ──► data link ──► agent of node k ──► calls ring ──► worker k*L … (k+1)*L-1
                ◄── answer rings, data link ◄──

A call is encoded once; it goes into the local ring and to each node once. The book of answers, deaths and deadlines is
`MultiprocExecutor`'s and covers all ranks; this file adds where the others are. Nothing is pickled, not even in the
ring of this machine, so that a call means the same on every rank.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launcher import clock
from launcher.clock import Deadline
from launcher.config import EngineSettings, NodeSettings
from launcher.errors import ChildFailedError, Failure, InternalError
from launcher.executor.far_ranks import FarRanks, has_cause
from launcher.executor.frames import Whole
from launcher.executor.hangs import Late
from launcher.executor.multiproc import AFTER_SUPERVISOR, SEND_LIMIT, MultiprocExecutor
from launcher.ipc import Codec
from launcher.ipc.raw import RawCodec
from launcher.ipc.waiting import Spin
from launcher.process.failing import cause_behind
from launcher.process.reports import Step
from launcher.process.spec import ChildMethod, ProcessSpec
from launcher.worker.marks import Place
from launcher.worker.rpc import REPLIES, Call, ErrorReply, Reply

if TYPE_CHECKING:
    from launcher.executor.outside import Outside
    from launcher.executor.waits import Waits
    from launcher.process.child import ChildContext

_COLLECT = 0.5
"""Seconds for a cause to be told, after all that is known is that a connection was closed."""
_TICK = 1.0
"""Seconds between two looks at the clock during the start."""


class MultinodeExecutor(MultiprocExecutor):
    """See the module. `EngineSettings.nodes` says who the others are; their agents are let in by this node's agent."""

    cause_wait = 1.2
    """A node collects for 0.5 s before it says whose failure it was."""
    trusted = False

    def __init__(
        self,
        settings: EngineSettings,
        ctx: ChildContext | None = None,
        *,
        specs: Sequence[ProcessSpec] = (),
        method: ChildMethod | None = None,
    ) -> None:
        super().__init__(settings, ctx, specs=specs, method=method)
        self._far = FarRanks(settings.worker.ranks, self._nodes)
        self._outside: Outside | None = None
        """None before the start: then there is nobody to talk to."""
        self._waits: Waits | None = None
        self._spin = Spin()
        self._progress_at = 0.0
        self._is_looking = False
        self._nudge = -1
        """Readable while there is something that ZMQ's descriptors do not tell any more."""

    @property
    def _nodes(self) -> NodeSettings:
        if self.settings.nodes is None:
            raise InternalError("backend mp-nodes without nodes")
        return self.settings.nodes

    # --- start and end ---------------------------------------------------------------------------------------------

    def _bring_up(self) -> None:
        from launcher.executor.outside import Outside  # only now: ZMQ has threads, and the workers have been forked

        launch_id = "" if self.ctx is None else self.ctx.spec.launch_id
        outside = Outside(self._nodes, self._far, generation=self.settings.generation, launch_id=launch_id)
        outside.on_progress = self._progress
        self._outside = outside
        self._nudge = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._make_waits(outside)
        self._await_nodes(outside)
        self._group.hand_over_group(*outside.place(self.children[0].spec.env))
        outside.placed()
        self._group.hand_over_queues(self._calls_codec, self._codec)
        self._make_waits(outside)
        self._await_ready()

    def _make_waits(self, outside: Outside) -> None:
        from launcher.executor.waits import Waits

        if self._waits is not None:
            self._waits.close()
        self._waits = Waits(self._group.readers, outside.links, [self._group.fileno()])

    def _await_nodes(self, outside: Outside) -> None:
        """Our agent has the limit: it says `GroupLost` when the join timeout has passed."""
        if self.ctx is not None:
            self.ctx.enter(Step.JOIN)
        while True:
            self._look()
            if self._ended is not None:
                raise self._ended
            if self._far.have_joined:
                self._progress("all nodes have joined")
                return
            outside.line.say_again()
            self._nap(Deadline.after(_TICK))

    def _await_ready(self) -> None:
        """The limit counts from the last sign of progress, wherever it was."""
        limit = self.settings.ready_timeout
        begin = clock.now()
        while True:
            self._look()
            if self._ended is not None:
                raise self._ended
            behind, missing = self._group.behind(), self._far.missing
            if not behind and not missing:
                return
            last = max(begin, self._progress_at, *(child.last_progress for child in self.children))
            left = last + limit + (AFTER_SUPERVISOR if self.ctx else 0.0) - clock.now()
            if left <= 0 and behind:
                raise ChildFailedError(self._group.nursery.too_slow(behind, limit, "ready"))
            if left <= 0:
                late = f"is not ready: no progress for {clock.now() - last:.0f} s (--ready-timeout {limit:g})"
                raise ChildFailedError(self._far.gone(min(missing), late, is_late=True))
            self._nap(Deadline.after(min(left, _TICK)))

    def _progress(self, text: str) -> None:
        self._progress_at = clock.now()
        if self.ctx is not None and self._next == 1:
            self.ctx.progress(0, detail=text)

    def _part(self, budget: float) -> None:
        if self._outside is None:
            return
        error = self._ended or sys.exception()  # we may be called because of an error, while it is on its way
        told = self.ctx is None or self.ctx.stop_requested
        orderly = error is None and told and budget > 0
        reason = str(error or ("node 0 was stopped" if orderly else "node 0 is gone")).partition("\n")[0]
        self._outside.end(reason, None if error is None else cause_behind(error), orderly=orderly)

    def shutdown(self, budget: float) -> list[str]:
        try:
            return super().shutdown(budget)
        finally:
            outside, self._outside = self._outside, None
            if outside is not None:
                outside.close()
                os.close(self._nudge)
            if self._waits is not None:
                self._waits.close()
                self._waits = None

    # --- calls -----------------------------------------------------------------------------------------------------

    @property
    def _calls_codec(self) -> Codec:
        return RawCodec()

    def _deliver(self, call: Call, deadline: Deadline) -> None:
        message = self._codec.encode(call)
        if self._outside is None:
            self._group.calls.enqueue(message, deadline=deadline)  # it says that nothing was started
            return
        link = self._outside.link
        frames = link.cut(message)
        # The local ring first: until it has taken the call nothing was sent, and the group is unharmed.
        self._group.calls.enqueue(message, deadline=deadline)
        link.send(frames)
        # From here on all must get it: a node that takes nothing for so long is one that hangs.
        limit = deadline if self._closed else Deadline.after(SEND_LIMIT)
        while not link.flush():
            self._look()
            if self._ended is not None and not self._closed:
                raise self._ended
            if limit.expired:
                late = f"has taken nothing for {limit.seconds:g} s"
                error = ChildFailedError(self._far.gone(link.laggards()[0], late, is_late=True))
                self._end(error)
                raise error
            self._nap(limit)

    def _sleep(self, deadline: Deadline, rank: int) -> None:
        if self._waits is None or self._outside is None:
            return
        begin = clock.now()
        if rank < self._far.first:
            soon = self._group.readers[rank].comes_within(self._spin)
        else:
            soon = self._spin.run(self._outside.link.has_news)
        if not soon:
            self._waits.sleep(deadline)
            self._spin.slept(int((clock.now() - begin) * 1e9))
        self._look()

    def _nap(self, deadline: Deadline) -> None:
        """Until there is news from anywhere; answers of the workers here are no news."""
        if self._waits is not None:
            self._waits.sleep(deadline, answers=False)

    def _take(self) -> None:
        super()._take()
        if self._closed or self._outside is None:
            return
        self._outside.hear()
        while self._outside.arrived:
            self._put_down(self._outside.arrived.popleft())

    def _put_down(self, whole: Whole) -> None:
        """An answer of a rank elsewhere into the book."""
        try:
            reply = self._codec.decode(whole.tag, whole.head, whole.buffers) if whole.tag in REPLIES else None
            why = "an unknown kind"
        except Exception as error:
            reply, why = None, str(error)
        if reply is not None:
            self._took(whole.rank, reply)
        else:
            text = f"sent an answer that cannot be read: {why}"
            self._end(ChildFailedError(self._far.gone(self._far.node_of(whole.rank), text)))

    def _took(self, rank: int, reply: Reply) -> None:
        if self._is_looking and isinstance(reply, ErrorReply) and reply.peer_lost:
            return  # what it follows from has just been found, and is every call's outcome
        super()._took(rank, reply)

    # --- who is there ----------------------------------------------------------------------------------------------

    def _look(self, wait: float = 0.0) -> None:
        if self._closed or self._ended is not None or self._is_looking:
            return
        self._is_looking = True
        try:
            error = self._find_failure(Deadline.after(wait))
            if error is not None:
                with contextlib.suppress(InternalError):
                    self._take()  # answers first: they came before the end, and are good
                self._end(error)
        finally:
            self._is_looking = False

    def _find_failure(self, deadline: Deadline) -> ChildFailedError | None:
        while True:
            local = self._group.look()
            if self._outside is not None:
                self._outside.hear()
            if local is not None or self._far.failures or self._far.lost:
                return self._first_cause(local)
            if deadline.expired:
                return None
            self._nap(deadline)

    def _first_cause(self, local: ChildFailedError | None) -> ChildFailedError:
        """Wait a moment, if all that is known so far may only follow from something else."""
        deadline = Deadline.after(_COLLECT)
        while True:
            own = [] if local is None else [local.cause, *local.follow_ons]
            if has_cause([*own, *self._far.failures]) or deadline.expired:
                return ChildFailedError(*self._far.cause(own))
            self._nap(deadline)
            local = self._group.look() or local
            if self._outside is not None:
                self._outside.hear()

    @property
    def _local_size(self) -> int:
        return self._nodes.ranks_per_node

    def _names(self) -> list[str]:
        return [*super()._names(), *(self._far.name(rank) for rank in range(self._far.first, self.world_size))]

    def _where(self, rank: int) -> dict[str, Any]:
        return super()._where(rank) if rank < self._far.first else self._far.where(rank)

    def _places(self) -> list[Place]:
        here = super()._places()
        if here and self._outside is not None:
            self._outside.hear()
        return here + self._far.places() if here else here

    def _hang(self, late: Late, limit: float) -> Failure:
        return super()._hang(late, limit) if late.rank < self._far.first else self._far.hang(late, limit)

    def tell_hung(self, failure: Failure) -> None:
        if self._outside is not None:
            self._outside.hung(failure)

    def watch_fds(self) -> list[int]:
        if self._closed or self._outside is None:
            return super().watch_fds()
        links = self._outside.links
        news = [link.has_news() for link in links]  # all are asked: each look takes a wake-up off its descriptor
        if any(news) or self._outside.arrived:
            os.eventfd_write(self._nudge, 1)
        return [*super().watch_fds(), self._nudge, *(fd for link in links for fd in link.fds())]

    def raise_if_dead(self) -> None:
        if self._nudge >= 0 and not self._closed:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._nudge)
        super().raise_if_dead()
