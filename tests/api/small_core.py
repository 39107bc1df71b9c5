"""An engine core's side of the wire, without an engine."""

from __future__ import annotations

import threading
from typing import Any

from launcher.engine.front import Front
from launcher.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineInfo,
    Hello,
    Ping,
    Pong,
    RequestOutput,
    SchedulerStats,
    pack,
    unpack,
)
from tests.api.fakes import tokens_of

INFO = EngineInfo(generation=0, max_model_len=4096, num_blocks=64, block_size=16, vocab_size=32000)


class SmallCore:
    """Speaks an engine core's protocol on a thread: one token of every request each `step` seconds."""

    def __init__(self, address: str) -> None:
        self.step = 0.002
        self.running: dict[str, tuple[Any, list[int]]] = {}
        self.aborted: list[str] = []
        self._front = Front(address, 0)
        self._end = threading.Event()
        self._steps = 0
        self._thread = threading.Thread(target=self._run, name="core")
        self._thread.start()

    def _run(self) -> None:
        with self._front as front:
            while not self._end.wait(self.step):
                for client, message in front.receive():
                    self._hear(client, message)
                self._steps += 1
                for request_id, (client, tokens) in list(self.running.items()):
                    token = tokens.pop(0)
                    reason = None if tokens else "length"
                    client.outbox.append(RequestOutput(request_id, pack([token]), reason))
                    if reason:
                        del self.running[request_id]
                for client in front.clients:
                    if not front.flush(client, self._stats()):
                        front.forget(client)

    def _stats(self) -> SchedulerStats:
        return SchedulerStats(running=len(self.running), steps=self._steps)

    def _hear(self, client: Any, message: Any) -> None:
        match message:
            case Hello():
                self._front.reply(client, INFO)
            case Ping(sequence=sequence):
                self._front.reply(client, Pong(sequence, 0, self._stats()))
            case AddRequest():
                tokens = tokens_of(unpack(message.prompt_token_ids), message.sampling.max_tokens)
                self.running[message.request_id] = (client, tokens)
            case AbortRequests(request_ids=ids):
                self.aborted += ids
                for request_id in ids:
                    self.running.pop(request_id, None)

    def close(self) -> None:
        self._end.set()
        self._thread.join(10)
