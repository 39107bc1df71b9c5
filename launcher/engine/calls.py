"""Calls into an engine core that wait for their answers (asyncio). A call belongs to one life of the core."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from launcher.engine.messages import CallReply
from launcher.errors import EngineDeadError, RemoteError


class Calls:
    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._waiting)

    @contextmanager
    def new(self) -> Iterator[tuple[int, asyncio.Future[Any]]]:
        """Number and answer of a call; who leaves the context does not wait for it any more."""
        number = next(self._numbers)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        try:
            yield number, reply
        finally:
            self._waiting.pop(number, None)

    def answer(self, message: CallReply) -> None:
        reply = self._waiting.pop(message.call_id, None)
        if reply is None or reply.done():
            return  # its caller gave up
        if message.error:
            reply.set_exception(RemoteError(message.error, type_name="", remote_traceback="", title="the engine core"))
        else:
            reply.set_result(message.result)

    def fail_all(self, why: str) -> None:
        """The core that was to answer is gone."""
        waiting, self._waiting = self._waiting, {}
        for reply in waiting.values():
            if not reply.done():
                reply.set_exception(EngineDeadError(why))
