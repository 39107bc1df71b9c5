"""Which message a call becomes, and how an exception is told."""

from __future__ import annotations

import pytest

from launcher.config import RankSettings, WorkerSettings
from launcher.errors import InternalError, PeerDiedError, UsageError
from launcher.worker.base import take_own_config
from launcher.worker.rpc import (
    ConfigCall,
    DataReply,
    ErrorReply,
    NameCall,
    PlainCall,
    PlainReply,
    RpcCall,
    RpcReply,
    SampleCall,
    SpecReply,
    StepCall,
    StepReply,
    answer_of,
    carry_out,
    error_reply,
    invoke,
    make_call,
    make_codec,
    remote_error,
)
from launcher.worker.step import GrammarMask, KVCacheConfig, KVCacheSpec, StepOutput, StepPlan

PLAN, MASK = StepPlan(3), GrammarMask(b"", b"")
CONFIG = KVCacheConfig(num_blocks=4, block_size=16)
SPEC = KVCacheSpec(bytes_per_block=1, block_size=16, max_model_len=9, vocab_size=5)

CALLS = [
    ("execute_model", (PLAN,), {}, StepCall),
    ("sample_tokens", (MASK,), {}, SampleCall),
    ("sample_tokens", (None,), None, SampleCall),
    ("execute_model", ("not a plan",), {}, RpcCall),
    ("execute_model", (PLAN,), {"extra": 1}, RpcCall),
    ("execute_model", (), {}, NameCall),
    ("anything", (PLAN,), {}, RpcCall),
    (take_own_config, ([CONFIG, CONFIG],), {}, ConfigCall),
    ("with_words", (1,), {"b": [2]}, RpcCall),
]
UNTRUSTED = [
    *[row for row in CALLS if row[3] is not RpcCall],
    ("with_words", (1,), {"b": [2]}, PlainCall),
    ("with_words", ((1, b"x"), {"k": [None]}), None, PlainCall),
]


@pytest.mark.parametrize(("method", "args", "kwargs", "kind"), CALLS)
def test_the_message_of_a_call(method: str, args: tuple[object, ...], kwargs: object, kind: type) -> None:
    assert type(make_call(1, 0, method, args, kwargs)) is kind


@pytest.mark.parametrize(("method", "args", "kwargs", "kind"), UNTRUSTED)
def test_the_message_of_a_call_to_other_machines(
    method: str, args: tuple[object, ...], kwargs: object, kind: type
) -> None:
    call = make_call(1, 0, method, args, kwargs, trusted=False)
    assert type(call) is kind
    codec = make_codec(trusted=False)
    tag, head, buffers = codec.encode(call)
    assert type(codec.decode(tag, memoryview(head), buffers)) is kind


REFUSED = [
    (lambda worker: worker, (), "callables cannot cross nodes: give the method's name"),
    ("m", (PLAN,), r"an argument of m cannot cross nodes: it holds a launcher\.worker\.step\.StepPlan"),
    ("m", ({1: {(1, 2): 3}},), "a dict in it has a tuple for a key"),
    ("m", ([[[{1j}]]],), r"it holds a builtins\.set"),
    ("m", (KIN := [], KIN.append(KIN)), "nested more than 32 deep"),
]


@pytest.mark.parametrize(("method", "args", "why"), REFUSED)
def test_what_cannot_cross(method: object, args: tuple[object, ...], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        make_call(1, 0, method, args, None, trusted=False)  # type: ignore[arg-type]


def test_no_codec_of_a_network_knows_pickle() -> None:
    tag, head, _ = make_codec().encode(RpcCall(5, 0, "m", (1,)))
    assert tag == 0
    with pytest.raises(InternalError, match="not trusted"):
        make_codec(trusted=False).decode(tag, memoryview(head), ())
    with pytest.raises(UsageError, match="cannot be sent"):
        make_codec(trusted=False).encode(RpcReply(6, 1))


class Echo:
    not_callable = 1
    configs: KVCacheConfig | None = None

    def initialize_from_config(self, config: KVCacheConfig) -> None:
        self.configs = config

    def kv_cache_spec(self) -> KVCacheSpec:
        return SPEC

    def give(self, value: object) -> object:
        return value

    def execute_model(self, plan: StepPlan) -> StepOutput:
        return StepOutput(plan.step)

    def sample_tokens(self, mask: GrammarMask | None) -> None:
        return None

    def both(self, a: int, *, b: int) -> int:
        return a + b


def test_carrying_out() -> None:
    worker = Echo()
    assert carry_out(worker, StepCall(1, 0, PLAN)) == StepReply(1, StepOutput(3))
    assert carry_out(worker, SampleCall(2, 0, None)) == StepReply(2, None)
    assert carry_out(worker, RpcCall(3, 0, "both", (1,), {"b": 2})) == PlainReply(3, 3)
    assert carry_out(worker, RpcCall(4, 0, lambda w, x: (type(w), x), (5,))) == RpcReply(4, (Echo, 5))


def test_carrying_out_for_another_machine() -> None:
    worker = Echo()
    assert carry_out(worker, NameCall(1, 0, "kv_cache_spec"), trusted=False) == SpecReply(1, SPEC)
    assert carry_out(worker, PlainCall(2, 0, "give", (3,)), trusted=False) == PlainReply(2, 3)
    reply = carry_out(worker, PlainCall(2, 0, "give", ([1, b"x"],)), trusted=False)
    assert reply == DataReply(2, [1, b"x"])
    assert answer_of(reply) == [1, b"x"]
    with pytest.raises(UsageError, match=r"the answer cannot cross nodes: it holds a builtins\.set"):
        carry_out(worker, PlainCall(3, 0, "give", ({1},)), trusted=False)
    worker.settings = WorkerSettings(ranks=RankSettings(rank=1, world_size=2))  # type: ignore[attr-defined]
    mine = KVCacheConfig(num_blocks=9, block_size=16)
    assert carry_out(worker, ConfigCall(4, -1, (CONFIG, mine))) == PlainReply(4, None)
    assert worker.configs == mine


@pytest.mark.parametrize("name", ["missing", "not_callable"])
def test_no_such_method(name: str) -> None:
    with pytest.raises(UsageError, match=f"worker tests.worker.test_rpc:Echo has no method '{name}'"):
        invoke(Echo(), name, (), {})


PEER_LOST = [
    (ConnectionResetError("x"), True),
    (EOFError(), True),
    (PeerDiedError("gone"), True),
    (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3"), True),
    (RuntimeError("NCCL error: remote process exited or there was a network error"), True),
    (RuntimeError("CUDA out of memory"), False),
    (ValueError("bad peer review"), False),
    (UsageError("connection refused by you: write host:port"), False),
]


@pytest.mark.parametrize(("error", "lost"), PEER_LOST)
def test_peer_loss_is_told_from_causes(error: Exception, lost: bool) -> None:
    assert error_reply(1, error).peer_lost is lost


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_whose_text_fails() -> None:
    reply = error_reply(7, Mute())
    assert (reply.call_id, reply.type_name, reply.message) == (7, "Mute", "(its text could not be made)")


def test_causes_and_length_of_a_traceback() -> None:
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ValueError("x" * 100_000) from inner
    except ValueError as error:
        reply = error_reply(1, error)
    assert len(reply.remote_traceback) <= 48 * 1024
    short = remote_error(ErrorReply(1, "E", "", "trace"), title="Worker_DP0_PP0_TP1", rank=1)
    assert short.headline == "rank 1 raised E"
    assert str(short) == "rank 1 raised E\n\nOn Worker_DP0_PP0_TP1:\ntrace"


def test_every_message_survives_the_codec() -> None:
    codec = make_codec()
    for message in (
        StepCall(1, 0, PLAN),
        SampleCall(2, -1, MASK),
        StepReply(3, StepOutput(4)),
        StepReply(3, None),
        ErrorReply(4, "E", "m", "t", True),
        RpcCall(5, 0, "m", ((1, 2), {3}), {"k": None}),
        RpcReply(6, {"a": (1, 2)}),
        NameCall(7, -1, "check_health"),
        PlainReply(8, None),
        PlainReply(8, 1.5),
        PlainReply(8, 1 << 80),
        ConfigCall(9, -1, (CONFIG,)),
        PlainCall(9, -1, "m", (1, [b"x"]), {"k": {"a": None}}),
        SpecReply(9, SPEC),
        DataReply(9, [{"a": 1.5}]),
    ):
        tag, head, buffers = codec.encode(message)
        assert codec.decode(tag, memoryview(head), [bytearray(b) for b in buffers]) == message
