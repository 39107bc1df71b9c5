"""The loop against raw DEALER sockets: what a message does, what a death does, what idling costs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from launcher.engine.front import Front
from launcher.engine.messages import (
    AbortRequests,
    Call,
    CallReply,
    EngineInfo,
    FromCore,
    Hello,
    Ping,
    Pong,
    RequestOutput,
    StepOutputs,
    ToCore,
)
from launcher.errors import ChildFailedError, HostError
from launcher.executor.base import unpack
from launcher.process.reports import Stop, TreeState
from tests.conftest import eventually
from tests.engine.conftest import CoreThread
from tests.engine.strict import add, expected

Start = Callable[..., CoreThread]


class Raw:
    """A DEALER that speaks the protocol by hand."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, identity: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.identity = identity.encode()
        self.socket.connect(address)
        self.seen: list[FromCore] = []

    def say(self, *messages: ToCore) -> None:
        for message in messages:
            self.socket.send(msgspec.msgpack.encode(message))

    def read(self, timeout: float = 10.0) -> FromCore:
        assert self.socket.poll(int(timeout * 1000)), "nothing comes"
        message = msgspec.msgpack.decode(self.socket.recv(), type=FromCore)
        self.seen.append(message)
        return message

    def read_until(self, is_last: Callable[[FromCore], bool]) -> FromCore:
        while True:
            message = self.read()
            if is_last(message):
                return message

    def outputs(self) -> list[RequestOutput]:
        return [output for message in self.seen if isinstance(message, StepOutputs) for output in message.outputs]

    def tokens(self, request_id: str) -> list[int]:
        return [t for output in self.outputs() if output.request_id == request_id for t in unpack(output.new_token_ids)]

    def read_finished(self, *request_ids: str) -> None:
        waiting = set(request_ids)
        self.read_until(
            lambda _: not waiting - {output.request_id for output in self.outputs() if output.finish_reason is not None}
        )


@pytest.fixture
def connect(address: str) -> Iterator[Callable[[str], Raw]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made: list[Raw] = []

    def make(identity: str) -> Raw:
        made.append(Raw(context, address, identity))
        return made[-1]

    yield make
    for raw in made:
        raw.socket.close(linger=0)
    context.term()


Connect = Callable[[str], Raw]


def test_hello_ping_stats(start_core: Start, connect: Connect) -> None:
    start_core(generation=5)
    client = connect("a")
    client.say(Hello("api-0"), Ping(7), Call(1, "stats"))
    info, pong, reply = client.read(), client.read(), client.read()
    assert isinstance(info, EngineInfo)
    assert (info.generation, info.max_model_len) == (5, 64)
    assert isinstance(pong, Pong)
    assert (pong.sequence, pong.generation) == (7, 5)
    assert isinstance(reply, CallReply)
    assert (reply.call_id, reply.result["malformed"], reply.result["clients"]) == (1, 0, 1)


def test_requests_of_two_clients_with_the_same_ids(start_core: Start, connect: Connect) -> None:
    core = start_core()
    one, two = connect("a"), connect("b")
    one.say(Hello("api-0"), add("r", [1], max_tokens=5), add("s", [2], max_tokens=3))
    two.say(Hello("api-1"), add("r", [3], max_tokens=4))
    one.read_finished("r", "s")
    two.read_finished("r")
    assert (one.tokens("r"), one.tokens("s")) == (expected([1], 5), expected([2], 3))
    assert two.tokens("r") == expected([3], 4)
    assert core.core.stats().free_blocks == core.core.stats().total_blocks


def test_all_news_of_a_step_come_in_one_message(start_core: Start, connect: Connect) -> None:
    start_core()
    client = connect("a")
    client.say(add("r", [1], max_tokens=20), add("s", [2], max_tokens=20))
    client.read_finished("r", "s")
    shared = [message for message in client.seen if isinstance(message, StepOutputs) and len(message.outputs) == 2]
    assert shared
    assert all(message.stats.total_blocks > 0 for message in shared)


def test_abort_ends_without_an_output(start_core: Start, connect: Connect) -> None:
    core = start_core()
    core.executor.hangs = True
    client = connect("a")
    client.say(add("r", [1], max_tokens=50), AbortRequests(("r", "unknown")), add("s", [2], max_tokens=2))
    core.executor.hangs = False
    client.read_finished("s")
    assert core.core.stats().free_blocks == core.core.stats().total_blocks
    assert not [output for output in client.outputs() if output.request_id == "r" and output.finish_reason]


def test_rubbish_is_dropped_and_counted(start_core: Start, connect: Connect) -> None:
    start_core()
    client = connect("a")
    client.socket.send(b"\xc1 no msgpack")
    client.socket.send(msgspec.msgpack.encode({"type": "Unknown"}))
    client.socket.send(msgspec.msgpack.encode({"type": "AddRequest", "request_id": 5}))
    client.socket.send_multipart([b"two", b"frames"])
    client.say(Call(1, "stats"))
    reply = client.read()
    assert isinstance(reply, CallReply)
    assert reply.result["malformed"] == 4
    client.say(add("r", [1], max_tokens=2))
    client.read_finished("r")


def test_a_long_step_answers_pings_and_only_them(start_core: Start, connect: Connect) -> None:
    core = start_core()
    core.executor.hangs = True
    client, other = connect("a"), connect("b")
    client.say(add("r", [1], max_tokens=5))
    eventually(lambda: core.core.step_began is not None, what="a step is under way")
    ages = []
    for number in range(2):
        client.say(Call(number, "stats"), add(f"late{number}", [2], max_tokens=2), Ping(number))
        pong = client.read()
        assert isinstance(pong, Pong), "what comes before it waits for the end of the step"
        assert (pong.sequence, pong.stats.running) == (number, 1)
        ages.append(pong.step_age)
    assert 0 < ages[0] < ages[1]
    other.say(Hello("api-1"), Ping(7))
    assert isinstance(other.read(), Pong)
    core.executor.hangs = False
    client.read_finished("r", "late0", "late1")
    replies = [message.call_id for message in client.seen if isinstance(message, CallReply)]
    assert replies == [0, 1], "in order"
    assert client.tokens("late1") == expected([2], 2)
    assert isinstance(other.read(), EngineInfo)
    client.say(Ping(9))
    pong = client.read()
    assert isinstance(pong, Pong)
    assert pong.step_age == 0


def test_a_flood_during_a_step_is_bounded(start_core: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.engine.core_loop.MAX_BACKLOG", 10)
    core = start_core(max_num_seqs=1)
    core.executor.hangs = True
    client = connect("a")
    client.say(add("r", [1], max_tokens=2))
    eventually(lambda: core.core.step_began is not None, what="a step is under way")
    client.say(*(add(f"s{i}", [i], max_tokens=1) for i in range(20)))
    loop = core.loop
    assert loop is not None
    eventually(lambda: len(loop._backlog) >= 10, what="they are read")
    client.say(Ping(1))
    assert not client.socket.poll(600), "no more is read"
    core.executor.hangs = False
    client.read_finished("r", *(f"s{i}" for i in range(20)))
    eventually(lambda: any(isinstance(message, Pong) for message in client.seen) or client.read(), what="a pong")


def test_a_doubled_request_id_does_not_end_the_first(start_core: Start, connect: Connect) -> None:
    start_core()
    client = connect("a")
    client.say(add("r", [1], max_tokens=30), add("r", [2], max_tokens=30), Call(1, "stats"))
    client.read_finished("r")
    assert client.tokens("r") == expected([1], 30)


def test_refusals_reach_the_client(start_core: Start, connect: Connect) -> None:
    start_core()
    client = connect("a")
    client.say(add("r", [1] * 64))
    client.read_finished("r")
    [output] = client.outputs()
    assert output.finish_reason == "error"
    assert "shorten it to 63" in output.error


def test_calls(start_core: Start, connect: Connect) -> None:
    start_core(world=2)
    client = connect("a")
    client.say(
        Call(1, "collective_rpc", ("echo", ["x"])),
        Call(2, "collective_rpc", ("echo", ["x"], {}, 5.0, 1)),
        Call(3, "collective_rpc", ("fail",)),
        Call(4, "collective_rpc", ("unsendable",)),
        Call(5, "open_the_door"),
        Call(6, "collective_rpc", ()),
        Call(7, "check_health"),
    )
    replies = [client.read() for _ in range(7)]
    assert all(isinstance(reply, CallReply) for reply in replies)
    results = {reply.call_id: (reply.result, reply.error) for reply in replies if isinstance(reply, CallReply)}
    assert results[1] == ([[0, "x"], [1, "x"]], "")
    assert results[2] == ([1, "x"], "")
    assert "told to fail" in results[3][1]
    assert results[4][1] != ""
    assert "no call 'open_the_door'; it has stats, collective_rpc" in results[5][1]
    assert "missing" in results[6][1]
    assert results[7] == (None, "")


def test_a_new_hello_of_the_same_name_ends_the_old_ones_requests(start_core: Start, connect: Connect) -> None:
    core = start_core(max_num_seqs=1)
    old = connect("api-0/1")
    old.say(Hello("api-0"), add("r", [1], max_tokens=60), add("waits", [1], max_tokens=60))
    old.read()
    core.executor.hangs = True
    new = connect("api-0/2")
    new.say(Hello("api-0"), Call(1, "stats"))
    core.executor.hangs = False
    new.read_until(lambda message: isinstance(message, CallReply))
    eventually(lambda: core.core.stats().free_blocks == core.core.stats().total_blocks, what="blocks are free")
    assert not core.core.has_work


def test_a_client_that_vanishes_frees_its_blocks(start_core: Start, connect: Connect) -> None:
    core = start_core(max_model_len=64)
    client, other = connect("a"), connect("b")
    client.say(*(add(f"r{i}", [i], max_tokens=60) for i in range(100)))
    client.read()
    client.socket.close(linger=0)
    other.say(add("r", [1], max_tokens=60))
    other.read_finished("r")
    assert other.tokens("r") == expected([1], 60)
    eventually(lambda: not core.core.has_work, what="its requests are gone")
    assert core.core.stats().free_blocks == core.core.stats().total_blocks
    assert core.core.stats().generated_tokens < 100 * 60


def test_a_client_that_does_not_read_stops_nobody_and_loses_nothing(
    start_core: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.engine.front.SEND_HWM", 2)
    core = start_core(max_num_seqs=2)
    slow, other = connect("slow"), connect("other")
    slow.socket.setsockopt(zmq.RCVHWM, 1)
    names = [f"{i} {'long name' * 100}" for i in range(40)]  # more than the kernel's buffer holds
    slow.say(*(add(name, [i], max_tokens=60) for i, name in enumerate(names)))
    eventually(lambda: core.core.stats().steps > 10, what="it runs")
    other.say(add("r", [1], max_tokens=60))
    other.read_finished("r")
    eventually(lambda: not core.core.has_work, what="all is computed")
    slow.read_finished(*names)
    assert {name: slow.tokens(name) for name in names} == {n: expected([i], 60) for i, n in enumerate(names)}
    most = max(len(message.outputs) for message in slow.seen if isinstance(message, StepOutputs))
    assert most > 2, "what it did not take travelled together in the end"


def test_stop_tells_every_client_and_hands_back_the_time(start_core: Start, connect: Connect) -> None:
    core = start_core(max_num_seqs=1)
    client = connect("a")
    core.executor.hangs = True
    client.say(Hello("api-0"), add("r", [1], max_tokens=60), add("waits", [2], max_tokens=60))
    client.read()
    eventually(lambda: core.core.stats().running, what="it runs")
    core.parent.say(Stop(budget=7))
    client.read_finished("r", "waits")
    core.join()
    assert core.error is None
    assert core.left is not None
    assert core.left.seconds == 7
    assert [output.finish_reason for output in client.outputs()] == ["abort", "abort"]
    assert core.core.stats().free_blocks == core.core.stats().total_blocks


def test_sigterm_means_stop_within_the_usual_time(start_core: Start) -> None:
    core = start_core()
    core.parent.say(TreeState("ready"))
    core.parent.terminate()
    core.join()
    assert core.left is not None
    assert core.left.seconds == core.core.settings.shutdown_timeout


def test_a_death_ends_an_idle_core(start_core: Start, connect: Connect) -> None:
    core = start_core()
    client = connect("a")
    client.say(Ping(1))
    client.read()
    eventually(lambda: core.executor._death is not None, what="it waits")
    core.executor.die()
    core.join()
    assert isinstance(core.error, ChildFailedError)


def test_a_death_ends_a_step_that_hangs(start_core: Start, connect: Connect) -> None:
    core = start_core()
    core.executor.hangs = True
    connect("a").say(add("r", [1]))
    eventually(lambda: core.core.stats().running, what="it runs")
    core.executor.die()
    core.join()
    assert isinstance(core.error, ChildFailedError)


def test_idle_costs_nothing_and_wakes_at_once(start_core: Start, connect: Connect) -> None:
    core = start_core()
    client = connect("a")
    slowest = 0.0
    before = time.process_time()
    for number in range(20):
        time.sleep(0.02)
        asked = time.monotonic()
        client.say(Ping(number))
        client.read()
        slowest = max(slowest, time.monotonic() - asked)
    assert time.process_time() - before < 0.2
    assert slowest < 0.5
    assert core.core.stats().steps == 0


def test_an_address_that_cannot_be_bound_is_one_line() -> None:
    with pytest.raises(HostError, match="cannot listen at 'ipc:///nowhere/core'"):
        Front("ipc:///nowhere/core", 0)
    assert not os.path.exists("/nowhere")


def test_the_socket_file_goes_with_its_owner_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "core"
    with Front(f"ipc://{path}", 0):
        assert path.is_socket()
    assert not path.exists()
    with Front(f"ipc://{path}", 0), Front(f"ipc://{path}", 1) as next_life:
        assert next_life.fileno() >= 0
        assert path.is_socket()
    assert not path.exists()
    old = Front(f"ipc://{path}", 0)
    new = Front(f"ipc://{path}", 1)
    old.close()
    assert path.is_socket()
    new.close()
    assert not path.exists()
