"""One DEALER to an engine core, and whether it is connected. Knows frames, not their meaning (asyncio).

Nothing is ever queued for a core that is not connected (ZMQ_IMMEDIATE): a later life must not get requests whose
callers have long been told that they failed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from launcher.clock import Deadline

RECONNECT_MS = 50
SEND_HWM = 10_000
"""Messages; beyond it (the core is in a very long step) sends wait."""
LAST_WORDS = 0.2
"""Seconds for reading what the core said before it went."""
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Connection:
    """Connects at once, and again whenever the other end comes back. On one event loop, until `close`.

    Calls `on_frame` for each frame, `on_up` when a connection stands, `on_down` when it fell (after the last frame that
    came over it).
    """

    def __init__(
        self,
        address: str,
        name: str,
        *,
        on_frame: Callable[[bytes], None],
        on_up: Callable[[], None],
        on_down: Callable[[], None],
    ) -> None:
        self.is_up = False
        self._on_frame, self._on_up, self._on_down = on_frame, on_up, on_down
        self._sending: set[asyncio.Future[object]] = set()
        """Sends that the socket has not taken."""
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.immediate = True
        self._socket.sndhwm = SEND_HWM
        self._socket.rcvhwm = 0  # the core's outbox is the bound; to stall here would only hide a slow reader
        self._socket.reconnect_ivl = RECONNECT_MS
        self._socket.identity = f"{name}/{os.urandom(6).hex()}".encode()
        self._monitor = self._socket.get_monitor_socket(_WATCHED)
        self._monitor.linger = 0
        self._socket.connect(address)
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._receive())]

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

    async def _watch(self) -> None:
        while True:
            event = (await recv_monitor_message(self._monitor))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_up = True
                self._on_up()
            elif event == zmq.EVENT_DISCONNECTED:
                self.is_up = False
                self._drop_unsent()  # it was meant for the life that has ended
                await self._read_out()
                self._on_down()

    async def _read_out(self) -> None:
        deadline = Deadline.after(LAST_WORDS)
        # The event and the frames come by two descriptors: the frames may still be on their way to `_receive`.
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN and not deadline.expired:  # noqa: ASYNC110
            await asyncio.sleep(0)

    def _drop_unsent(self) -> None:
        for sent in list(self._sending):
            sent.cancel()

    async def _receive(self) -> None:
        while True:
            self._on_frame(await self._socket.recv())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._drop_unsent()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()
