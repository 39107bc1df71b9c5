"""What happens around every request, as plain ASGI (no wrapping of streams): figures, the key, the size of the body."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from launcher.api.errors import ApiError, body_too_large, wrong_key
from launcher.api.metrics import Metrics
from launcher.clock import now

GUARDED = "/v1/"
"""Below it a key is needed. Probes and figures stay open: who asks them has no key."""


class Figures:
    """Counts requests and their time. `paths`: those that have a line of their own; all others are ``other``, or a
    scanner could fill the registry."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started = now()
        status = 499  # hung up before there was an answer

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.latency.labels(path).observe(now() - started)


class Guard:
    """Turns away requests without a valid key. Without keys everybody may."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"].startswith(GUARDED):
            error = self._judge(Headers(scope=scope).get("authorization", ""))
            if error is not None:
                return await error.response()(scope, receive, send)
        return await self._app(scope, receive, send)

    def _judge(self, header: str) -> ApiError | None:
        scheme, _, given = header.partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            return wrong_key(missing=True)
        # All keys are compared, each in constant time: how long it takes says nothing about any of them.
        token = given.strip().encode()
        matches = [hmac.compare_digest(token, key) for key in self._keys]
        return None if any(matches) else wrong_key(missing=False)


async def read_body(receive: Receive, headers: Headers, limit: int) -> bytes:
    """The whole body. ApiError (413) as soon as it is known to be longer than `limit` bytes; EOFError on hang-up."""
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise body_too_large(limit)
    parts = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise EOFError("the client hung up while it sent its request")
        parts += message.get("body", b"")
        if len(parts) > limit:
            raise body_too_large(limit)
        if not message.get("more_body", False):
            return bytes(parts)
