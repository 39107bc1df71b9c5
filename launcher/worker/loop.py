"""The busy loop of a worker: take a call, carry it out, answer if asked to or if it failed.

It parks on the ring, the parent's pidfd and the line to the parent at once: an idle worker uses no CPU, and no death or
request to stop goes unheard. It ends with `ShutdownCall`, with a request to stop, or when the parent is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from launcher.clock import Deadline
from launcher.errors import ClosedError, InternalError, PeerDiedError
from launcher.ipc import EMPTY, QueueReader, QueueWriter, WaitSet, Watched
from launcher.worker.marks import Mark
from launcher.worker.rpc import (
    ALL_RANKS,
    Call,
    ErrorReply,
    Reply,
    SampleCall,
    ShutdownCall,
    StepCall,
    carry_out,
    error_reply,
)

log = logging.getLogger(__name__)

_FOREVER = Deadline.after(None)
"""A worker may be idle for days, and its engine core stopped in a debugger: only a death or a stop ends these waits."""


class Loop:
    """`run` returns why it ended: ``shutdown``, ``stop`` or ``parent gone``."""

    def __init__(
        self,
        worker: Any,
        rank: int,
        calls: QueueReader,
        answers: QueueWriter,
        mark: Mark | None = None,
        *,
        trusted: bool = True,
    ) -> None:
        """`trusted`: as the codecs of the queues."""
        self._worker = worker
        self._rank = rank
        self._calls = calls
        self._answers = answers
        self._last = 0
        """Number of the last call; they come without a gap."""
        self.mark = mark or Mark()
        self._trusted = trusted

    def run(self, *, parent: Watched, stop_fd: int, stop_requested: Callable[[], bool]) -> str:
        """`stop_fd` becomes readable when `stop_requested` should be asked."""
        waiting = WaitSet([self._calls], watched=[parent], extra_fds=[stop_fd])
        try:
            return self._run(waiting, stop_requested)
        finally:
            waiting.close()

    def _run(self, waiting: WaitSet, stop_requested: Callable[[], bool]) -> str:
        while True:
            try:
                call = self._next(waiting, stop_requested)
                if isinstance(call, str):
                    return call
                if isinstance(call, ShutdownCall):
                    return "shutdown"
                self._serve(call)
            except (ClosedError, PeerDiedError) as error:
                log.debug("the engine core is gone: %s", error)
                return "parent gone"

    def _next(self, waiting: WaitSet, stop_requested: Callable[[], bool]) -> Call | str:
        """The next call, or why there will be none."""
        while True:
            try:
                call: Any = self._calls.try_dequeue()
            except (ClosedError, PeerDiedError):
                raise
            except InternalError as error:
                if error.__cause__ is None:
                    raise  # the ring itself is broken
                # What arrived can't be made into objects here: a module that only the caller has, for example. The
                # record is behind us, and calls are numbered without a gap, so the answer still finds its call.
                self._last += 1
                self._answers.enqueue(error_reply(self._last, error), deadline=_FOREVER)
                continue
            if call is not EMPTY:
                self._last = call.call_id
                return call  # type: ignore[no-any-return]
            ready = waiting.wait(_FOREVER, self._calls)
            if ready.readers:
                continue  # calls that were sent come before a stop or a death that was seen with them
            if ready.dead:
                return "parent gone"
            if ready.fds and stop_requested():
                return "stop"

    def _serve(self, call: Any) -> None:
        self.mark.begin(call.call_id)
        try:
            reply = carry_out(self._worker, call, trusted=self._trusted)
        except BaseException as error:
            # Everything: a SystemExit out of a library must not end the worker without a word to the caller either.
            reply = error_reply(call.call_id, error)
        if call.reply_rank == self._rank or call.reply_rank == ALL_RANKS or isinstance(reply, ErrorReply):
            self._send(reply)
        self.mark.end(step=isinstance(call, StepCall | SampleCall))

    def _send(self, reply: Reply) -> None:
        try:
            self._answers.enqueue(reply, deadline=_FOREVER)
        except (ClosedError, PeerDiedError):
            raise
        except Exception as error:
            # An answer that can't be serialised is the call's error.
            self._answers.enqueue(error_reply(reply.call_id, error), deadline=_FOREVER)
