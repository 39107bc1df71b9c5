"""Whole answers over a real socket, asked with the official client."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest

from tests.api.conftest import client_of
from tests.api.fakes import FakeEngine, make_state, served, text_of, tokens_of
from tests.conftest import eventually

PROMPT = "hello"
MESSAGES = [{"role": "user", "content": "hello"}]
CHAT_PROMPT = b"user: hello\nassistant: "


def test_models(client) -> None:
    assert [model.id for model in client.models.list()] == ["reference"]
    assert client.models.retrieve("reference").owned_by == "xserve"


def test_chat(client) -> None:
    answer = client.chat.completions.create(model="reference", messages=MESSAGES, max_tokens=4, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == text_of(tokens_of(CHAT_PROMPT, 4))
    assert choice.finish_reason == "length"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(CHAT_PROMPT), 4)
    assert usage.total_tokens == len(CHAT_PROMPT) + 4
    assert answer._request_id == answer.id


def test_chat_stream(client) -> None:
    chunks = list(
        client.chat.completions.create(
            model="reference", messages=MESSAGES, max_tokens=4, temperature=0, n=2, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    *parts, last = chunks
    assert last.choices == []
    assert (last.usage.completion_tokens, last.usage.prompt_tokens) == (8, len(CHAT_PROMPT))
    assert all(chunk.usage is None for chunk in parts)
    for index in (0, 1):
        mine = [c.choices[0] for c in parts if c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == text_of(tokens_of(CHAT_PROMPT, 4))
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + ["length"]
        assert all(c.delta.role is None for c in mine[1:])


def test_the_bytes_of_a_stream(server) -> None:
    body = {"model": "reference", "messages": MESSAGES, "max_tokens": 1, "stream": True}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    first = json.loads(events[0].removeprefix("data: "))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "usage" not in first


def test_completion(client) -> None:
    answer = client.completions.create(model="reference", prompt=PROMPT, temperature=0)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == text_of(tokens_of(PROMPT.encode(), 16))
    assert answer.usage.completion_tokens == 16


def test_completion_stream(client) -> None:
    chunks = list(
        client.completions.create(
            model="reference", prompt=[PROMPT, "x"], temperature=0, max_tokens=3, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    for index, prompt in enumerate((PROMPT, "x")):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert "".join(c.text for c in mine) == text_of(tokens_of(prompt.encode(), 3))
        assert mine[-1].finish_reason == "length"
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (6, 6)


def test_chat_logprobs(client) -> None:
    answer = client.chat.completions.create(
        model="reference", messages=MESSAGES, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    tokens = tokens_of(CHAT_PROMPT, 3)
    assert [entry.token for entry in content] == [f"{t} " for t in tokens]
    assert [entry.logprob for entry in content] == [0.0] * 3
    assert bytes(content[0].bytes).decode() == f"{tokens[0]} "
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [
        (f"{tokens[0]} ", -0.5),
        (f"{tokens[0] + 1} ", -1.0),
    ]


def test_chat_logprobs_in_a_stream_are_the_same(client) -> None:
    options = {"model": "reference", "messages": MESSAGES, "max_tokens": 3, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**options).choices[0].logprobs.content
    streamed = []
    for chunk in client.chat.completions.create(**options, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == whole


def test_completion_logprobs(client) -> None:
    answer = client.completions.create(model="reference", prompt=PROMPT, max_tokens=3, temperature=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    words = [f"{t} " for t in tokens_of(PROMPT.encode(), 3)]
    assert logprobs.tokens == words
    assert logprobs.token_logprobs == [0.0] * 3
    assert logprobs.text_offset == [0, len(words[0]), len(words[0] + words[1])]
    assert all(word in top for word, top in zip(words, logprobs.top_logprobs, strict=True))
    none = client.completions.create(model="reference", prompt=PROMPT, max_tokens=2, logprobs=0).choices[0].logprobs
    assert none.top_logprobs is None
    assert len(none.tokens) == 2


@pytest.mark.parametrize("burst", [1, 3, 16])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_cut_exactly_and_aborts(client, engine, burst, stream) -> None:
    engine.burst = burst
    engine.gap = 0.001
    tokens = tokens_of(PROMPT.encode(), 16)
    stop = f"{tokens[3]} {str(tokens[4])[:2]}"  # ends within the fifth token
    options = {
        "model": "reference", "prompt": PROMPT, "temperature": 0, "max_tokens": 16, "stop": [stop, "zzz"], "logprobs": 1
    }  # fmt: skip
    if stream:
        chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
        text = "".join(c.choices[0].text for c in chunks if c.choices)
        finish, usage = chunks[-2].choices[0].finish_reason, chunks[-1].usage
        noted = sum(len(c.choices[0].logprobs.tokens) for c in chunks if c.choices)
    else:
        answer = client.completions.create(**options)
        text, finish, usage = answer.choices[0].text, answer.choices[0].finish_reason, answer.usage
        noted = len(answer.choices[0].logprobs.tokens)
    assert text == text_of(tokens[:3])
    assert finish == "stop"
    assert usage.completion_tokens == 5
    assert noted == 5
    if burst < 16:
        eventually(lambda: engine.aborted, what="the rest is aborted in the core")
        assert sum(engine.sent.values()) <= 6


def test_stop_strings_wait_for_min_tokens(client) -> None:
    tokens = tokens_of(PROMPT.encode(), 16)
    options = {"model": "reference", "prompt": PROMPT, "temperature": 0, "stop": [" "]}
    assert client.completions.create(**options).choices[0].text == str(tokens[0])
    answer = client.completions.create(**options, extra_body={"min_tokens": 3})
    assert answer.choices[0].text == text_of(tokens[:4])[:-1]
    assert answer.usage.completion_tokens == 4


def test_a_stop_token_is_counted_but_no_text(client, engine) -> None:
    engine.script = lambda prompt, params: [300, 301, 5]
    engine.stop_token = 5
    answer = client.completions.create(model="reference", prompt=PROMPT, extra_body={"stop_token_ids": [5]})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("300 301 ", "stop")
    assert answer.usage.completion_tokens == 3


def test_seed(client) -> None:
    def ask(seed):
        return client.completions.create(model="reference", prompt=PROMPT, seed=seed, n=2, max_tokens=4).choices

    assert [c.text for c in ask(1)] == [c.text for c in ask(1)]
    assert [c.text for c in ask(1)] != [c.text for c in ask(2)]
    assert [c.text for c in ask(None)] != [c.text for c in ask(None)]


def test_errors_have_the_clients_own_types(client) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.completions.create(model="gpt", prompt=PROMPT)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="reference", messages=MESSAGES, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="reference", prompt="x" * 600)
    assert bad.value.code == "context_length_exceeded"


def test_keys() -> None:
    state = make_state(api_keys=("secret",))
    with served(state) as server:
        with client_of(server, "secret") as client:
            client.models.list()
        with client_of(server, "wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_not_ready_is_503(state, client) -> None:
    state.gate.feed_tree("starting", "loading")
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="reference", prompt=PROMPT)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"


def test_the_engine_dies_in_a_stream(client, engine, state) -> None:
    engine.dies_after = 3
    texts: list[str] = []
    stream = client.completions.create(model="reference", prompt=PROMPT, temperature=0, stream=True)
    with pytest.raises(openai.APIError, match="engine died") as caught:
        texts.extend(chunk.choices[0].text for chunk in stream)
    assert "".join(texts) == text_of(tokens_of(PROMPT.encode(), 3))
    assert caught.value.code == "engine_dead"
    eventually(lambda: state.in_flight == 0, what="the request is over")


def test_many_streams_at_once(server, engine, state) -> None:
    async def one(client: openai.AsyncOpenAI, i: int) -> None:
        text = ""
        async for chunk in await client.completions.create(
            model="reference", prompt=f"p{i}", max_tokens=20, temperature=0, stream=True
        ):
            text += chunk.choices[0].text
        assert text == text_of(tokens_of(f"p{i}".encode(), 20))

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            await asyncio.gather(*(one(client, i) for i in range(40)))

    asyncio.run(main())
    assert state.in_flight == 0


def test_two_states_do_not_share_figures() -> None:
    first, second = make_state(FakeEngine()), make_state(FakeEngine())
    first.metrics.generated.inc(5)
    assert b"xserve_generated_tokens_total 0.0" in second.metrics.text()
    first.close()
    second.close()
