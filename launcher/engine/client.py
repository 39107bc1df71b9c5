"""An API server's line to one engine core (asyncio). The core may be up, not yet up, hung or gone.

Connection and what follows from it:

==============================  ===================================================================================
event                           effect
==============================  ===================================================================================
connected                       `Hello`; the core answers `EngineInfo`: `info` is set, requests are sent
connected, no info, each second `Hello` again
each second                     `Ping`; `Pong` feeds `alive`, `stats` and, see below, `last_progress`
disconnected                    the core is gone: every call ends with `EngineDeadError`, `info` is None; requests end
                                so, too, or are kept (see below)
`EngineInfo` of a new life      the same, then `info` is the new one
message of an older generation  dropped
==============================  ===================================================================================

*Keeping requests* (`keep_requests`): a core that goes comes back, so its requests wait for it, are sent again with the
output they have so far, and go on where they were; their readers notice nothing but a pause, in which they get an
output without tokens each second. New requests wait, too, once the core has been up. Which are sent when, and which is
given up (`PoisonError`), is `replay`'s table. Nothing here limits the wait: whoever knows that the core will not come
back says ``keep_requests(False)``, and a reader that does not want to wait closes its iterator.

*Progress*: outputs came, or the core answered a ping: then its progress is as old as the step under way, or new when
there is none. So a core that hangs in a step stops making progress although it still answers.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any

import msgspec

from launcher.clock import now
from launcher.engine.calls import Calls
from launcher.engine.connection import Connection
from launcher.engine.messages import (
    AbortRequests,
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
from launcher.engine.replay import Action, Fail, Park, Replay, Send
from launcher.engine.stream import Stream
from launcher.errors import ClosedError, DeadlineError, EngineDeadError, PoisonError, UsageError

__all__ = ["EngineClient", "EngineDeadError"]

TOKEN_BYTES = 4
PING_EVERY = 1.0
"""Seconds."""
ALIVE_WITHIN = 5.0
"""Seconds without any answer after which the core counts as hung."""


class EngineClient:
    """One per engine core. Made anywhere; `start` and all else on one event loop.

    `client_id` names the API server; its connection gets an identity of its own, so that a restarted API server is told
    from the one before it.
    """

    def __init__(self, address: str, client_id: str, *, keeps_requests: bool = False) -> None:
        self.address = address
        self.client_id = client_id
        self.info: EngineInfo | None = None
        """What the core serves; None: it is not up (yet, or any more)."""
        self.last_info: EngineInfo | None = None
        """The same of its last life; None: it was never up."""
        self.stats = SchedulerStats()
        self.last_progress = now()
        """Monotonic seconds."""
        self.malformed = 0
        """Messages dropped because they could not be read."""
        self.replayed = 0
        """Requests sent again because a core was gone."""
        self._keeps = keeps_requests
        self._last_answer = 0.0
        self._arrived = asyncio.Event()
        """Set while `info` is."""
        self._streams: dict[str, Stream] = {}
        """Every request that is not finished, by its own id."""
        self._at_core: dict[str, Stream] = {}
        """Those that were sent, by the id they were sent with."""
        self._replay = Replay()
        self._calls = Calls()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromCore)
        self._connection: Connection | None = None
        self._pinging: asyncio.Task[None] | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            EngineInfo: self._on_info,
            StepOutputs: self._on_outputs,
            CallReply: self._calls.answer,
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
                self.address,
                self.client_id,
                on_frame=self._on_frame,
                on_up=self._say_hello,
                on_falling=self._replay.leave,
                on_down=self._on_down,
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
        self._replay.leave()
        self._pinging.cancel()
        await asyncio.gather(self._pinging, return_exceptions=True)
        # No word to the core is needed: it notices that this connection is gone.
        await connection.close()
        self._keeps = False
        self._lose("the client was closed")

    def keep_requests(self, keeps: bool, why: str = "it will not come back") -> None:
        """Whether a core that goes is expected back. False also ends with `why` what waits for one already."""
        self._keeps = keeps
        if not keeps and self.info is None:
            self._lose(f"the engine core at {self.address} is gone: {why}")

    # --- requests ----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        output_token_ids: Iterable[int] = (),
    ) -> AsyncGenerator[RequestOutput, None]:
        """The request's outputs; the last one has a `finish_reason`. Closing the iterator early aborts in the core.

        An output without tokens or reason is a sign of life: the request waits for its core to come back. `request_id`
        must never come again: outputs of its first use may still be on their way. `output_token_ids`: what was
        generated for it before. `EngineDeadError` when the core is not up or goes away, and is not expected back;
        `PoisonError` when it dies of this request.
        """
        if request_id in self._streams:
            raise UsageError(f"request id {request_id!r} is in use; choose another")
        stream = Stream(request_id, pack(prompt_token_ids), params, pack(output_token_ids))
        if not self._keeps or self.last_info is None:
            self._must_be_up()
        self._streams[request_id] = stream
        unfinished = True
        try:
            self._carry_out(self._replay.add(request_id))
            while unfinished:
                output = await stream.take()
                unfinished = output.finish_reason is None
                yield output
        finally:
            if self._streams.get(request_id) is stream:
                self._leave(stream)

    def _leave(self, stream: Stream) -> None:
        """Nobody waits for it any more. Not awaited: a caller may have been cancelled, or the iterator collected."""
        if stream.wire_id and self._connection is not None:
            self._post(AbortRequests((stream.wire_id,)))
        self._end(stream)

    def _end(self, stream: Stream) -> None:
        """It is finished, for the core as well."""
        del self._streams[stream.request_id]
        self._at_core.pop(stream.wire_id, None)
        self._carry_out(self._replay.forget(stream.request_id))

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests; each one's iterator gets a last output that says ``abort``. Unknown ones are no error."""
        known = [self._streams[request_id] for request_id in request_ids if request_id in self._streams]
        at_core = tuple(stream.wire_id for stream in known if stream.wire_id)
        sent = self._post(AbortRequests(at_core)) if at_core and self._connection is not None else None
        for stream in known:
            stream.put(RequestOutput(stream.request_id, b"", "abort"))
            self._end(stream)
        if sent is not None:
            await sent

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            stream = self._streams[action.request_id]
            match action:
                case Send():
                    message = stream.message()
                    self.replayed += message.request_id != stream.request_id
                    self._at_core[stream.wire_id] = stream
                    self._post(message)
                case Park():
                    self._post(AbortRequests((stream.wire_id,)))
                    self._let_go(stream)
                case Fail():
                    del self._streams[stream.request_id]
                    stream.fail(PoisonError(action.deaths))

    def _let_go(self, stream: Stream) -> None:
        """It is not at the core any more."""
        self._at_core.pop(stream.wire_id, None)
        stream.wire_id = ""

    async def call(self, method: str, *args: Any, timeout: float = 60.0) -> Any:  # noqa: ASYNC109 - as `start`
        """A call into the core (``stats``, ``check_health``, ``collective_rpc``), after the step that runs.

        `RemoteError` with the core's own words when it fails, `DeadlineError` after `timeout` seconds.
        """
        self._must_be_up()
        with self._calls.new() as (number, reply):
            self._post(Call(number, method, args))
            try:
                return await asyncio.wait_for(reply, timeout)
            except TimeoutError:
                raise DeadlineError(f"{self.address} did not answer the call {method} within {timeout} s") from None

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
            self._show_life()

    def _show_life(self) -> None:
        """To those that get nothing because the core is away, hung, or in a very long step."""
        is_stuck = self._keeps and now() - min(self._last_answer, self.last_progress) > ALIVE_WITHIN
        if is_stuck or len(self._at_core) < len(self._streams):
            for stream in self._streams.values():
                if is_stuck or not stream.wire_id:
                    stream.put_sign_of_life()

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
        last = self.last_info
        is_new_life = last is not None and last.generation != info.generation
        if self.info is not None and is_new_life:
            self._lose(f"the engine core at {self.address} was restarted (life {info.generation})")
        self.info = self.last_info = info
        self.last_progress = now()
        self._arrived.set()
        self._carry_out(self._replay.up(new_life=is_new_life))

    def _on_outputs(self, message: StepOutputs) -> None:
        if self.info is None or message.generation != self.info.generation:
            return
        self.stats = message.stats
        self.last_progress = now()
        for output in message.outputs:
            stream = self._at_core.get(output.request_id)
            if stream is not None:
                self._on_output(stream, output)

    def _on_output(self, stream: Stream, output: RequestOutput) -> None:
        if output.finish_reason is None:
            stream.put(output)
            if self._replay.watched:
                self._carry_out(self._replay.tokens(stream.request_id, len(output.new_token_ids) // TOKEN_BYTES))
        elif output.finish_reason == "abort" and self._keeps:
            # We did not ask for it: the core ends. What this request waits for is the next life.
            self._replay.leave(orderly=True)
            self._let_go(stream)
        else:
            stream.put(output)
            self._end(stream)

    def _on_pong(self, message: Pong) -> None:
        if self.info is None or message.generation != self.info.generation:
            return
        self.last_progress = max(self.last_progress, now() - message.step_age)
        self.stats = message.stats

    def _lose(self, why: str) -> None:
        """Everything that waits for this life of the core waits in vain."""
        self.info = None
        self._arrived.clear()
        self._replay.down()
        for stream in list(self._at_core.values()):
            self._let_go(stream)
        if not self._keeps:
            for stream in list(self._streams.values()):
                self._end(stream)
                stream.fail(EngineDeadError(why))
        self._calls.fail_all(why)
