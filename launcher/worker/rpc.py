"""What an executor and its workers say to each other, and how a worker carries it out. No I/O.

Executor → all workers, one broadcast ring, calls numbered 1, 2, 3 … without a gap::

    StepCall      execute_model(plan)         msgspec: the fast path, a few µs
    SampleCall    sample_tokens(mask)         msgspec
    NameCall      a method by name, no arguments   msgspec
    ConfigCall    initialize_from_config, each rank its own   msgspec
    PlainCall     a method by name, plain arguments           msgspec; arrays and tensors out of band
    RpcCall       anything else               pickled: callables, arguments; arrays and tensors out of band
    ShutdownCall  end of the loop, no answer

Worker → executor, one ring per rank, answers in the order of the calls. A rank that is not asked to reply says nothing
unless it fails: an `ErrorReply` is always sent, so that no error is lost.

    StepReply     answer to the first two     msgspec
    PlainReply    answer to the others        msgspec: None, a number, a string
    SpecReply     answer to kv_cache_spec     msgspec
    DataReply     any other plain value       msgspec; arrays and tensors out of band
    RpcReply      any other value             pickled
    ErrorReply    it raised                   msgspec

Pickle is for a parent and its own local children alone (`make_codec(trusted=True)`): there every other call is an
`RpcCall`, and its answer an `RpcReply`, so that both arrive as they were. Where a group has ranks on several machines
nothing is ever pickled, and no one unpickles: there they are a `PlainCall` and a `DataReply`, of what `plain` lists.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from launcher.errors import RemoteError, UsageError, is_peer_loss
from launcher.ipc import Codec, RingHandle
from launcher.worker.base import take_own_config
from launcher.worker.plain import SCALARS, require_plain
from launcher.worker.step import GrammarMask, KVCacheConfig, KVCacheSpec, StepOutput, StepPlan

QUEUES = "queues"
"""Name of the handover that brings a worker its `Queues`."""
GROUP = "group"
"""Name of the handover that brings a worker its `GroupPlace`, if it `awaits_group`."""
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


class ConfigCall(msgspec.Struct, frozen=True, array_like=True):
    """`take_own_config`."""

    call_id: int
    reply_rank: int
    configs: tuple[KVCacheConfig, ...]
    """In rank order."""


class PlainCall(msgspec.Struct, frozen=True, array_like=True):
    call_id: int
    reply_rank: int
    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}


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


class SpecReply(msgspec.Struct, frozen=True, array_like=True):
    call_id: int
    value: KVCacheSpec


class DataReply(msgspec.Struct, frozen=True, array_like=True):
    call_id: int
    value: Any


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


ToCarryOut = StepCall | SampleCall | NameCall | ConfigCall | PlainCall | RpcCall
Call = ToCarryOut | ShutdownCall
Reply = StepReply | PlainReply | SpecReply | DataReply | RpcReply | ErrorReply


class Queues(msgspec.Struct, frozen=True):
    """Payload of the handover `QUEUES`. Its descriptors: those of `calls`, of `answers`, and the page of marks."""

    calls: RingHandle
    answers: RingHandle


class GroupPlace(msgspec.Struct, frozen=True):
    """Payload of the handover `GROUP`. Its descriptor, for rank 0 only: the listening socket of the rendezvous."""

    rendezvous: str
    generation: int
    env: dict[str, str]
    """The interface for collectives, above all."""


# What travels without pickle, by its tag.
CALLS: dict[int, type] = {
    1: StepCall,
    2: SampleCall,
    3: ShutdownCall,
    6: NameCall,
    8: ConfigCall,
    9: PlainCall,
}
REPLIES: dict[int, type] = {
    4: StepReply,
    5: ErrorReply,
    7: PlainReply,
    10: SpecReply,
    11: DataReply,
}


def make_codec(*, trusted: bool = True) -> Codec:
    """The codec of both rings. `trusted`: parent and children on one machine, and no other in the group."""
    return Codec(CALLS | REPLIES, trusted=trusted)


def make_call(
    call_id: int,
    reply_rank: int,
    method: str | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Any,
    *,
    trusted: bool = True,
) -> Call:
    """The message for a call; those that the engine core makes have their own.

    `UsageError` for what cannot be sent to ranks on other machines, unless `trusted`.
    """
    if not args and not kwargs and type(method) is str:
        return NameCall(call_id, reply_rank, method)
    if not kwargs and len(args) == 1:
        if method == "execute_model" and isinstance(args[0], StepPlan):
            return StepCall(call_id, reply_rank, args[0])
        if method == "sample_tokens" and isinstance(args[0], GrammarMask | None):
            return SampleCall(call_id, reply_rank, args[0])
        if method is take_own_config:
            return ConfigCall(call_id, reply_rank, tuple(args[0]))
    if trusted:
        return RpcCall(call_id, reply_rank, method, args, kwargs or {})
    if not isinstance(method, str):
        name = getattr(method, "__qualname__", repr(method))
        raise UsageError(
            f"{name} is a callable, and callables cannot cross nodes: give the method's name instead, and have the "
            "method in the worker's class or in --worker-extension"
        )
    for value in (*args, *(kwargs or {}).values()):
        require_plain(value, f"an argument of {method}")
    return PlainCall(call_id, reply_rank, method, args, dict(kwargs or {}))


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


def carry_out(worker: Any, call: ToCarryOut, *, trusted: bool = True) -> Reply:
    """Execute a call; its answer. Whatever it raises propagates; `UsageError` for an answer that cannot travel."""
    number = call.call_id
    if isinstance(call, StepCall):
        return StepReply(number, worker.execute_model(call.plan))
    if isinstance(call, SampleCall):
        return StepReply(number, worker.sample_tokens(call.mask))
    if isinstance(call, ConfigCall):
        take_own_config(worker, list(call.configs))
        return PlainReply(number, None)
    if isinstance(call, NameCall):
        value = invoke(worker, call.method, (), {})
    else:
        value = invoke(worker, call.method, call.args, call.kwargs)
    if type(value) in SCALARS:
        return PlainReply(number, value)
    if type(value) is KVCacheSpec:
        return SpecReply(number, value)
    if trusted:
        return RpcReply(number, value)
    require_plain(value, "the answer")
    return DataReply(number, value)


def answer_of(reply: StepReply | PlainReply | SpecReply | DataReply | RpcReply) -> Any:
    """What the method returned."""
    return reply.output if isinstance(reply, StepReply) else reply.value


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


def remote_error(reply: ErrorReply, *, title: str, rank: int, node: int = 0, host: str = "") -> RemoteError:
    """The exception for the caller. `host`: of a rank on another machine."""
    lines = reply.message.strip().splitlines()
    where = f" on node {node} ({host})" if host else ""
    headline = f"rank {rank}{where} raised {reply.type_name}" + (f": {lines[0]}" if lines else "")
    return RemoteError(
        headline,
        type_name=reply.type_name,
        remote_traceback=reply.remote_traceback,
        title=title,
        rank=rank,
        node=node,
        host=host,
    )
