"""The API server's process: target ``launcher.api.server:run``.

The socket arrives bound and listening (descriptor ``http``), so clients that come while the model loads are answered,
with 503 and the phase, not refused. In this order: serve → READY → connect to the engines and load the tokenizer.

From the parent: `TreeState` opens and closes the gate, `Drain` → finish what runs, then `Drained`; `Stop`, SIGTERM or a
dead parent → close at once. Signals are the process room's: this file installs no handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator

import msgspec
import uvicorn

from launcher.api.gate import WITHOUT_RETURN
from launcher.api.routes import build_app
from launcher.api.state import ApiState, Slot
from launcher.api.tokenizer import Tokenizer, load_tokenizer, torch_hidden
from launcher.config import ApiSettings
from launcher.engine.client import EngineClient
from launcher.errors import DeadlineError, InternalError, UsageError
from launcher.process.child import ChildContext
from launcher.process.reports import Drain, Drained, Step, Stop, TreeState

log = logging.getLogger(__name__)

_CONNECT_ROUND = 30.0
"""Seconds after which a silent engine is mentioned again. Connecting has no end: the supervisor has the limit."""
_GRACE = 1.0
"""Seconds that answers which were just cut have for their last bytes."""
_KEEP_ALIVE = 75
"""Seconds. Longer than most clients keep an idle connection: so they close first, and never write into a close."""


class HttpServer(uvicorn.Server):  # type: ignore[misc]  # uvicorn is not followed by the type checker
    """uvicorn without its signal handlers, without its ten wake-ups a second, and with a word when it serves."""

    def __init__(self, config: uvicorn.Config, on_serving: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_serving = on_serving
        self._ended = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._on_serving()

    async def main_loop(self) -> None:
        # The tick renews the Date header.
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), 1.0)

    def end(self) -> None:
        self.should_exit = True
        self._ended.set()


def make_config(state: ApiState) -> uvicorn.Config:
    settings = state.settings
    return uvicorn.Config(
        build_app(state),
        log_config=None,
        # Its "started" and "shutting down" are what the tree's own steps say.
        log_level="debug" if settings.log_level == "debug" else "warning",
        access_log=False,
        lifespan="off",
        loop="asyncio",
        ws="none",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=int(_GRACE),
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
    )


def _check_certificate(settings: ApiSettings) -> None:
    """UsageError before anything is served, instead of a broken handshake for every client."""
    if settings.ssl_certfile is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except OSError as error:
        files = f"certificate {settings.ssl_certfile} and key {settings.ssl_keyfile or 'in the same file'}"
        raise UsageError(f"cannot serve TLS with {files}: {error}") from error


def run(ctx: ChildContext) -> None:
    """Serve until told to stop. Raises what makes serving impossible (no tokenizer, a bad certificate)."""
    settings = msgspec.msgpack.decode(ctx.spec.payload, type=ApiSettings)
    _check_certificate(settings)
    if "http" not in ctx.descriptors:
        raise InternalError("the API server was given no listening socket (descriptor 'http')")
    listener = socket.socket(fileno=ctx.descriptors["http"])
    listener.setblocking(False)
    asyncio.run(_Server(ctx, settings).serve(listener))


class _Server:
    def __init__(self, ctx: ChildContext, settings: ApiSettings) -> None:
        self._ctx = ctx
        self._settings = settings
        self._clients = [
            EngineClient(address, f"{ctx.spec.title}-{index}", keeps_requests=settings.restart)
            for index, address in enumerate(settings.engine_addresses)
        ]
        self._state = ApiState(settings, [Slot(client) for client in self._clients])
        self._http = HttpServer(make_config(self._state), self._serving)
        self._drain: asyncio.Task[None] | None = None
        self._setup: asyncio.Task[None] | None = None

    async def serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._ctx.fileno(), self._on_message)
        try:
            await self._http.serve(sockets=[listener])
        finally:
            loop.remove_reader(self._ctx.fileno())
            await self._close()
        if self._setup is not None and not self._setup.cancelled() and (error := self._setup.exception()):
            raise error

    def _serving(self) -> None:
        self._ctx.ready({"http": True})
        self._setup = asyncio.create_task(self._set_up())
        self._setup.add_done_callback(self._on_set_up)
        self._on_message()  # what came before anybody listened

    # --- what requests need

    async def _set_up(self) -> None:
        """Engines and tokenizer, side by side. Raises when there is no tokenizer."""
        await asyncio.gather(self._load_tokenizer(), *(self._connect(client) for client in self._clients))

    async def _load_tokenizer(self) -> None:
        def load() -> Tokenizer:
            with torch_hidden():
                return load_tokenizer(self._settings.model)

        # On a thread: importing takes a second, and /livez has to answer meanwhile.
        self._state.tokenizer = await self._state.work.run_on_thread(load)

    async def _connect(self, client: EngineClient) -> None:
        while True:
            try:
                await client.start(_CONNECT_ROUND)
                return
            except DeadlineError as error:
                log.debug("%s; still trying", error)

    def _on_set_up(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        if task.exception() is not None:
            self._http.end()  # `serve` raises it
        else:
            self._ctx.enter(Step.SERVING)  # tokenizer and engines are there: the tree may call itself ready

    # --- what the parent says

    def _on_message(self) -> None:
        messages, must_stop = self._ctx.news()
        for message in messages:
            match message:
                case TreeState(state=state, phase=phase):
                    self._state.gate.feed_tree(state, phase)
                    self._expect_engines(state, phase)
                case Drain(budget=budget):
                    self._start_drain(budget)
                case Stop():
                    self._stop()
        if must_stop:
            self._stop()

    def _expect_engines(self, state: str, phase: str) -> None:
        """With restarts, requests wait for an engine that is gone until the tree says that none comes back."""
        if self._settings.restart:
            what = "has failed" if state == "failed" else f"is {state}"
            for client in self._clients:
                client.keep_requests(state not in WITHOUT_RETURN, f"the server {what}: {phase or state}")

    def _start_drain(self, budget: float) -> None:
        self._state.gate.feed("drain", "draining")
        if self._drain is None:
            self._drain = asyncio.create_task(self._finish_requests(budget))

    async def _finish_requests(self, budget: float) -> None:
        cut = 0
        if not await self._state.wait_idle(budget):
            cut = self._state.cut_all()
            await self._state.wait_idle(_GRACE)
        self._ctx.send(Drained(cut=cut))

    def _stop(self) -> None:
        if self._state.gate.state == "stopping" and self._http.should_exit:
            return
        self._state.gate.feed("stop", "stopping")
        self._state.cut_all()
        self._http.end()

    async def _close(self) -> None:
        self._ctx.enter(Step.STOPPING)
        tasks = [task for task in (self._drain, self._setup) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self._clients), return_exceptions=True)
        self._state.close()
