"""Answers that take a while: run the work only as long as somebody waits for it, and send it as server-sent events.

Each answer waits for three things at once: the work, the client hanging up (ASGI's ``http.disconnect``), and the
ticket being cut because the server's time is over. Whichever comes first cancels the work, and with it the request in
the core. There is no deadline besides: an answer takes as long as its tokens do, and an engine's death ends the work
with an error. While an engine is gone and comes back, a stream says so each second in a comment, which clients skip.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from launcher.api.errors import ApiError, ClientGone, cut_short, engine_failed, poisoned
from launcher.api.state import Ticket
from launcher.errors import EngineDeadError, PoisonError

T = TypeVar("T")
log = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"
WAITING = b": waiting for the engine\n\n"
"""A comment: keeps the connection from looking dead to whatever is on the way."""
_encode = msgspec.json.Encoder().encode


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(content) + b"\n\n"


def as_api_error(error: Exception) -> ApiError:
    """Whatever ended a request, in the client's words. What is not the client's or the engine's doing is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return engine_failed(f"The engine died while it worked on this request: {error}", "engine_dead")
    if isinstance(error, PoisonError):
        return poisoned(f"The request cannot be answered: {error}.")
    log.error("a request failed", exc_info=error)
    return engine_failed(f"Internal error: {type(error).__name__}.", "internal_error")


async def while_wanted(receive: Receive, ticket: Ticket, work: Coroutine[Any, Any, T]) -> T:
    """The work's result. ClientGone when the client hangs up first, ApiError (503) when the ticket is cut first."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_hang_up(receive))
    try:
        awaited: set[asyncio.Future[Any]] = {task, watch, ticket.cut}
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise cut_short() if ticket.cut.done() else ClientGone
    finally:
        # Waited for, so that the abort is on its way to the core before anybody is told that the request is over.
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return


class EventStream(Response):
    """Sends what `events` yields as it comes. Owns the ticket: releases it when the stream is over, however it ends."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: Callable[[], AsyncGenerator[bytes, None]],
        ticket: Ticket,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # No buffering on the way (nginx), no caching.
        extra = {"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})}
        super().__init__(headers=extra, media_type=self.media_type)
        del self.headers["content-length"]
        self._events = events
        self._ticket = ticket

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        with self._ticket:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await while_wanted(receive, self._ticket, self._pump(send))
            except ClientGone:
                return
            except Exception as error:
                await send({"type": "http.response.body", "body": event(as_api_error(error).body()), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self, send: Send) -> None:
        async with aclosing(self._events()) as events:
            async for chunk in events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
