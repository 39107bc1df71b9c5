"""What all requests of one API server share: tokenizer, engines, the gate, and the requests in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from launcher.api.errors import ApiError, overloaded, unavailable, unknown_model
from launcher.api.gate import Gate
from launcher.api.metrics import Metrics
from launcher.api.prompts import TextWork
from launcher.api.tokenizer import Tokenizer
from launcher.clock import now
from launcher.config import ApiSettings
from launcher.engine.messages import EngineInfo, RequestOutput, SamplingParams, SchedulerStats

PROGRESS_LIMIT = 30.0
"""Seconds that one step may take until its engine counts as hung. (One that does not answer does so much sooner: see
`Engine.alive`.)"""


class Engine(Protocol):
    """What the HTTP front asks of `launcher.engine.client.EngineClient`; tests put a fake in its place."""

    @property
    def info(self) -> EngineInfo | None: ...
    @property
    def last_info(self) -> EngineInfo | None: ...
    @property
    def alive(self) -> bool: ...
    @property
    def stats(self) -> SchedulerStats: ...
    @property
    def last_progress(self) -> float: ...
    @property
    def replayed(self) -> int: ...

    def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]: ...


@dataclass(eq=False)
class Slot:
    """An engine and how many sequences this server has running on it."""

    engine: Engine
    running: int = 0


class Ticket:
    """One admitted HTTP request. `cut` is set when the server can wait for it no longer. Use as a context manager."""

    def __init__(self, state: ApiState, sequences: int) -> None:
        self.sequences = sequences
        self.cut: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._state = state
        self._kept = False

    def __enter__(self) -> Ticket:
        self._kept = False
        return self

    def keep(self) -> Ticket:
        """Leaving the current ``with`` shall not release it: the answer, which is still to come, will."""
        self._kept = True
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if not self._kept:
            self.release()

    def release(self) -> None:
        """The request is over. Idempotent."""
        self._state.forget(self)


@dataclass
class ApiState:
    settings: ApiSettings
    engines: list[Slot] = field(default_factory=list)
    tokenizer: Tokenizer | None = None
    """None: still loading."""
    gate: Gate = field(default_factory=Gate)
    metrics: Metrics = field(default_factory=Metrics)
    work: TextWork = field(default_factory=TextWork)

    def __post_init__(self) -> None:
        self._tickets: set[Ticket] = set()
        self._sequences = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # --- may requests come in?

    def not_ready(self) -> tuple[str, str] | None:
        """``(state, phase)`` when requests are turned away, None when they are taken."""
        if not self.gate.admits:
            return self.gate.state, self.gate.phase or self.gate.state
        if self.tokenizer is None:
            return "starting", "loading the tokenizer"
        if not any(slot.engine.info is not None for slot in self.engines):
            return "starting", "connecting to the engine"
        if not self._usable():
            return "starting", "the engine does not answer"
        return None

    def refusal(self) -> tuple[str, str] | None:
        """``(state, phase)`` when a new request is turned away. With restarts, one that comes while an engine is gone
        is taken although the server is not ready: it waits, as those do that were there before."""
        reason = self.not_ready()
        waits = self.settings.restart and self.gate.queues and self.tokenizer is not None
        return None if waits and any(slot.engine.last_info is not None for slot in self.engines) else reason

    def unhealthy(self) -> str | None:
        """Why `/health` is 503; None when all is well: busy is well, hung is not."""
        if not self.gate.admits:
            return f"the tree is {self.gate.state}: {self.gate.phase or self.gate.state}"
        for index, slot in enumerate(self.engines):
            silent = now() - slot.engine.last_progress
            if not slot.engine.alive:
                return f"engine {index} does not answer"
            if silent > PROGRESS_LIMIT:
                return f"engine {index} answers, but has been in one step for {silent:.1f} s"
        return None

    # --- requests

    def ready(self) -> tuple[Tokenizer, EngineInfo]:
        """What a request needs to be judged. ApiError (503) when it cannot be answered now."""
        if (reason := self.refusal()) is not None:
            raise unavailable(*reason)
        engine = self.choose().engine
        info = engine.info or engine.last_info
        assert self.tokenizer is not None
        assert info is not None
        return self.tokenizer, info

    def check_model(self, name: str) -> None:
        """ApiError (404) for a model that is not served here."""
        if name != self.settings.served_model_name:
            raise unknown_model(name, self.settings.served_model_name)

    def admit(self, sequences: int) -> Ticket:
        """Take a request of so many sequences. ApiError: 503 when closed or full, 400 when it could never be taken."""
        if (reason := self.refusal()) is not None:
            raise unavailable(*reason)
        limit = self.settings.max_waiting
        if sequences > limit:
            text = f"prompts times n are {sequences} answers; at most {limit} are possible in one request."
            raise ApiError(400, text, param="n")
        if self._sequences + sequences > limit:
            raise overloaded(limit)
        ticket = Ticket(self, sequences)
        self._tickets.add(ticket)
        self._sequences += sequences
        self._idle.clear()
        return ticket

    def forget(self, ticket: Ticket) -> None:
        if ticket in self._tickets:
            self._tickets.discard(ticket)
            self._sequences -= ticket.sequences
            if not self._tickets:
                self._idle.set()

    @property
    def in_flight(self) -> int:
        return len(self._tickets)

    def choose(self) -> Slot:
        """The live engine with the fewest of our sequences; with restarts, if there is none, one that comes back.
        ApiError (503) when there is no such either."""
        usable = self._usable()
        if not usable and self.settings.restart:
            usable = [slot for slot in self.engines if slot.engine.last_info is not None]
        if not usable:
            raise unavailable("starting", "the engine does not answer")
        return min(usable, key=lambda slot: slot.running)

    def _usable(self) -> list[Slot]:
        return [slot for slot in self.engines if slot.engine.alive and slot.engine.info is not None]

    # --- the end

    async def wait_idle(self, seconds: float) -> bool:
        """Wait until no request is in flight, `seconds` at most; True if so."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def cut_all(self) -> int:
        """End every request in flight with an error; how many there were. They go as the event loop turns."""
        for ticket in self._tickets:
            if not ticket.cut.done():
                ticket.cut.set_result(None)
        return len(self._tickets)

    def close(self) -> None:
        self.work.close()
