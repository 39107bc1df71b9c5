"""The client against a real core loop, and against a ROUTER that says whatever a test wants."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
import zmq
import zmq.asyncio

from launcher.clock import now
from launcher.engine import client as client_module
from launcher.engine.client import EngineClient, EngineDeadError
from launcher.engine.messages import (
    AbortRequests,
    AddRequest,
    Call,
    EngineInfo,
    FromCore,
    Hello,
    Ping,
    Pong,
    RequestOutput,
    SamplingParams,
    SchedulerStats,
    StepOutputs,
    ToCore,
)
from launcher.errors import ClosedError, DeadlineError, RemoteError, UsageError
from launcher.executor.base import pack, unpack
from launcher.process.reports import Stop
from tests.engine.conftest import CoreThread
from tests.engine.strict import expected

Start = Callable[..., CoreThread]
INFO = EngineInfo(generation=1, max_model_len=64, num_blocks=8, block_size=4, vocab_size=100)


def params(max_tokens: int = 5) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


@contextlib.asynccontextmanager
async def client_of(address: str, name: str = "api-0") -> AsyncIterator[EngineClient]:
    client = EngineClient(address, name)
    try:
        yield client
    finally:
        await client.close()


async def collect(client: EngineClient, request_id: str, prompt: list[int], max_tokens: int = 5) -> list[int]:
    tokens: list[int] = []
    async for output in client.generate(request_id, prompt, params(max_tokens)):
        tokens += unpack(output.new_token_ids)
    return tokens


async def until(condition: Callable[[], object], what: str) -> None:
    end = now() + 10
    while not condition():
        assert now() < end, f"not within 10 s: {what}"
        await asyncio.sleep(0.005)


class Router:
    """A core by hand."""

    def __init__(self, address: str) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(address)
        self.identity = b""

    async def read(self) -> ToCore:
        self.identity, body = await asyncio.wait_for(self.socket.recv_multipart(), 10)
        return msgspec.msgpack.decode(body, type=ToCore)

    async def read_past_pings(self) -> ToCore:
        """The next word that is neither a ping nor a Hello said again: on a slow machine a welcome can come late."""
        while isinstance(message := await self.read(), Ping | Hello):
            pass
        return message

    async def say(self, message: FromCore) -> None:
        await self.say_raw(msgspec.msgpack.encode(message))

    async def say_raw(self, body: bytes) -> None:
        await self.socket.send_multipart([self.identity, body])

    async def welcome(self, info: EngineInfo = INFO) -> None:
        while not isinstance(await self.read(), Hello):
            pass
        await self.say(info)

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


@contextlib.asynccontextmanager
async def router_and_client(address: str) -> AsyncIterator[tuple[Router, EngineClient]]:
    router = Router(address)
    try:
        async with client_of(address) as client:
            starting = asyncio.create_task(client.start(10))
            await router.welcome()
            assert await starting == INFO
            yield router, client
    finally:
        if not router.socket.closed:
            router.close()


# --- with a core ---------------------------------------------------------------------------------------------------


async def _many_at_once(address: str) -> None:
    async with client_of(address) as client:
        info = await client.start(10)
        assert info is client.info
        assert client.alive
        got = await asyncio.gather(*(collect(client, f"r{i}", [i] * 5, 7) for i in range(30)))
        assert got == [expected([i] * 5, 7) for i in range(30)]
        assert client.inflight == 0
        assert client.stats.total_blocks > 0
        replayed = [o async for o in client.generate("again", [1], params(5), expected([1], 3))]
        assert [t for o in replayed for t in unpack(o.new_token_ids)] == expected([1], 5)[3:]


def test_many_at_once(start_core: Start, address: str) -> None:
    start_core()
    asyncio.run(_many_at_once(address))


async def _calls(address: str) -> None:
    async with client_of(address) as client:
        await client.start(10)
        assert (await client.call("stats"))["running"] == 0
        assert await client.call("collective_rpc", "echo", ["x"]) == [[0, "x"]]
        with pytest.raises(RemoteError, match="told to fail"):
            await client.call("collective_rpc", "fail")


def test_calls(start_core: Start, address: str) -> None:
    start_core()
    asyncio.run(_calls(address))


async def _leave_early(address: str, core: CoreThread) -> None:
    async with client_of(address) as client:
        await client.start(10)
        core.executor.hangs = True
        left = client.generate("left", [1], params(60))
        taken = asyncio.create_task(anext(left))
        await until(lambda: core.core.stats().running, "it runs")
        core.executor.hangs = False
        await taken
        await left.aclose()
        cancelled = asyncio.create_task(collect(client, "cancelled", [2], 60))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert client.inflight == 0
        await until(lambda: not core.core.has_work, "the core has aborted both")
        assert core.core.stats().free_blocks == core.core.stats().total_blocks


def test_leaving_early_aborts_in_the_core(start_core: Start, address: str) -> None:
    asyncio.run(_leave_early(address, start_core()))


async def _abort(address: str, core: CoreThread) -> None:
    async with client_of(address) as client:
        await client.start(10)
        core.executor.hangs = True
        outputs = client.generate("r", [1], params(60))
        first = asyncio.create_task(anext(outputs))
        await until(lambda: core.core.stats().running, "it runs")
        await client.abort(["r", "unknown"])
        assert (await first).finish_reason == "abort"
        assert [output async for output in outputs] == []
        core.executor.hangs = False
        await until(lambda: not core.core.has_work, "the core has aborted it")


def test_abort_ends_the_iterator(start_core: Start, address: str) -> None:
    asyncio.run(_abort(address, start_core()))


async def _early_client(address: str, start_core: Start) -> None:
    async with client_of(address) as client:
        with pytest.raises(ClosedError, match="not started"):
            await anext(client.generate("r", [1], params()))
        with pytest.raises(DeadlineError, match=r"did not answer within 0\.05 s"):
            await client.start(0.05)
        with pytest.raises(EngineDeadError, match="not up"):
            await anext(client.generate("r", [1], params()))
        assert client.inflight == 0
        core = start_core(generation=4)
        await until(lambda: client.info, "it finds the core by itself")
        assert (await client.start(10)).generation == 4
        assert await collect(client, "r", [1]) == expected([1], 5)
        core.parent.say(Stop(budget=1))
        await until(lambda: client.info is None, "it sees that the core is gone")
        assert not client.alive
        start_core(generation=5)
        assert (await client.start(10)).generation == 5
        assert await collect(client, "r2", [1]) == expected([1], 5)


def test_a_client_may_come_before_the_core_and_stay_after_it(start_core: Start, address: str) -> None:
    asyncio.run(_early_client(address, start_core))


async def _stopped_core(address: str, core: CoreThread) -> None:
    async with client_of(address) as client:
        await client.start(10)
        core.executor.hangs = True
        running = asyncio.create_task(anext(client.generate("r", [1], params(60))))
        await until(lambda: core.core.stats().running, "it runs")
        core.parent.say(Stop(budget=1))
        assert (await running).finish_reason == "abort"


def test_the_last_words_of_a_core_are_heard(start_core: Start, address: str) -> None:
    asyncio.run(_stopped_core(address, start_core()))


async def _new_life_of_the_api_server(address: str, core: CoreThread) -> None:
    async with client_of(address) as old, client_of(address) as new:
        await old.start(10)
        core.executor.hangs = True
        lost = asyncio.create_task(collect(old, "r", [1], 60))
        await until(lambda: core.core.stats().running, "it runs")
        starting = asyncio.create_task(new.start(10))
        await until(lambda: new._connection is not None and new._connection.is_up, "it is connected")
        core.executor.hangs = False
        await starting
        assert await collect(new, "r", [2]) == expected([2], 5)
        await until(lambda: not core.core.has_work, "the old one's request is gone")
        lost.cancel()


def test_a_restarted_api_server_replaces_the_one_before(start_core: Start, address: str) -> None:
    asyncio.run(_new_life_of_the_api_server(address, start_core()))


# --- with a core by hand -------------------------------------------------------------------------------------------


async def _core_dies(address: str) -> None:
    async with router_and_client(address) as (router, client):
        request = asyncio.create_task(collect(client, "r", [1]))
        call = asyncio.create_task(client.call("stats"))
        assert isinstance(await router.read_past_pings(), AddRequest)
        assert isinstance(await router.read_past_pings(), Call)
        router.close()
        with pytest.raises(EngineDeadError, match="is gone"):
            await request
        with pytest.raises(EngineDeadError, match="is gone"):
            await call
        assert client.inflight == 0
        with pytest.raises(EngineDeadError, match="not up"):
            await anext(client.generate("s", [1], params()))
        again = Router(address)
        try:
            # Nothing of the first life comes over: the first word is Hello.
            assert isinstance(await again.read(), Hello)
        finally:
            again.close()


def test_a_core_that_dies_ends_everything_at_once(address: str) -> None:
    asyncio.run(_core_dies(address))


async def _last_words(address: str) -> None:
    async with router_and_client(address) as (router, client):
        request = asyncio.create_task(collect(client, "r", [1]))
        await router.read_past_pings()
        for number in range(300):
            await router.say(StepOutputs(1, (RequestOutput("r", pack([number])),)))
        await router.say(StepOutputs(1, (RequestOutput("r", b"", "stop"),)))
        router.socket.close(linger=1000)
        router.context.term()
        assert await request == list(range(300))


def test_what_came_before_the_end_is_not_lost(address: str) -> None:
    asyncio.run(_last_words(address))


async def _generations(address: str) -> None:
    async with router_and_client(address) as (router, client):
        outputs = client.generate("r", [1], params())
        first = asyncio.create_task(anext(outputs))
        await router.read_past_pings()
        await router.say(StepOutputs(0, (RequestOutput("r", pack([99])),)))
        await router.say_raw(b"\xc1")
        await router.say(StepOutputs(1, (RequestOutput("nobody", pack([1])), RequestOutput("r", pack([5])))))
        assert unpack((await first).new_token_ids) == [5]
        assert client.malformed == 1
        waiting = asyncio.create_task(anext(outputs))
        await asyncio.sleep(0)
        await router.say(msgspec.structs.replace(INFO, generation=2))
        with pytest.raises(EngineDeadError, match="restarted"):
            await waiting
        assert client.info is not None
        assert client.info.generation == 2


def test_older_generations_are_dropped_and_newer_ones_end_the_requests(address: str) -> None:
    asyncio.run(_generations(address))


async def _progress(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PING_EVERY", 0.01)
    async with router_and_client(address) as (router, client):

        async def answer(step_age: float) -> float:
            ping = await router.read()
            assert isinstance(ping, Ping)
            before = client.stats
            await router.say(Pong(ping.sequence, 1, SchedulerStats(running=1), step_age))
            await until(lambda: client.stats is not before, "the pong is read")
            return client.last_progress

        idle = await answer(0.0)
        assert await answer(0.0) > idle, "no step under way: all is well"
        moving = await answer(0.5)
        assert now() - 5 < moving <= now() - 0.005, "progress is as old as the step, or the last one that was seen"
        stuck = client.last_progress
        assert await answer(100.0) == stuck, "it answers, but its step does not end"
        assert client.alive
        monkeypatch.setattr(client_module, "ALIVE_WITHIN", 0.0)
        assert not client.alive


def test_progress_is_told_from_answers(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(_progress(address, monkeypatch))


async def _deadline_and_doubles(address: str) -> None:
    async with router_and_client(address) as (router, client):
        with pytest.raises(DeadlineError, match=r"the call stats within 0\.02 s"):
            await client.call("stats", timeout=0.02)
        outputs = client.generate("r", [1], params())
        first = asyncio.create_task(anext(outputs))
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match="'r' is in use"):
            await anext(client.generate("r", [1], params()))
        assert client.inflight == 1
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        while not isinstance(message := await router.read(), AbortRequests):
            pass
        assert message.request_ids == ("r",)


def test_deadlines_and_doubled_ids(address: str) -> None:
    asyncio.run(_deadline_and_doubles(address))


async def _closed(address: str) -> None:
    async with router_and_client(address) as (router, client):
        request = asyncio.create_task(collect(client, "r", [1]))
        await router.read_past_pings()
        await client.close()
        with pytest.raises(EngineDeadError, match="was closed"):
            await request
        await client.close()


def test_close_ends_what_runs(address: str) -> None:
    asyncio.run(_closed(address))
