"""The engine core's loop: messages of API servers in, steps, outputs out. Single-threaded; one poll when idle.

====================  =================================================================================
message               effect
====================  =================================================================================
`Hello`               `EngineInfo`; what a client of this name had asked for before is aborted
`AddRequest`          to the scheduler; a request id of the client's own that is still in use: dropped
`AbortRequests`       the requests end without an output
`Call`                between two steps; `CallReply`
`Ping`                `Pong`, also during a step (every `WAIT_SLICE`): busy is not hung
client is gone        its requests are aborted (seen when something is sent to it, or at the next Hello)
`Stop` (parent)       the loop ends; `abort` tells every client
a worker's death      `ChildFailedError` out of `run`
====================  =================================================================================

A client's messages are obeyed in order and between two steps, but for `Ping`. All news that a step has for one client
travel in one message.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from launcher.clock import Deadline, now
from launcher.engine.core import WAIT_SLICE, EngineCore
from launcher.engine.front import Client, Front
from launcher.engine.messages import (
    AbortRequests,
    AddRequest,
    Call,
    CallReply,
    EngineInfo,
    Hello,
    Ping,
    Pong,
    RequestOutput,
    ToCore,
)
from launcher.errors import ChildFailedError, ClosedError, Failure, PeerDiedError
from launcher.process.reports import Drain, Stop, TreeState

IDLE_WAIT = 60.0
"""Seconds of an idle wait; everything that matters ends it at once."""
UNSENT_WAIT = 0.02
"""The same while a client has not taken all that is there for it."""
MAX_BACKLOG = 20_000
"""Messages read during one step; beyond it nothing more is read before the step is over, pings included."""
HANG_GRACE = 10.0
"""Seconds that a supervisor has to show the stacks of a hung group and end it."""
RPC_TIMEOUT = 60.0
"""Seconds for a `collective_rpc` whose caller names no time."""


class Parent(Protocol):
    """The part of `ChildContext` that the loop listens to."""

    def fileno(self) -> int: ...

    def report_hang(self, failure: Failure) -> None: ...

    def news(self) -> tuple[list[TreeState | Drain | Stop], bool]: ...


class _StopDuringStepError(ClosedError):
    """Told to stop while a step hangs."""


class CoreLoop:
    def __init__(self, core: EngineCore, front: Front, info: EngineInfo, parent: Parent) -> None:
        self._core = core
        self._front = front
        self._info = info
        self._parent = parent
        self._owners: dict[str, Client] = {}
        """Key of each unfinished request → who asked for it."""
        self._backlog: list[tuple[Client, ToCore]] = []
        """What came during the step under way."""
        self._stop: Deadline | None = None
        self._watch_at = 0.0
        self._unsettled = False
        """Ranks that need not answer may still be in a step that has been answered."""
        self._hung_at: float | None = None
        """When a hung rank was reported."""
        self._handlers: dict[type, Callable[[Client, Any], None]] = {
            Hello: self._hello,
            AddRequest: self._add,
            AbortRequests: self._abort,
            Call: self._call,
            Ping: self._ping,
        }
        self._calls: dict[str, Callable[..., Any]] = {
            "stats": self._stats,
            "collective_rpc": self._collective_rpc,
            "check_health": self._check_health,
        }
        core.while_waiting = self._while_waiting

    def run(self) -> Deadline:
        """Serve until told to stop; what is left of the time for it."""
        try:
            while not self._told_to_stop():
                self._take_in()
                self._flush()  # answers do not wait for the step
                self._watch()  # a rank that need not answer may be hung while steps go on, or end
                if self._core.has_work:
                    self._unsettled = True
                    self._deliver(self._core.step())
                self._flush()
                if not self._core.has_work:
                    self._idle()
        except _StopDuringStepError:
            pass  # the step will never be used
        self._take_in()  # what came too late is told so, too
        self._deliver(self._core.abort_all())
        self._flush()
        assert self._stop is not None
        return self._stop

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _told_to_stop(self) -> bool:
        messages, must_stop = self._parent.news()
        for message in messages:
            if isinstance(message, Stop):
                self._stop = Deadline.after(message.budget)
        if self._stop is None and must_stop:
            self._stop = Deadline.after(self._core.settings.shutdown_timeout)  # SIGTERM says nothing of time
        return self._stop is not None

    def _while_waiting(self) -> None:
        self._core.executor.raise_if_dead()
        self._watch()
        if self._told_to_stop():
            raise _StopDuringStepError("told to stop during a step")
        self._answer_pings()

    def _watch(self) -> None:
        """Raise for a hung rank, once: a moment later the supervisor, which has been told, ends this process."""
        limit = self._core.settings.watchdog_timeout
        if not limit or now() < self._watch_at:
            return
        self._watch_at = now() + min(WAIT_SLICE, limit / 8)
        hung = self._core.executor.hung(limit)
        if hung is None:
            return
        if self._hung_at is None:
            self._hung_at = now()
            step = self._core.stats().steps
            hung = msgspec.structs.replace(hung, headline=f"hung in engine step {step}: {hung.headline}")
            self._core.executor.tell_hung(hung)
            self._parent.report_hang(hung)
        elif now() - self._hung_at > HANG_GRACE:
            raise ChildFailedError(hung)  # nobody came

    def _answer_pings(self) -> None:
        if len(self._backlog) >= MAX_BACKLOG or not self._front.has_input:
            return
        for client, message in self._front.receive():
            if isinstance(message, Ping):
                self._ping(client, message)
            else:
                self._backlog.append((client, message))
        self._flush()

    def _idle(self) -> None:
        """Sleep until a message, a word of the parent or a death."""
        # ZMQ's descriptor tells changes only: what came in before this line would not end the poll.
        if self._front.has_input:
            return
        deaths = self._core.executor.watch_fds()
        poll = select.poll()
        for fd in (self._front.fileno(), self._parent.fileno(), *deaths):
            poll.register(fd, select.POLLIN)
        unsent = any(client.has_mail for client in self._front.clients)
        wait = UNSENT_WAIT if unsent else IDLE_WAIT
        settled = self._core.executor.is_idle()
        if not settled:
            wait = min(wait, WAIT_SLICE)
        elif self._unsettled:
            self._core.executor.raise_if_dead()  # an error of a rank that was not to answer is there by now
        self._unsettled = not settled
        ready = poll.poll(wait * 1000)
        if any(fd in deaths for fd, _ in ready):
            self._core.executor.raise_if_dead()

    # --- out ---------------------------------------------------------------------------------------------------------

    def _deliver(self, news: Iterable[tuple[str, RequestOutput]]) -> None:
        for key, output in news:
            client = self._owners.get(key)
            if client is None:
                continue
            client.outbox.append(output)
            if output.finish_reason is not None:
                del self._owners[key]
                client.keys.discard(key)

    def _flush(self) -> None:
        waiting = [client for client in self._front.clients if client.has_mail]
        if not waiting:
            return
        stats = self._core.stats()
        for client in waiting:
            if not self._front.flush(client, stats):
                self._forget(client)

    def _forget(self, client: Client) -> None:
        """Abort all that it asked for, so that no slot and no block works for nobody."""
        self._core.abort(client.keys)
        for key in client.keys:
            del self._owners[key]
        client.keys.clear()
        client.outbox.clear()
        client.replies.clear()
        self._front.forget(client)

    # --- in ----------------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        backlog, self._backlog = self._backlog, []
        for client, message in backlog + self._front.receive():
            if not client.is_gone:
                self._handlers[type(message)](client, message)

    def _hello(self, client: Client, message: Hello) -> None:
        for other in self._front.clients:
            if other is not client and other.name == message.client:
                self._forget(other)
        self._abort_keys(client, list(client.keys))
        client.name = message.client
        self._front.reply(client, self._info)

    def _key(self, client: Client, request_id: str) -> str:
        return f"{client.number}/{request_id}"

    def _add(self, client: Client, message: AddRequest) -> None:
        key = self._key(client, message.request_id)
        if key in self._owners:
            # An answer would end the stream of the first one, which has done nothing wrong.
            self._front.malformed += 1
            return
        self._owners[key] = client
        client.keys.add(key)
        self._core.add_request(message, key)

    def _abort(self, client: Client, message: AbortRequests) -> None:
        self._abort_keys(client, [self._key(client, request_id) for request_id in message.request_ids])

    def _abort_keys(self, client: Client, keys: list[str]) -> None:
        self._core.abort(keys)
        for key in keys:
            self._owners.pop(key, None)
            client.keys.discard(key)

    def _ping(self, client: Client, message: Ping) -> None:
        began = self._core.step_began
        age = 0.0 if began is None else now() - began
        self._front.reply(client, Pong(message.sequence, self._info.generation, self._core.stats(), age))

    def _call(self, client: Client, message: Call) -> None:
        self._front.reply(client, self._answer(message))

    def _answer(self, message: Call) -> CallReply:
        method = self._calls.get(message.method)
        if method is None:
            known = ", ".join(self._calls)
            return CallReply(message.call_id, error=f"the engine core has no call {message.method!r}; it has {known}")
        try:
            reply = CallReply(message.call_id, method(*message.args))
            msgspec.msgpack.encode(reply)
        except (ChildFailedError, PeerDiedError, ClosedError):
            raise  # not the caller's business: the core ends
        except Exception as error:
            # Whatever a call does, the requests of others go on; the caller gets the error, remote traceback included.
            return CallReply(message.call_id, error=f"{type(error).__name__}: {error}")
        return reply

    def _stats(self) -> dict[str, int]:
        figures: dict[str, int] = msgspec.structs.asdict(self._core.stats())
        return {**figures, "malformed": self._front.malformed, "clients": len(self._front.clients)}

    def _check_health(self) -> None:
        self._core.executor.raise_if_dead()
        self._core.collective_rpc("check_health", timeout=RPC_TIMEOUT)

    def _collective_rpc(
        self,
        method: str,
        args: list[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = RPC_TIMEOUT,
        unique_reply_rank: int | None = None,
    ) -> Any:
        return self._core.collective_rpc(
            method, args or (), kwargs, timeout=timeout, unique_reply_rank=unique_reply_rank
        )
