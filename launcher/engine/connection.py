"""A DEALER to an engine core, made anew whenever the core goes away. Knows frames, not their meaning (asyncio).

A socket serves one life of the core: when the connection falls, what had come over it is read to the end, and socket
and identity are thrown away with all that was not sent: a later life must not get requests whose callers have long been
told that they failed. (ZMQ_IMMEDIATE would throw away the unread answers too.)
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from launcher.clock import Deadline

RECONNECT_MS = 50
SEND_HWM = 10_000
"""Messages; beyond it (the core is in a very long step) sends wait."""
LAST_WORDS = 0.5
"""Seconds for reading what the core said before it went."""
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED

log = logging.getLogger(__name__)


class Connection:
    """Connects at once, and again whenever the other end comes back. On one event loop, until `close`.

    Calls `on_frame` for each frame, `on_up` when a connection stands, `on_falling` as soon as it has fallen (nothing
    can be sent any more), and `on_down` after the last frame that had come over it.
    """

    def __init__(
        self,
        address: str,
        name: str,
        *,
        on_frame: Callable[[bytes], None],
        on_up: Callable[[], None],
        on_falling: Callable[[], None],
        on_down: Callable[[], None],
    ) -> None:
        self.is_up = False
        self._address, self._name = address, name
        self._on_frame, self._on_up, self._on_falling, self._on_down = on_frame, on_up, on_falling, on_down
        self._sending: set[asyncio.Future[object]] = set()
        """Sends that the socket has not taken."""
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket = self._open()
        self._task = asyncio.create_task(self._run())

    def _open(self) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.sndhwm = SEND_HWM
        socket.rcvhwm = 0  # the core's outbox is the bound; to stall here would only hide a slow reader
        socket.reconnect_ivl = RECONNECT_MS
        socket.identity = f"{self._name}/{os.urandom(6).hex()}".encode()
        return socket

    @property
    def is_congested(self) -> bool:
        """Something posted has not left yet."""
        return bool(self._sending)

    def post(self, frame: bytes) -> Awaitable[object] | None:
        """Send without waiting. None: the socket has taken it; else what ends when it has, in order of posting.

        Dropped when the connection is down: `on_down` says so to whoever waits for an answer.
        """
        if not self.is_up:
            return None
        sent: asyncio.Future[object] = asyncio.ensure_future(self._socket.send(frame))
        if sent.done():
            sent.result()
            return None
        self._sending.add(sent)
        sent.add_done_callback(self._sent)
        return sent

    def _sent(self, future: asyncio.Future[object]) -> None:
        self._sending.discard(future)
        if not future.cancelled():
            future.exception()  # the socket was closed: whoever waits for an answer is told by `on_down`

    async def _run(self) -> None:
        while True:
            await self._one_life(self._socket)
            self._on_down()
            self._socket = self._open()

    async def _one_life(self, socket: zmq.asyncio.Socket) -> None:
        """From the first attempt to connect until the connection falls."""
        monitor = socket.get_monitor_socket(_WATCHED)
        receiving = asyncio.create_task(self._receive(socket))
        try:
            socket.connect(self._address)
            while (await recv_monitor_message(monitor))["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_up = True
                self._on_up()
            self.is_up = False
            self._on_falling()
            await self._read_out(socket)
        finally:
            # No await in here: a second cancellation would leave the sockets open, and their context waits for them.
            self.is_up = False
            receiving.cancel()
            for sent in list(self._sending):
                sent.cancel()
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frame = await socket.recv()
            try:
                self._on_frame(frame)
            except Exception:
                # A bug; but the requests that other frames are about must go on.
                log.exception("a message of the engine core at %s was not understood", self._address)

    async def _read_out(self, socket: zmq.asyncio.Socket) -> None:
        # The event and the frames come by two descriptors: the frames may still be on their way to `_receive`.
        deadline = Deadline.after(LAST_WORDS)
        while int(socket.get(zmq.EVENTS)) & zmq.POLLIN and not deadline.expired:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)
