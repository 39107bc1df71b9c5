"""An API server's line to one engine core (asyncio). The core may be up, not yet up, hung or gone.

Connection and what follows from it:

==============================  ===================================================================================
event                           effect
==============================  ===================================================================================
connected                       `Hello`; the core answers `EngineInfo`: `info` is set, requests are taken
connected, no info, each second `Hello` again
each second                     `Ping`; `Pong` feeds `alive`, `stats` and, see below, `last_progress`
disconnected                    the core is gone: every request and call ends with `EngineDeadError`, `info` is None
`EngineInfo` of a new life      the same, then `info` is the new one
message of an older generation  dropped
==============================  ===================================================================================

*Progress*: outputs came, or the core answered a ping and either had no request or had made a step since the last one.
So a core that hangs in a step stops making progress even if it could still answer.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any

import msgspec

from launcher.clock import now
from launcher.engine.connection import Connection
from launcher.engine.messages import (
    AbortRequests,
    AddRequest,
    Call,
    CallReply,
    EngineInfo,
    FromCore,
    Hello,
    Ping,
    Pong,
    RequestOutput,
    SamplingParams,
    SchedulerStats,
    StepOutputs,
    ToCore,
    pack,
)
from launcher.errors import ClosedError, DeadlineError, EngineDeadError, RemoteError, UsageError

__all__ = ["EngineClient", "EngineDeadError"]

PING_EVERY = 1.0
"""Seconds."""
ALIVE_WITHIN = 5.0
"""Seconds without any answer after which the core counts as hung."""

Item = RequestOutput | EngineDeadError


class EngineClient:
    """One per engine core. Made anywhere; `start` and all else on one event loop.

    `client_id` names the API server; its connection gets an identity of its own, so that a restarted API server is told
    from the one before it.
    """

    def __init__(self, address: str, client_id: str) -> None:
        self.address = address
        self.client_id = client_id
        self.info: EngineInfo | None = None
        """What the core serves; None: it is not up (yet, or any more)."""
        self.stats = SchedulerStats()
        self.last_progress = now()
        """Monotonic seconds."""
        self.malformed = 0
        """Messages dropped because they could not be read."""
        self._last_answer = 0.0
        self._arrived = asyncio.Event()
        """Set while `info` is."""
        self._streams: dict[str, asyncio.Queue[Item]] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromCore)
        self._connection: Connection | None = None
        self._pinging: asyncio.Task[None] | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            EngineInfo: self._on_info,
            StepOutputs: self._on_outputs,
            CallReply: self._on_reply,
            Pong: self._on_pong,
        }

    @property
    def alive(self) -> bool:
        """The core is up and has answered lately."""
        return self.info is not None and now() - self._last_answer < ALIVE_WITHIN

    @property
    def inflight(self) -> int:
        """Requests that are not finished."""
        return len(self._streams)

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self, timeout: float) -> EngineInfo:  # noqa: ASYNC109 - one number of seconds is the whole contract
        """Connect, and wait until the core answers. After `DeadlineError` it goes on trying; `info` shows success."""
        if self._connection is None:
            self._connection = Connection(
                self.address, self.client_id, on_frame=self._on_frame, on_up=self._say_hello, on_down=self._on_down
            )
            self._pinging = asyncio.create_task(self._ping(self._connection))
        try:
            await asyncio.wait_for(self._arrived.wait(), timeout)
        except TimeoutError:
            raise DeadlineError(f"the engine core at {self.address} did not answer within {timeout} s") from None
        assert self.info is not None
        return self.info

    async def close(self) -> None:
        """Disconnect; what still runs ends with `EngineDeadError`, and is aborted in the core."""
        connection, self._connection = self._connection, None
        if connection is None or self._pinging is None:
            return
        self._pinging.cancel()
        await asyncio.gather(self._pinging, return_exceptions=True)
        # No word to the core is needed: it notices that this connection is gone.
        await connection.close()
        self._lose("the client was closed")

    # --- requests ----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        output_token_ids: Iterable[int] = (),
    ) -> AsyncGenerator[RequestOutput, None]:
        """The request's outputs; the last one has a `finish_reason`. Closing the iterator early aborts in the core.

        `request_id` must never come again: outputs of its first use may still be on their way. `output_token_ids`: what
        an earlier life of the core has generated for it. `EngineDeadError` when the core is not up or goes away.
        """
        if request_id in self._streams:
            raise UsageError(f"request id {request_id!r} is in use; choose another")
        stream: asyncio.Queue[Item] = asyncio.Queue()
        message = AddRequest(request_id, pack(prompt_token_ids), params, pack(output_token_ids))
        self._must_be_up()
        self._streams[request_id] = stream
        unfinished = True
        try:
            self._post(message)
            while unfinished:
                item = await stream.get()
                if isinstance(item, EngineDeadError):
                    unfinished = False
                    raise item
                unfinished = item.finish_reason is None
                if not unfinished:
                    # Before the last output is given away: the caller may never come back for more.
                    self._streams.pop(request_id, None)
                yield item
        finally:
            if unfinished:
                self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        # Not awaited: this runs when a caller was cancelled or the iterator is collected.
        if self._streams.pop(request_id, None) is not None and self._connection is not None:
            self._post(AbortRequests((request_id,)))

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests; each one's iterator gets a last output that says ``abort``. Unknown ones are no error."""
        known = tuple(request_id for request_id in request_ids if request_id in self._streams)
        if not known:
            return
        for request_id in known:
            self._streams.pop(request_id).put_nowait(RequestOutput(request_id, b"", "abort"))
        if self._connection is not None and (sent := self._post(AbortRequests(known))) is not None:
            await sent

    async def call(self, method: str, *args: Any, timeout: float = 60.0) -> Any:  # noqa: ASYNC109 - as `start`
        """A call into the core (``stats``, ``check_health``, ``collective_rpc``), after the step that runs.

        `RemoteError` with the core's own words when it fails, `DeadlineError` after `timeout` seconds.
        """
        self._must_be_up()
        number = next(self._numbers)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = reply
        try:
            self._post(Call(number, method, args))
            return await asyncio.wait_for(reply, timeout)
        except TimeoutError:
            raise DeadlineError(f"{self.address} did not answer the call {method} within {timeout} s") from None
        finally:
            self._calls.pop(number, None)

    def _must_be_up(self) -> None:
        if self._connection is None:
            raise ClosedError(f"the client of {self.address} is not started, or closed")
        if self.info is None or not self._connection.is_up:
            raise EngineDeadError(f"the engine core at {self.address} is not up")

    def _post(self, message: ToCore) -> Awaitable[object] | None:
        assert self._connection is not None
        return self._connection.post(self._encoder.encode(message))

    async def _ping(self, connection: Connection) -> None:
        for sequence in itertools.count(1):
            await asyncio.sleep(PING_EVERY)
            # One unsent message is enough of a question: a core in a long step must not find hundreds.
            if connection.is_up and not connection.is_congested:
                self._post(Ping(sequence) if self.info is not None else Hello(self.client_id))

    # --- what the core says ------------------------------------------------------------------------------------------

    def _say_hello(self) -> None:
        self._post(Hello(self.client_id))

    def _on_down(self) -> None:
        self._lose(f"the engine core at {self.address} is gone: it closed the connection")

    def _on_frame(self, frame: bytes) -> None:
        try:
            message = self._decoder.decode(frame)
        except msgspec.DecodeError:
            self.malformed += 1
            return
        self._last_answer = now()
        self._handlers[type(message)](message)

    def _on_info(self, info: EngineInfo) -> None:
        if self._connection is None or not self._connection.is_up:
            return  # the last words of a life that has ended
        if self.info is not None and self.info.generation != info.generation:
            self._lose(f"the engine core at {self.address} was restarted (life {info.generation})")
        self.info = info
        self.last_progress = now()
        self._arrived.set()

    def _on_outputs(self, message: StepOutputs) -> None:
        if self.info is None or message.generation != self.info.generation:
            return
        self.stats = message.stats
        self.last_progress = now()
        for output in message.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put_nowait(output)

    def _on_reply(self, message: CallReply) -> None:
        reply = self._calls.pop(message.call_id, None)
        if reply is None or reply.done():
            return  # its caller gave up
        if message.error:
            reply.set_exception(RemoteError(message.error, type_name="", remote_traceback="", title="the engine core"))
        else:
            reply.set_result(message.result)

    def _on_pong(self, message: Pong) -> None:
        if self.info is None or message.generation != self.info.generation:
            return
        idle = message.stats.running + message.stats.waiting == 0
        if idle or message.stats.steps != self.stats.steps:
            self.last_progress = now()
        self.stats = message.stats

    def _lose(self, why: str) -> None:
        """Everything that waits for this life of the core waits in vain."""
        self.info = None
        self._arrived.clear()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.put_nowait(EngineDeadError(why))
        calls, self._calls = self._calls, {}
        for reply in calls.values():
            if not reply.done():
                reply.set_exception(EngineDeadError(why))
