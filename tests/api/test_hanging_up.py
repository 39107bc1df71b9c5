"""Requests that end before their answer does: the client hangs up, or the server's time is over."""

from __future__ import annotations

import threading

import httpx
import openai
import pytest

from tests.api.test_openai_client import PROMPT
from tests.conftest import eventually


@pytest.mark.parametrize("n", [1, 3])
def test_hanging_up_in_a_stream_aborts(client, engine, state, n) -> None:
    engine.gap = 0.005
    with client.completions.create(
        model="reference", prompt=PROMPT, max_tokens=400, n=n, stream=True, temperature=0
    ) as stream:
        for _ in zip(range(4), stream, strict=False):
            pass
    eventually(lambda: len(engine.aborted) == n, what="the core is told at once")
    assert max(engine.sent.values()) < 300
    eventually(lambda: state.in_flight == 0, what="the request is over")
    assert state.engines[0].running == 0


def test_hanging_up_before_the_answer_aborts(server, engine, state) -> None:
    engine.gap = 0.005
    body = {"model": "reference", "prompt": PROMPT, "max_tokens": 400}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.3)
    eventually(lambda: engine.aborted, what="the core is told")
    eventually(lambda: state.in_flight == 0, what="the request is over")


@pytest.mark.parametrize("stream", [False, True])
def test_cut_requests_end_with_an_error(server, client, engine, state, stream) -> None:
    engine.gap = 0.01
    caught: list[Exception] = []

    def ask() -> None:
        try:
            answer = client.completions.create(model="reference", prompt=PROMPT, max_tokens=400, stream=stream)
            if stream:
                list(answer)
        except openai.APIError as error:
            caught.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    eventually(lambda: engine.params, what="the request is there")

    async def cut() -> int:
        return state.cut_all()

    assert server.call(cut()) == 1
    asking.join(10)
    assert caught[0].code == "shutting_down"
    eventually(lambda: engine.aborted, what="it is aborted in the core")
