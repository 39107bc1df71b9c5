"""What an executor and its workers say to each other, and how a worker carries it out. No I/O.

Executor → all workers, one broadcast ring, calls numbered 1, 2, 3 … without a gap::

    StepCall      execute_model(plan)         msgspec: the fast path, a few µs
    SampleCall    sample_tokens(mask)         msgspec
    NameCall      a method by name, no arguments   msgspec
    RpcCall       anything else               pickled: callables, arguments; arrays and tensors out of band
    ShutdownCall  end of the loop, no answer

Worker → executor, one ring per rank, answers in the order of the calls. A rank that is not asked to reply says nothing
unless it fails: an `ErrorReply` is always sent, so that no error is lost.

    StepReply     answer to the first two     msgspec
    PlainReply    answer to the other two     msgspec: None, a number, a string
    RpcReply      the same, any value         pickled
    ErrorReply    it raised                   msgspec

Pickle is for a parent and its own local children alone (`Codec(trusted=True)`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from launcher.errors import RemoteError, UsageError, is_peer_loss
from launcher.ipc import Codec, RingHandle
from launcher.worker.step import GrammarMask, StepOutput, StepPlan

QUEUES = "queues"
"""Name of the handover that brings a worker its `Queues`."""
ALL_RANKS = -1
"""`reply_rank`: everybody answers."""
_MAX_TRACEBACK = 48 * 1024
"""Characters; its end is what matters."""


class StepCall(msgspec.Struct, frozen=True, array_like=True):
    call_id: int
    reply_rank: int
    plan: StepPlan


class SampleCall(msgspec.Struct, frozen=True, array_like=True):
    call_id: int
    reply_rank: int
    mask: GrammarMask | None


class NameCall(msgspec.Struct, frozen=True, array_like=True):
    call_id: int
    reply_rank: int
    method: str


class ShutdownCall(msgspec.Struct, frozen=True, array_like=True):
    call_id: int


@dataclass(frozen=True, slots=True)
class RpcCall:
    """`method`: a name, or a callable that gets the worker as its first argument."""

    call_id: int
    reply_rank: int
    method: str | Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class StepReply(msgspec.Struct, frozen=True, array_like=True):
    call_id: int
    output: StepOutput | None


class PlainReply(msgspec.Struct, frozen=True, array_like=True):
    call_id: int
    value: bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class RpcReply:
    call_id: int
    value: Any


class ErrorReply(msgspec.Struct, frozen=True, array_like=True):
    """What a method raised. `peer_lost`: it looks as if it failed only because another rank is gone."""

    call_id: int
    type_name: str
    message: str
    remote_traceback: str
    peer_lost: bool = False


Call = StepCall | SampleCall | NameCall | RpcCall | ShutdownCall
Reply = StepReply | PlainReply | RpcReply | ErrorReply
_PLAIN = frozenset((type(None), bool, int, float, str))
"""What msgpack gives back as it was; not their subclasses."""


class Queues(msgspec.Struct, frozen=True):
    """Payload of the handover `QUEUES`. Its descriptors: those of `calls`, of `answers`, and the page of marks."""

    calls: RingHandle
    answers: RingHandle


def make_codec() -> Codec:
    """The codec of both rings. Trusted: parent and child on one machine."""
    kinds = (StepCall, SampleCall, ShutdownCall, StepReply, ErrorReply, NameCall, PlainReply)
    return Codec(dict(enumerate(kinds, 1)), trusted=True)


def make_call(
    call_id: int, reply_rank: int, method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: Any
) -> Call:
    """The message for a call; the two of every step have their own."""
    if not args and not kwargs and type(method) is str:
        return NameCall(call_id, reply_rank, method)
    if not kwargs and len(args) == 1:
        if method == "execute_model" and isinstance(args[0], StepPlan):
            return StepCall(call_id, reply_rank, args[0])
        if method == "sample_tokens" and isinstance(args[0], GrammarMask | None):
            return SampleCall(call_id, reply_rank, args[0])
    return RpcCall(call_id, reply_rank, method, args, kwargs or {})


def invoke(worker: Any, method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call it on this worker. `UsageError` when there is no such method."""
    if not isinstance(method, str):
        return method(worker, *args, **kwargs)
    bound = getattr(worker, method, None)
    if not callable(bound):
        raise UsageError(
            f"worker {type(worker).__module__}:{type(worker).__qualname__} has no method {method!r}; "
            "add it to the class, or mix it in with --worker-extension"
        )
    return bound(*args, **kwargs)


def carry_out(worker: Any, call: StepCall | SampleCall | NameCall | RpcCall) -> Reply:
    """Execute a call; its answer. Whatever it raises propagates."""
    if isinstance(call, StepCall):
        return StepReply(call.call_id, worker.execute_model(call.plan))
    if isinstance(call, SampleCall):
        return StepReply(call.call_id, worker.sample_tokens(call.mask))
    if isinstance(call, NameCall):
        value = invoke(worker, call.method, (), {})
    else:
        value = invoke(worker, call.method, call.args, call.kwargs)
    return PlainReply(call.call_id, value) if type(value) in _PLAIN else RpcReply(call.call_id, value)


def error_reply(call_id: int, error: BaseException) -> ErrorReply:
    """An exception as an answer. Only text travels: the class may not exist at the other end."""
    trace = "".join(traceback.format_exception(error))
    text = _text(error)
    return ErrorReply(call_id, type(error).__name__, text, trace[-_MAX_TRACEBACK:], is_peer_loss(error))


def _text(error: BaseException) -> str:
    """str() of an exception runs its author's code, which may fail in its turn."""
    try:
        return str(error)
    except Exception:
        return "(its text could not be made)"


def remote_error(reply: ErrorReply, *, title: str, rank: int) -> RemoteError:
    """The exception for the caller."""
    lines = reply.message.strip().splitlines()
    headline = f"rank {rank} raised {reply.type_name}" + (f": {lines[0]}" if lines else "")
    return RemoteError(
        headline,
        type_name=reply.type_name,
        remote_traceback=reply.remote_traceback,
        title=title,
        rank=rank,
    )
