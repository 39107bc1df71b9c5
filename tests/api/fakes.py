"""An engine that the tests hold in their hands, and the server around it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn

from launcher.api.server import HttpServer, make_config
from launcher.api.state import ApiState, Slot
from launcher.api.tokenizer import ReferenceTokenizer, Tokenizer
from launcher.clock import now
from launcher.config import ApiSettings
from launcher.engine.messages import (
    EngineInfo,
    RequestOutput,
    SamplingParams,
    SchedulerStats,
    TokenLogprobs,
    pack,
)
from launcher.errors import EngineDeadError

INFO = EngineInfo(generation=0, max_model_len=512, num_blocks=64, block_size=16, vocab_size=32000)


def tokens_of(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """What the fake samples: a function of prompt, seed and position."""
    start = sum((i + 1) * token for i, token in enumerate(prompt)) + seed
    return [256 + (start * 31 + i * 7) % 31000 for i in range(count)]


def text_of(tokens: Sequence[int]) -> str:
    """As the reference tokenizer writes them."""
    return "".join(f"{token} " for token in tokens)


class FakeEngine:
    """Generates what `script` says, `burst` tokens an output, each after `gate` (when set) was opened."""

    def __init__(self, info: EngineInfo | None = INFO) -> None:
        self.info = self.last_info = info
        self.replayed = 0
        self.alive = True
        self.stats = SchedulerStats(running=1, waiting=2, free_blocks=3, total_blocks=4, preemptions=5, steps=6)
        self.last_progress = now()
        self.script: Callable[[list[int], SamplingParams], list[int]] = lambda prompt, params: tokens_of(
            prompt, params.max_tokens, params.seed if params.temperature else 0
        )
        self.burst = 1
        self.gap = 0.0
        """Seconds between two outputs."""
        self.dies_after: int | None = None
        self.error_after: int | None = None
        self.stop_token: int | None = None
        self.params: dict[str, SamplingParams] = {}
        self.prompts: dict[str, list[int]] = {}
        self.sent: dict[str, int] = {}
        self.aborted: list[str] = []

    async def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        self.params[request_id] = params
        self.prompts[request_id] = prompt_token_ids
        tokens = self.script(prompt_token_ids, params)
        self.sent[request_id] = 0
        finished = False
        try:
            for start in range(0, len(tokens), self.burst):
                await asyncio.sleep(self.gap)
                if self.dies_after is not None and start >= self.dies_after:
                    finished = True
                    raise EngineDeadError("the engine core is gone")
                if self.error_after is not None and start >= self.error_after:
                    finished = True
                    yield RequestOutput(request_id, b"", "error", error="a step failed")
                    return
                new = tokens[start : start + self.burst]
                self.sent[request_id] += len(new)
                finished = start + self.burst >= len(tokens)
                yield self._output(request_id, new, params, finished)
        finally:
            if not finished:
                self.aborted.append(request_id)

    def _output(self, request_id: str, new: list[int], params: SamplingParams, last: bool) -> RequestOutput:
        stopped = last and new[-1] == self.stop_token
        reason = ("stop" if stopped else "length") if last else None
        logprobs = tuple(_logprobs(token, params.logprobs) for token in new) if params.logprobs >= 0 else ()
        return RequestOutput(request_id, pack(new), reason, self.stop_token if stopped else None, logprobs)


def _logprobs(token: int, count: int) -> TokenLogprobs:
    from array import array

    ids = [token, *(token + i for i in range(count))]
    return TokenLogprobs(pack(ids), array("f", [-0.5 * i for i in range(count + 1)]).tobytes(), 0)


def make_state(
    *engines: FakeEngine, tokenizer: Tokenizer | None = None, ready: bool = True, **settings: Any
) -> ApiState:
    """A state over these engines (one by default); `settings` are `ApiSettings`'s."""
    slots = [Slot(engine) for engine in engines or (FakeEngine(),)]
    state = ApiState(ApiSettings(**settings), slots, tokenizer=tokenizer or ReferenceTokenizer())
    if ready:
        state.gate.feed("tree:ready")
    return state


class Served:
    """The application on a real socket, on a thread with its own loop."""

    def __init__(self, state: ApiState, listener: socket.socket) -> None:
        self.state = state
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._listener = listener
        self._serving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="http")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: HttpServer | None = None

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        config: uvicorn.Config = make_config(self.state)
        self._server = HttpServer(config, self._serving.set)
        await self._server.serve(sockets=[self._listener])

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def start(self) -> None:
        self._thread.start()
        assert self._serving.wait(10)

    def stop(self) -> None:
        assert self._loop is not None
        assert self._server is not None
        self._loop.call_soon_threadsafe(self._server.end)
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.state.close()


@contextmanager
def served(state: ApiState) -> Iterator[Served]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = Served(state, listener)
    server.start()
    try:
        yield server
    finally:
        server.stop()
