"""Requests over the death of their engine core: real cores, killed; and a core by hand for what must be exact."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from array import array
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import psutil
import pytest

from launcher.clock import now
from launcher.engine import client as client_module
from launcher.engine.client import EngineClient, EngineDeadError
from launcher.engine.messages import (
    AbortRequests,
    AddRequest,
    RequestOutput,
    SamplingParams,
    StepOutputs,
    TokenLogprobs,
)
from launcher.engine.replay import CLEARED_AFTER
from launcher.errors import ClosedError, PoisonError
from launcher.executor.base import pack, unpack
from launcher.worker.reference import expected_tokens
from tests.engine.lives import Lives
from tests.engine.test_client import INFO, Router, until

POISON = 7


@pytest.fixture
def lives(address: str) -> Iterator[Callable[..., Lives]]:
    made: list[Lives] = []

    def make(**options: object) -> Lives:
        made.append(Lives(address, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


@contextlib.asynccontextmanager
async def keeper(address: str) -> AsyncIterator[EngineClient]:
    client = EngineClient(address, "api-0", keeps_requests=True)
    try:
        await client.start(30)
        yield client
    finally:
        await client.close()


class Reader:
    """Reads one request to its end."""

    def __init__(self, client: EngineClient, name: str, prompt: list[int], max_tokens: int, **sampling: object) -> None:
        self.prompt = prompt
        self.tokens: list[int] = []
        params = SamplingParams(max_tokens=max_tokens, temperature=0, **sampling)  # type: ignore[arg-type]
        self.task = asyncio.create_task(self._read(client, name, params))

    async def _read(self, client: EngineClient, name: str, params: SamplingParams) -> None:
        async for output in client.generate(name, self.prompt, params):
            self.tokens += unpack(output.new_token_ids)
        assert self.tokens == expected_tokens(self.prompt, params.max_tokens)


async def _killed_twice(address: str, lives: Lives) -> None:
    async with keeper(address) as client:
        readers = [Reader(client, f"r{i}", [i, 1], 90) for i in range(20)]
        for goal in (5, 30):
            await until(lambda: all(len(r.tokens) >= goal for r in readers), f"{goal} tokens each")  # noqa: B023
            lives.kill()
            await until(lambda: client.info is None, "it is seen")
            late = Reader(client, f"late{goal}", [goal, 2], 90)
            readers.append(late)
            lives.start()
        await asyncio.gather(*(r.task for r in readers))
        assert client.inflight == 0
        assert client.last_info is not None
        assert client.last_info.generation == 3
        assert client.replayed >= 20


def test_a_core_that_is_killed_twice_in_the_middle_of_twenty_streams(address: str, lives: Callable[..., Lives]) -> None:
    asyncio.run(_killed_twice(address, lives(step_ms=5)))


async def _worker_killed(address: str, lives: Lives) -> None:
    async with keeper(address) as client:
        readers = [Reader(client, f"r{i}", [i, 1], 60) for i in range(8)]
        await until(lambda: all(len(r.tokens) >= 5 for r in readers), "5 tokens each")
        workers = psutil.Process(lives.core.pid).children()
        assert len(workers) == 2
        os.kill(workers[1].pid, signal.SIGKILL)
        await until(lives.revive, "the core ends by itself")
        await asyncio.gather(*(r.task for r in readers))


def test_a_worker_that_is_killed(address: str, lives: Callable[..., Lives]) -> None:
    asyncio.run(_worker_killed(address, lives(step_ms=5, tp=2)))


async def _poison(address: str, lives: Lives) -> None:
    async with keeper(address) as client:
        running = [Reader(client, f"r{i}", [i + 100, 1], 400) for i in range(6)]
        await until(lambda: all(len(r.tokens) >= 5 for r in running), "5 tokens each")
        poison = Reader(client, "poison", [1, POISON], 20)
        late = Reader(client, "late", [5, 5], 20)
        while not all(r.task.done() for r in [*running, poison, late]):
            lives.revive()
            await asyncio.sleep(0.01)
        with pytest.raises(PoisonError, match=r"died 4 times.*the last two times on it alone") as caught:
            await poison.task
        assert caught.value.deaths == 4
        assert poison.tokens == []
        await asyncio.gather(*(r.task for r in [*running, late]))
        assert lives.generation == 5


@pytest.mark.parametrize("tp", [0, 1])
def test_the_poison_alone_is_failed(address: str, lives: Callable[..., Lives], tp: int) -> None:
    asyncio.run(_poison(address, lives(step_ms=2, tp=tp, poison_token=POISON)))


async def _stopped(address: str, lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PING_EVERY", 0.1)
    async with keeper(address) as client:
        reader = Reader(client, "r", [1], 3)
        await until(lambda: lives.core.ready_info or lives.is_gone() or reader.tokens, "it runs")
        # A step of two seconds: the core answers all along, and its progress is as old as the step.
        began = now()
        while now() - began < 1.0:
            await asyncio.sleep(0.05)
            assert client.alive
        assert now() - client.last_progress > 0.4
        reader.task.cancel()
        monkeypatch.setattr(client_module, "ALIVE_WITHIN", 1.0)
        lives.core.signal(signal.SIGSTOP)
        await until(lambda: not client.alive, "it does not answer")
        lives.core.signal(signal.SIGCONT)
        await until(lambda: client.alive, "it answers again")


def test_busy_is_told_from_stopped(address: str, lives: Callable[..., Lives], monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(_stopped(address, lives(step_ms=2000, tp=1), monkeypatch))


# --- a core by hand --------------------------------------------------------------------------------------------------


class Cores:
    """Lives by hand, one after the other, and a client that keeps its requests."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.generation = INFO.generation
        self.router = Router(address)
        self.client = EngineClient(address, "api-0", keeps_requests=True)

    async def start(self) -> None:
        starting = asyncio.create_task(self.client.start(10))
        await self.router.welcome()
        await starting

    def die(self) -> None:
        self.router.close()

    async def live(self, *, new: bool = True) -> None:
        self.generation += new
        self.router = Router(self.address)
        await self.router.welcome(msgspec.structs.replace(INFO, generation=self.generation))

    async def say(self, *outputs: RequestOutput) -> None:
        await self.router.say(StepOutputs(self.generation, outputs))

    async def added(self) -> AddRequest:
        message = await self.router.read_past_pings()
        assert isinstance(message, AddRequest), message
        return message

    async def close(self) -> None:
        await self.client.close()
        if not self.router.socket.closed:
            self.router.close()


@contextlib.asynccontextmanager
async def by_hand(address: str) -> AsyncIterator[Cores]:
    cores = Cores(address)
    try:
        await cores.start()
        yield cores
    finally:
        await cores.close()


async def _apart(address: str) -> None:
    async with by_hand(address) as cores:
        params = SamplingParams(max_tokens=9, seed=5, logprobs=0)
        outputs = cores.client.generate("r", [1, 2], params, [3])
        first = asyncio.create_task(anext(outputs))
        await cores.added()
        notes = [TokenLogprobs(pack([token]), array("f", [0.0]).tobytes(), 0) for token in range(10)]
        await cores.say(RequestOutput("r", pack([4]), None, None, (notes[4],)))
        assert unpack((await first).new_token_ids) == [4]
        await cores.say(RequestOutput("r", pack([5]), None, None, (notes[5],)))
        cores.die()
        await until(lambda: cores.client.info is None, "it is seen")
        assert cores.client.inflight == 1
        await cores.live()
        again = await cores.added()
        assert again.request_id not in ("", "r")
        assert (unpack(again.prompt_token_ids), unpack(again.output_token_ids)) == ([1, 2], [3, 4, 5])
        assert again.sampling == params
        await cores.router.say(StepOutputs(cores.generation - 1, (RequestOutput(again.request_id, pack([66])),)))
        await cores.say(
            RequestOutput("r", pack([77])), RequestOutput(again.request_id, pack([6]), None, None, (notes[6],))
        )
        await cores.say(RequestOutput(again.request_id, pack([7]), "length", None, (notes[7],)))
        await until(lambda: cores.client.inflight == 0, "the last one is there")
        rest = await anext(outputs)
        assert (unpack(rest.new_token_ids), rest.finish_reason, rest.request_id) == ([5, 6, 7], "length", "r")
        assert rest.logprobs == tuple(notes[5:8])
        assert [output async for output in outputs] == []


def test_a_replay_has_prompt_and_output_apart_and_nothing_is_given_out_twice(address: str) -> None:
    asyncio.run(_apart(address))


async def _orderly(address: str) -> None:
    async with by_hand(address) as cores:
        readers = [asyncio.create_task(anext(cores.client.generate(name, [1], SamplingParams()))) for name in "ab"]
        for _ in readers:
            await cores.added()
        for _ in range(4):  # never a suspect: it was no death
            await cores.say(*(RequestOutput(wire, b"", "abort") for wire in list(cores.client._at_core)))
            await until(lambda: not cores.client._at_core, "it is heard")
            waits = asyncio.create_task(anext(cores.client.generate("new", [1], SamplingParams())))
            await asyncio.sleep(0.01)
            assert not cores.client._at_core, "nothing is sent to a core that ends"
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)
            cores.die()
            await cores.live()
            names = {(await cores.added()).request_id for _ in readers}
            assert len(names) == 2
        await cores.say(*(RequestOutput(name, pack([9]), "stop") for name in names))
        assert [unpack(output.new_token_ids) for output in await asyncio.gather(*readers)] == [[9], [9]]


def test_what_a_core_gives_back_at_an_orderly_end_is_sent_to_the_next(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PING_EVERY", 30)
    asyncio.run(_orderly(address))


async def _gone_for_good(address: str) -> None:
    async with by_hand(address) as cores:
        at_core = asyncio.create_task(anext(cores.client.generate("a", [1], SamplingParams())))
        await cores.added()
        call = asyncio.create_task(cores.client.call("stats"))
        await until(lambda: cores.client._calls, "it is called")
        cores.die()
        with pytest.raises(EngineDeadError, match="is gone"):
            await call
        queued = asyncio.create_task(anext(cores.client.generate("b", [1], SamplingParams())))
        await until(lambda: cores.client.inflight == 2, "both wait")
        cores.client.keep_requests(False, "the restarts are used up")
        for task in (at_core, queued):
            with pytest.raises(EngineDeadError, match="used up"):
                await task
        with pytest.raises(EngineDeadError, match="not up"):
            await anext(cores.client.generate("c", [1], SamplingParams()))
        cores.client.keep_requests(True)
        last = asyncio.create_task(anext(cores.client.generate("d", [1], SamplingParams())))
        await cores.live()
        assert (await cores.added()).request_id == "d"
        await cores.client.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await last
        with pytest.raises(ClosedError):
            await anext(cores.client.generate("e", [1], SamplingParams()))


def test_waiting_ends_when_the_core_will_not_come_back(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PING_EVERY", 30)
    asyncio.run(_gone_for_good(address))


async def _forgotten(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with by_hand(address) as cores:
        left, stays = (cores.client.generate(name, [1], SamplingParams()) for name in ("left", "stays"))
        tasks = [asyncio.create_task(anext(outputs)) for outputs in (left, stays)]
        for _ in tasks:
            await cores.added()
        cores.die()
        await until(lambda: cores.client.info is None, "it is seen")
        monkeypatch.setattr(client_module, "PING_EVERY", 0.02)
        signs = await asyncio.gather(*tasks)
        assert [(sign.new_token_ids, sign.finish_reason) for sign in signs] == [(b"", None)] * 2
        await left.aclose()
        aborted = cores.client.generate("aborted", [1], SamplingParams())
        assert (await anext(aborted)).new_token_ids == b""
        await cores.client.abort(["aborted"])
        assert [output.finish_reason async for output in aborted][-1] == "abort"
        assert cores.client.inflight == 1
        monkeypatch.setattr(client_module, "PING_EVERY", 30)
        await cores.live()
        assert (await cores.added()).request_id == "stays~2"
        task = asyncio.create_task(anext(stays))
        await cores.say(RequestOutput("stays~2", pack([1])))
        while not (output := await task).new_token_ids:
            task = asyncio.create_task(anext(stays))
        assert unpack(output.new_token_ids) == [1]
        await stays.aclose()
        assert await cores.router.read_past_pings() == AbortRequests(("stays~2",))


def test_who_leaves_while_the_core_is_away_is_not_sent_again(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PING_EVERY", 0.1)
    asyncio.run(_forgotten(address, monkeypatch))


async def _hung(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with by_hand(address) as cores:
        monkeypatch.setattr(client_module, "ALIVE_WITHIN", 0.1)
        outputs = cores.client.generate("r", [1], SamplingParams())
        first = asyncio.create_task(anext(outputs))
        await cores.added()
        assert (await first).new_token_ids == b"", "the core says nothing, and is there"
        assert not cores.client.alive
        assert cores.client.info is not None
        await outputs.aclose()


def test_who_waits_for_a_hung_core_gets_signs_of_life(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PING_EVERY", 0.05)
    asyncio.run(_hung(address, monkeypatch))


async def _trials(address: str) -> None:
    async with by_hand(address) as cores:
        readers = [asyncio.create_task(anext(cores.client.generate(name, [1], SamplingParams()))) for name in "ab"]
        for _life in range(2):
            for _ in readers:
                await cores.added()
            cores.die()
            await cores.live()
        trial = await cores.added()
        new = asyncio.create_task(anext(cores.client.generate("new", [2], SamplingParams())))
        await cores.say(RequestOutput(trial.request_id, pack(range(CLEARED_AFTER))))
        assert await cores.router.read_past_pings() == AbortRequests((trial.request_id,)), "parked"
        second = await cores.added()
        await cores.say(
            RequestOutput(trial.request_id, pack([99])), RequestOutput(second.request_id, pack([5]), "stop")
        )
        back, last = await cores.added(), await cores.added()
        assert unpack(back.output_token_ids) == list(range(CLEARED_AFTER)), "what came after it was parked is void"
        assert last.request_id == "new"
        await cores.say(RequestOutput("new", pack([6]), "stop"))
        assert unpack((await readers[1]).new_token_ids) == [5]
        assert unpack((await new).new_token_ids) == [6]
        assert unpack((await readers[0]).new_token_ids) == list(range(CLEARED_AFTER))


def test_suspects_are_tried_one_at_a_time_and_parked(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PING_EVERY", 30)
    asyncio.run(_trials(address))
