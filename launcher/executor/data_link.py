"""The data link of a group: calls from the engine core to each node, answers and news back. Its ends never block.

    engine core  `core_link.CoreLink`  ROUTER, bound on a port that the kernel chooses
    node's agent `NodeLink` (here)     DEALER, one for a life of the group

A node comes in with a `Hello` that has the group's token and generation, and a rank that is not taken; frames of anyone
else are dropped and counted. A message goes to each node once. Each direction is numbered: what is lost, repeated or
not understood ends the link, in words, for the order of calls would be broken. So does the end of the connection:
ZMQ's own reconnecting is of no use here, because what was under way is gone.

Both ends are to be polled as sockets of ZMQ are (edge-triggered, see `launcher.nodes.sockets`): `has_news` before each
wait. Memory is bounded: `HWM` frames of `frames.CHUNK` bytes each way, besides one message that is being put together.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Sequence
from typing import Protocol

import zmq

from launcher.clock import Deadline
from launcher.errors import NodeLostError
from launcher.executor.frames import (
    ANSWER,
    CALL,
    MAX_CHUNK,
    Assembler,
    Frame,
    Whole,
    cut,
    cut_answers,
    is_frame,
    open_parts,
    parts_of,
)
from launcher.ipc.codec import Message
from launcher.ipc.segment import require_headroom
from launcher.nodes.messages import EndGroup, Hello, OnData, Reader, ToData, Welcome, WireError, encode
from launcher.nodes.secure import Security
from launcher.nodes.sockets import Watcher, has_input, make_socket

HWM = 64
MAX_FRAME = MAX_CHUNK + (1 << 20)
STALL_MS = 60_000
"""A node whose ring is full reads nothing for as long as its workers compute. Whether it lives, heartbeats tell."""
LINGER_MS = 500
"""For the last words. A peer that is alive takes them at once."""
WELCOME_LIMIT = 15.0
"""Seconds for the engine core to let a node in: it listened before it had the node told where."""


class Link(Protocol):
    """What a wait needs to know of an end."""

    def fds(self) -> list[int]: ...

    def has_news(self) -> bool:
        """Whether `read` would give something, or what was held back can go on."""

    @property
    def is_held_back(self) -> bool: ...


def make_data_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, security: Security, *, server: bool
) -> zmq.Socket[bytes]:
    socket = make_socket(context, kind, security, server=server, max_message=MAX_FRAME, hwm=HWM)
    socket.setsockopt(zmq.TCP_MAXRT, STALL_MS)
    return socket


class NodeLink:
    """One thread. `close` it also after an error."""

    def __init__(self, endpoint: str, security: Security, hello: Hello) -> None:
        """Begins to connect to the engine core at `endpoint` (``tcp://…``); never waits."""
        self.endpoint = endpoint
        self._generation = hello.generation
        self._deadline = Deadline.after(WELCOME_LIMIT)
        self._reader = Reader(ToData)
        self._calls = Assembler(CALL)
        self._number = 0
        self._words: deque[bytes] = deque()
        self._outbox: deque[Frame] = deque()
        self._why = ""
        """Why nothing more can come."""
        self._was_up = False
        self.paused = False
        """The reader has no room: what is there to be read is no news."""
        self.welcome = False
        """The core has let us in."""
        self.dropped: Counter[str] = Counter()
        self.sent_bytes = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = make_data_socket(self._context, zmq.DEALER, security, server=False)
        self._watcher = Watcher(self._socket)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise NodeLostError(f"node 0's engine core cannot be reached at {endpoint}: {error}") from error
        self.say(hello)

    # --- waiting ---------------------------------------------------------------------------------------------------

    def fds(self) -> list[int]:
        return [int(self._socket.fd), self._watcher.fileno()]

    def has_news(self) -> bool:
        events = int(self._socket.getsockopt(zmq.EVENTS))
        if self._watcher.has_input or (events & zmq.POLLIN and not self.paused):
            return True
        return self.is_held_back and bool(events & zmq.POLLOUT)

    def until_timer(self) -> float:
        """Seconds after which `read` has something to say though nothing came; ``inf``: never."""
        return float("inf") if self.welcome else self._deadline.remaining()

    # --- in --------------------------------------------------------------------------------------------------------

    def read(self) -> Whole | EndGroup | None:
        """The next call, or the group's end; None: nothing more now.

        `NodeLostError` when the core is gone or sent what is none of its words, once all before it was read.
        """
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._judge()
                return None
            try:
                item = self._take(parts)
            except WireError as error:
                self.dropped["malformed"] += 1
                raise self.broken(str(error)) from None
            if item is not None:
                return item

    def _take(self, parts: list[zmq.Frame]) -> Whole | EndGroup | None:
        if len(parts) > 1 or is_frame(parts[0].buffer):
            if not self.welcome:
                raise WireError("a call before its welcome")
            head, chunk = open_parts(parts[0].buffer, [part.buffer for part in parts[1:]])
            if not head.offset:
                require_headroom(head.total, "a call from node 0")
            return self._calls.add(head, chunk)
        word = self._reader.read(parts[0].bytes)
        assert isinstance(word, Welcome | EndGroup)
        if word.generation != self._generation:
            self.dropped["another group"] += 1
        elif isinstance(word, EndGroup):
            return word
        else:
            self.welcome = True
        return None

    def _judge(self) -> None:
        """Nothing is there to be read. Will anything come?"""
        if self.is_down() and not has_input(self._socket):
            raise self._gone(self._why)

    def is_down(self) -> bool:
        """Whether the connection is over. What came before can still be read."""
        for event in self._watcher.events():
            if event.kind == "up":
                self._was_up = True
            elif event.kind == "refused":
                self._why = self._why or f"it was refused: {event.why}"
            elif event.kind == "down" and self._was_up:
                self._why = self._why or "its connection was closed"
        if not self._why and not self.welcome and self._deadline.expired:
            self._why = f"no answer within {WELCOME_LIMIT:g} s (a firewall?)"
        return bool(self._why)

    def broken(self, why: str) -> NodeLostError:
        """The error of a link whose other end says what it must not."""
        return self._gone(f"its data link is broken: {why}")

    def _gone(self, why: str) -> NodeLostError:
        self._why = why
        return NodeLostError(f"node 0's engine core is gone ({self.endpoint}): {why}")

    # --- out -------------------------------------------------------------------------------------------------------

    @property
    def is_held_back(self) -> bool:
        """The core does not take what we have: offer nothing more."""
        return bool(self._outbox or self._words)

    def say(self, word: OnData) -> None:
        """Goes before the frames that are held back."""
        self._words.append(encode(word))
        self.flush()

    def offer(self, rank: int, message: Message) -> None:
        """An answer. It is sent at once or held back, and then still refers to the message's memory.

        `UsageError` if it is too large.
        """
        frames = cut(ANSWER, rank, message, self._number)
        self._number += len(frames)
        self._outbox.extend(frames)
        self.flush()

    def offer_all(self, answers: Sequence[tuple[int, Message]]) -> None:
        """Small answers without arrays, each of another rank, as one frame. Otherwise as `offer`."""
        self._outbox.append(cut_answers(answers, self._number))
        self._number += 1
        self.flush()

    def flush(self) -> None:
        """Send what is held back, as far as it goes."""
        with contextlib.suppress(zmq.Again):
            while self._words:
                self._socket.send(self._words[0], zmq.NOBLOCK)
                self._words.popleft()
            while self._outbox:
                *before, last = parts_of(self._outbox[0])
                for part in before:
                    self._socket.send(part, zmq.NOBLOCK | zmq.SNDMORE)
                self._socket.send(last, zmq.NOBLOCK)  # the first part has its room: so has this one
                self.sent_bytes += sum(map(len, self._outbox[0]))
                self._outbox.popleft()

    def close(self) -> None:
        """Last words get `LINGER_MS` to be taken, if the core is there. Idempotent."""
        if not self._socket.closed:
            self._watcher.close()
            if self._words and not self._why and self._socket.poll(LINGER_MS, zmq.POLLOUT):
                self.flush()
            self._socket.close(linger=0 if self._why else LINGER_MS)
        self._context.term()
