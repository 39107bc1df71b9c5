"""An engine core that dies under an API server: what HTTP clients see of it. Real processes, the official client."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from launcher.process.reports import Drain, TreeState
from launcher.process.restart import RestartSettings
from launcher.worker.reference import expected_tokens
from tests.api.fakes import text_of
from tests.api.test_server import Server
from tests.conftest import eventually
from tests.engine.lives import Lives

POISON = "!"
TOKENS = 80


class Site:
    """An API server and its core. The test is the supervisor: it kills, restarts, and tells the API server."""

    def __init__(self, directory: Any, **settings: Any) -> None:
        self.server = Server(directory, socket.create_server(("127.0.0.1", 0)), restart=True, **settings)
        self._threads = ThreadPoolExecutor(32)
        self.http = httpx.Client(base_url=self.server.url, timeout=60)
        self.openai = openai.OpenAI(
            base_url=f"{self.server.url}/v1",
            api_key="x",
            max_retries=0,
            timeout=60,
            http_client=httpx.Client(timeout=60),
        )
        self.lives: Lives | None = None

    def serve(self, **core: Any) -> Lives:
        self.lives = Lives(self.server.address, **core)
        self.server.wait_ready()
        self.server.wait_admitting(self.http)
        return self.lives

    def start(self, work: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
        return self._threads.submit(work, *args, **options)

    def kill(self) -> None:
        assert self.lives is not None
        self.lives.kill()
        self.server.tell(TreeState("recovering", "EngineCore_DP0: attempt 1"))
        eventually(lambda: self.status("/readyz") == 503, what="the API server has seen it")

    def revive(self) -> None:
        assert self.lives is not None
        self.lives.start()
        self.server.tell(TreeState("ready"))

    def keep_alive(self, futures: list[Future[Any]]) -> None:
        """Restart the core as often as it ends, until all of these are done."""
        assert self.lives is not None
        lives = self.lives

        def step() -> bool:
            lives.revive()
            return all(future.done() for future in futures)

        eventually(step, 30, "all are answered")

    def status(self, path: str) -> int:
        return self.http.get(path).status_code

    def generated(self) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith("xserve_generated_tokens_total")).split()[1])

    def in_flight(self) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith("xserve_requests_in_flight")).split()[1])

    def complete(self, prompt: str, **options: Any) -> Any:
        return self.openai.completions.create(
            model="reference", prompt=prompt, **{"temperature": 0, "max_tokens": TOKENS, **options}
        )

    def text(self, prompt: str, **options: Any) -> str:
        return "".join(chunk.choices[0].text for chunk in self.complete(prompt, stream=True, **options))

    def close(self) -> None:
        if self.lives is not None:
            self.lives.close()
        self.server.nursery.close()
        self._threads.shutdown()
        self.http.close()
        self.openai.close()


@pytest.fixture
def make_site(tmp_path_factory) -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def make(**settings: Any) -> Site:
        sites.append(Site(tmp_path_factory.mktemp("x"), **settings))
        return sites[-1]

    yield make
    for site in sites:
        site.close()


def answer(prompt: str, count: int = TOKENS) -> str:
    return text_of(expected_tokens(list(prompt.encode()), count))


def test_every_answer_is_whole_although_the_core_dies(make_site) -> None:
    site = make_site()
    site.serve(step_ms=10)
    tokens = expected_tokens(list(b"stop"), TOKENS)
    stop = f"{tokens[60]} {tokens[61]}"  # most of it is generated after the death
    streams = {f"stream {i}": site.start(site.text, f"stream {i}") for i in range(10)}
    whole = {f"whole {i}": site.start(site.complete, f"whole {i}") for i in range(4)}
    several = site.start(site.complete, "several", n=3, stream=False)
    stopped = site.start(site.complete, "stop", stop=[stop], logprobs=1)
    stopped_stream = site.start(site.text, "stop", stop=[stop])
    noted = site.start(
        lambda: list(site.complete("noted", logprobs=2, stream=True, stream_options={"include_usage": True}))
    )
    eventually(lambda: site.generated() > 19 * 10, what="all of them run")
    site.kill()
    assert (site.status("/livez"), site.status("/health")) == (200, 503)
    late = site.start(site.text, "late")
    site.revive()
    eventually(lambda: site.status("/health") == 200, what="healthy again")
    for prompt, future in streams.items():
        assert future.result(30) == answer(prompt)
    for prompt, future in whole.items():
        (choice,) = future.result(30).choices
        assert (choice.text, choice.finish_reason) == (answer(prompt), "length")
        assert future.result().usage.completion_tokens == TOKENS
    assert [choice.text for choice in several.result(30).choices] == [answer("several")] * 3
    assert several.result().usage.completion_tokens == 3 * TOKENS
    (choice,) = stopped.result(30).choices
    assert (choice.text, choice.finish_reason) == (text_of(tokens[:60]), "stop")
    assert stopped.result().usage.completion_tokens == 62
    assert choice.logprobs.tokens == [f"{token} " for token in tokens[:62]]
    assert stopped_stream.result(30) == text_of(tokens[:60])
    *chunks, last = noted.result(30)
    names = [name for chunk in chunks for name in chunk.choices[0].logprobs.tokens]
    assert names == [f"{token} " for token in expected_tokens(list(b"noted"), TOKENS)]
    offsets = [offset for chunk in chunks for offset in chunk.choices[0].logprobs.text_offset]
    assert offsets == sorted(set(offsets))
    assert last.usage.completion_tokens == TOKENS
    assert late.result(30) == answer("late")
    assert "xserve_engine_requests_replayed_total" in site.http.get("/metrics").text


def test_the_poison_alone_is_refused(make_site) -> None:
    site = make_site()
    site.serve(step_ms=5, poison_token=ord(POISON), tp=1)
    good = {f"good {i}": site.start(site.text, f"good {i}", max_tokens=400) for i in range(4)}
    eventually(lambda: site.generated() > 4 * 5, what="they run")
    bad = site.start(site.complete, f"bad {POISON}")
    bad_stream = site.start(site.text, f"bad stream {POISON}")
    site.keep_alive([*good.values(), bad, bad_stream])
    for prompt, future in good.items():
        assert future.result() == answer(prompt, 400)
    with pytest.raises(openai.InternalServerError, match=r"died \d times while it worked on this request") as refused:
        bad.result()
    assert refused.value.code == "poison_request"
    with pytest.raises(openai.APIError, match="the last two times on it alone") as cut:
        bad_stream.result()
    assert cut.value.code == "poison_request"
    assert site.text("after") == answer("after")


def test_several_choices_of_one_poison_do_not_each_take_their_deaths(make_site) -> None:
    """The first that is failed ends the others, which are at the core again only for a moment, if at all."""
    site = make_site()
    lives = site.serve(step_ms=5, poison_token=ord(POISON))
    good = site.start(site.text, "good", max_tokens=400)
    eventually(lambda: site.generated() > 5, what="it runs")
    bad = site.start(site.complete, [f"bad {POISON}", f"worse {POISON}"], n=3)
    site.keep_alive([good, bad])
    with pytest.raises(openai.InternalServerError) as refused:
        bad.result()
    assert refused.value.code == "poison_request"
    assert good.result() == answer("good", 400)
    assert lives.generation - 1 <= RestartSettings().max_restarts


def test_a_stream_is_kept_alive_by_comments_and_who_hangs_up_is_forgotten(make_site) -> None:
    site = make_site(max_waiting=3)
    site.serve(step_ms=5)
    body = {"model": "reference", "temperature": 0, "max_tokens": 200, "stream": True}
    site.kill()
    seen: list[str] = []
    with site.http.stream("POST", "/v1/completions", json={**body, "prompt": "stays"}) as stays:
        lines = stays.iter_lines()
        with site.http.stream("POST", "/v1/completions", json={**body, "prompt": "leaves", "n": 2}) as leaves:
            leaving = leaves.iter_lines()
            assert next(leaving) == ": waiting for the engine"
            full = site.http.post("/v1/completions", json={**body, "prompt": "too many"})
            assert (full.status_code, full.json()["error"]["code"]) == (503, "overloaded")
            assert full.headers["retry-after"] == "1"
        eventually(lambda: site.in_flight() == 1, what="it is forgotten")
        seen.append(next(lines))
        site.revive()
        seen += lines
    assert seen[0] == ": waiting for the engine"
    assert seen[-2] == "data: [DONE]"
    chat = site.http.post("/v1/chat/completions", json={
        "model": "reference", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0
    })  # fmt: skip
    assert chat.json()["choices"][0]["message"]["content"] == answer("user: hi\nassistant: ", 3)
    eventually(lambda: site.generated() == 203, what="the one that was left generated nothing")


def test_drain_while_the_core_is_away(make_site) -> None:
    site = make_site()
    site.serve(step_ms=5)
    futures = [site.start(site.text, f"r{i}", max_tokens=400) for i in range(3)]
    eventually(lambda: site.generated() > 10, what="they run")
    site.kill()
    site.server.tell(Drain(0.5))
    eventually(lambda: site.server.pump() and site.server.drained, what="it says that it is drained")
    assert site.server.drained == [3]
    for future in futures:
        with pytest.raises(openai.APIError) as cut:
            future.result(10)
        assert cut.value.code == "shutting_down"


@pytest.mark.parametrize("state", ["stopping", "failed"])
def test_nobody_waits_for_a_core_that_does_not_come_back(make_site, state) -> None:
    site = make_site()
    site.serve(step_ms=5)
    future = site.start(site.text, "r", max_tokens=4000)
    eventually(lambda: site.generated() > 3, what="it runs")
    site.kill()
    site.server.tell(TreeState(state, "the restarts are used up"))
    with pytest.raises(openai.APIError, match="the restarts are used up") as dead:
        future.result(10)
    assert dead.value.code == "engine_dead"


def test_health_follows_the_core(make_site) -> None:
    site = make_site()
    lives = site.serve(step_ms=20, tp=1)
    stream = site.start(site.text, "r", max_tokens=100)
    eventually(lambda: site.generated() > 3, what="it runs")
    assert site.status("/health") == 200
    lives.core.signal(signal.SIGSTOP)
    began = time.monotonic()
    eventually(lambda: site.status("/health") == 503, what="a stopped core is not healthy")
    assert time.monotonic() - began < 5.2
    assert site.status("/livez") == 200
    lives.core.signal(signal.SIGCONT)
    eventually(lambda: site.status("/health") == 200, 5, what="it is healthy again")
    assert stream.result(30) == answer("r", 100)
