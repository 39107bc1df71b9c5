"""The engine core's line to the agent of its own node, which lets the other nodes in (`leader_agent`).

A DEALER on a socket in the run directory. The agent may be killed and come again: it knows nothing then, and the line
says what it has to know whenever it is connected. So a core that is idle need not repeat it by the clock.
"""

from __future__ import annotations

import contextlib
import logging

import zmq

from launcher.errors import HostError
from launcher.nodes.messages import (
    CloseGroup,
    FromAgent,
    GroupJoined,
    GroupLeaving,
    GroupLost,
    GroupWaiting,
    OpenGroup,
    Reader,
    WireError,
    encode,
)
from launcher.nodes.sockets import Watcher, has_input

log = logging.getLogger(__name__)

_LINGER_MS = 200
"""For the last word."""


class AgentLine:
    """One thread; never blocks. `close` it also after an error."""

    def __init__(self, endpoint: str, group: OpenGroup) -> None:
        """`endpoint`: ``ipc://…``, whether somebody listens there yet or not."""
        self._group = group
        self._reader = Reader(FromAgent)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.reconnect_ivl = 100
        self._watcher = Watcher(self._socket)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise HostError(f"cannot connect to this node's agent at {endpoint!r}: {error}") from error

    def fds(self) -> list[int]:
        return [int(self._socket.fd), self._watcher.fileno()]

    def has_news(self) -> bool:
        """Asks both: each look takes its wake-up off the descriptor."""
        words, events = has_input(self._socket), self._watcher.has_input
        return words or events

    @property
    def is_held_back(self) -> bool:
        return False

    def read(self) -> GroupWaiting | GroupJoined | GroupLeaving | GroupLost | None:
        """The next word about our group; None: nothing more now."""
        if any(event.kind == "up" for event in self._watcher.events()):
            self._say(self._group)
        while True:
            try:
                word = self._reader.read(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return None
            except WireError as error:
                log.warning("this node's agent: %s", error)
                continue
            assert isinstance(word, GroupWaiting | GroupJoined | GroupLeaving | GroupLost)
            if word.generation == self._group.generation:
                return word

    def say_again(self) -> None:
        """While the group is not complete: it costs nothing, and no lost word can delay the start."""
        self._say(self._group)

    def end(self, word: CloseGroup) -> None:
        self._say(word)

    def _say(self, word: OpenGroup | CloseGroup) -> None:
        with contextlib.suppress(zmq.Again):
            self._socket.send(encode(word), zmq.NOBLOCK)

    def close(self) -> None:
        """The last word gets `_LINGER_MS` to be taken. Idempotent."""
        if not self._socket.closed:
            self._watcher.close()
            self._socket.close(linger=_LINGER_MS)
        self._context.term()
