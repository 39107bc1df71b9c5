"""The load of `chaos`: so many requests at a time, most of them streams, each answer compared to the last token.

A request that was under way in a *window* (the API server or the supervisor was being killed, a stop had been asked
for) may end, but its connection must close within 2 s of the death. Every other one must be answered, and rightly.
A server that turns a request away (503 with Retry-After) or cannot be reached has not accepted it: it is asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")
CLOSE_LIMIT = 2.0
"""Seconds from a death to the end of the connections that it held."""
SILENCE_LIMIT = 20.0
"""Seconds without a byte, be it a comment, after which a stream counts as lost."""
WHOLE_LIMIT = 120.0
"""Seconds without a byte for an answer in one piece, which says nothing before it is there."""
RETRY = 0.05


@dataclass
class Window:
    """Requests that were under way between `begin` and `end` may go unanswered."""

    begin: float
    end: float = float("inf")
    close_by: float = float("inf")
    """When the connections of those must be closed."""
    answered_ones_too: bool = True
    """False: only those whose answer had not begun at `begin`."""


@dataclass
class Counts:
    right: int = 0
    replayed_comments: int = 0
    """Keep-alive comments seen in streams whose engine was away."""
    turned_away: int = 0
    excused: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    closed_late: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Question:
    """A request and the text that must come back."""

    prompt: str
    tokens: int
    answer: str
    streams: bool
    began: float = 0.0
    answer_began: float | None = None


class TurnedAway(Exception):
    """503, or nobody there."""


class Broken(Exception):
    """The answer ended before its end."""


class Load:
    """Runs on a thread of its own from `start` to `close`. `make`: the next question, from a seeded generator."""

    def __init__(self, port: int, count: int, seed: int, make: Callable[[random.Random], Question]) -> None:
        self.counts = Counts()
        self.windows: list[Window] = []
        self.running = 0
        """Requests whose answer has begun."""
        self._port, self._count, self._make = port, count, make
        self._chance = random.Random(seed)
        self._open = threading.Event()
        self._ended = False
        self._active: set[Question] = set()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="load")

    def start(self) -> None:
        self._open.set()
        self._thread.start()

    def pause(self, limit: float) -> bool:
        """No new request; whether those that run ended within `limit` seconds."""
        self._open.clear()
        end = time.monotonic() + limit
        while self._active and time.monotonic() < end:
            time.sleep(0.005)
        return not self._active

    def resume(self) -> None:
        self._open.set()

    def oldest(self) -> float:
        """When the oldest request that is under way began; ``inf`` when none is."""
        return min((one.began for one in list(self._active)), default=float("inf"))

    def close(self) -> None:
        self._ended = True
        if self._thread.is_alive():
            self._thread.join()

    def late(self, now: float) -> list[str]:
        """Connections of a window that are still open after its limit, each told once."""
        found = []
        for window in self.windows:
            if now > window.close_by:
                age = now - window.close_by + CLOSE_LIMIT
                held = [one for one in list(self._active) if _held(window, one)]
                found += [f"{one.prompt!r} still open {age:.1f} s after the death" for one in held]
                window.close_by = float("inf")
        self.counts.closed_late += found
        return found

    async def _main(self) -> None:
        tasks = [asyncio.create_task(self._client()) for _ in range(self._count)]
        while not self._ended:
            await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _client(self) -> None:
        while True:
            while not self._open.is_set():
                await asyncio.sleep(0.01)
            question = self._make(self._chance)
            while not await self._ask_until_accepted(question):
                await asyncio.sleep(RETRY)

    async def _ask_until_accepted(self, question: Question) -> bool:
        counts = self.counts
        question.began, question.answer_began = time.monotonic(), None
        self._active.add(question)
        try:
            text = await self._ask(question)
        except TurnedAway:
            counts.turned_away += 1
            return False
        except (Broken, OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            self._ended_early(question, error)
            return True
        finally:
            self._active.discard(question)
            self.running -= question.answer_began is not None
        if text == question.answer:
            counts.right += 1
        else:
            counts.wrong.append(f"{question.prompt!r}: {_difference(text, question.answer)}")
        return True

    def _ended_early(self, question: Question, error: Exception) -> None:
        now = time.monotonic()
        if any(_covers(window, question, now) for window in self.windows):
            self.counts.excused += 1
            return
        age = now - question.began
        self.counts.lost.append(f"{question.prompt!r}, {age:.2f} s old: {type(error).__name__}: {error}"[:400])

    async def _ask(self, question: Question) -> str:
        body = json.dumps(
            {
                "model": "chaos",
                "prompt": question.prompt,
                "max_tokens": question.tokens,
                "temperature": 0,
                "stream": question.streams,
            }
        )
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError as error:
            raise TurnedAway from error
        try:
            writer.write(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
            return await self._read(reader, question)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader, question: Question) -> str:
        status = await _within(reader.readline(), SILENCE_LIMIT if question.streams else WHOLE_LIMIT)
        if not status:
            raise Broken("closed without an answer")
        headers = await _within(reader.readuntil(b"\r\n\r\n"))
        if b" 503 " in status and b"retry-after" in headers.lower():
            raise TurnedAway
        if b" 200 " not in status:
            raise Broken(f"{status!r} {(await _within(reader.read(500)))!r}")
        question.answer_began = time.monotonic()
        self.running += 1
        if not question.streams:
            return str(json.loads(await _whole(reader, headers))["choices"][0]["text"])
        return await self._stream(reader)

    async def _stream(self, reader: asyncio.StreamReader) -> str:
        parts: list[str] = []
        pending = b""
        async for chunk in _chunks(reader):
            pending += chunk
            *events, pending = pending.split(b"\n\n")
            for event in events:
                if event.startswith(b":"):
                    self.counts.replayed_comments += 1
                elif event == b"data: [DONE]":
                    return "".join(parts)
                else:
                    content = json.loads(event.removeprefix(b"data: "))
                    if "choices" not in content:
                        raise Broken(f"the stream said {content}")
                    parts += [choice["text"] for choice in content["choices"]]
        raise Broken(f"the stream ended after {len(parts)} events")


async def _within(wait: Awaitable[T], limit: float = SILENCE_LIMIT) -> T:
    return await asyncio.wait_for(wait, limit)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await _within(reader.readline()) or b"0", 16):
        yield (await _within(reader.readexactly(size + 2)))[:-2]


async def _whole(reader: asyncio.StreamReader, headers: bytes) -> bytes:
    if b"transfer-encoding: chunked" in headers.lower():
        return b"".join([chunk async for chunk in _chunks(reader)])
    length = int(headers.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
    return bytes(await _within(reader.readexactly(length)))


def _covers(window: Window, question: Question, now: float) -> bool:
    if question.began > window.end or now < window.begin:
        return False
    return window.answered_ones_too or question.answer_began is None or question.answer_began > window.begin


def _held(window: Window, question: Question) -> bool:
    """Its answer had begun: it does not wait in the socket's queue for another server."""
    return question.answer_began is not None and question.answer_began <= window.end


def _difference(got: str, wanted: str) -> str:
    if wanted.startswith(got):
        return f"short by {len(wanted) - len(got)} of {len(wanted)} characters"
    place = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), len(wanted))
    return f"differs at character {place}: {got[place : place + 40]!r} instead of {wanted[place : place + 40]!r}"
