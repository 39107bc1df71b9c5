"""Messages between API servers and engine cores (ZMQ, msgpack). One file for this pair of speakers; no I/O.

API server (DEALER) → engine core (ROUTER): `AddRequest`, `AbortRequests`, `Call`, `Ping`, `Hello`.
Engine core → API server: `EngineInfo` (answer to Hello), `StepOutputs`, `CallReply`, `Pong`.
Each is one msgpack frame, tagged with its type. Token ids travel as packed int32 (see `launcher.worker.step.pack`).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from launcher.executor.base import SamplingParams, TokenLogprobs, pack, unpack

__all__ = [
    "AbortRequests",
    "AddRequest",
    "Call",
    "CallReply",
    "EngineInfo",
    "FinishReason",
    "FromCore",
    "Hello",
    "Ping",
    "Pong",
    "RequestOutput",
    "SamplingParams",
    "SchedulerStats",
    "StepOutputs",
    "ToCore",
    "TokenLogprobs",
    "pack",
    "unpack",
]

FinishReason = Literal["stop", "length", "abort", "error"]


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a client; the core answers `EngineInfo`, and again whenever it restarts."""

    client: str


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """Accept a request. For a replay `output_token_ids` holds what the client has already got.

    `request_id` names this sending of it: a replay has another one.
    """

    request_id: str
    prompt_token_ids: bytes
    sampling: SamplingParams
    output_token_ids: bytes = b""


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    request_ids: tuple[str, ...]


class Call(msgspec.Struct, frozen=True, tag=True):
    """A call into the core itself (``stats``, ``collective_rpc`` with a method name and plain arguments)."""

    call_id: int
    method: str
    args: tuple[Any, ...] = ()


class Ping(msgspec.Struct, frozen=True, tag=True):
    sequence: int


class EngineInfo(msgspec.Struct, frozen=True, tag=True):
    """What the core serves. `generation` counts its lives."""

    generation: int
    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    max_num_seqs: int = 0


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request since the last message."""

    request_id: str
    new_token_ids: bytes
    """int32"""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended it, when one did."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per new token when asked for."""
    error: str = ""
    """With finish_reason ``error``: one line for the client."""


class SchedulerStats(msgspec.Struct, frozen=True, array_like=True):
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    preemptions: int = 0
    """Since the start."""
    steps: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """All news of one step for one client."""

    generation: int
    outputs: tuple[RequestOutput, ...]
    stats: SchedulerStats = SchedulerStats()


class CallReply(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    result: Any = None
    error: str = ""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """Also sent during a step: a core that answers is alive, whether its workers get anywhere `step_age` tells."""

    sequence: int
    generation: int
    stats: SchedulerStats = SchedulerStats()
    step_age: float = 0.0
    """Seconds since the step under way began; 0: none is."""


ToCore = Hello | AddRequest | AbortRequests | Call | Ping
FromCore = EngineInfo | StepOutputs | CallReply | Pong
