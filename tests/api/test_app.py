"""The application in process: probes, refusals, admission. Whole answers are checked by the official client."""

from __future__ import annotations

import asyncio
import json

import pytest

from launcher import __version__
from launcher.clock import now
from launcher.config import ApiSettings
from tests.api.conftest import Asker
from tests.api.fakes import INFO, FakeEngine, make_state, text_of, tokens_of

CHAT = {"model": "reference", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "reference", "prompt": "hi"}


def ask(state, path, method=None, **options):
    method = method or ("POST" if "json" in options or "content" in options else "GET")
    return asyncio.run(Asker(state).ask(method, path, **options))


def error_of(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# --- probes ----------------------------------------------------------------------------------------------------------


def test_before_the_tree_is_ready() -> None:
    state = make_state(ready=False)
    state.gate.feed_tree("starting", "loading weights 3/7")
    assert ask(state, "/livez").status_code == 200
    for path in ("/startupz", "/readyz"):
        response = ask(state, path)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["phase"] == "loading weights 3/7"
    assert ask(state, "/health").status_code == 503
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        response = ask(state, path, json=body)
        assert "loading weights 3/7" in error_of(response, 503)["message"]
        assert response.headers["retry-after"] == "1"
    assert ask(state, "/v1/models").status_code == 200
    state.close()


def test_ready(state) -> None:
    for path in ("/livez", "/startupz", "/readyz", "/health"):
        assert ask(state, path).status_code == 200, path
    state.gate.feed_tree("starting", "restarting")
    assert ask(state, "/startupz").status_code == 200
    assert ask(state, "/readyz").status_code == 503


@pytest.mark.parametrize(
    ("change", "phase"),
    [
        (lambda s, e: setattr(s, "tokenizer", None), "loading the tokenizer"),
        (lambda s, e: setattr(e, "info", None), "connecting to the engine"),
        (lambda s, e: setattr(e, "alive", False), "the engine does not answer"),
        (lambda s, e: s.gate.feed("drain", "draining"), "draining"),
    ],
)
def test_not_ready_although_the_tree_was(state, engine, change, phase) -> None:
    change(state, engine)
    assert ask(state, "/readyz").json()["phase"] == phase
    assert phase in error_of(ask(state, "/v1/completions", json=COMPLETION), 503)["message"]


def test_health_follows_progress(state, engine) -> None:
    engine.last_progress = now() - 10
    assert ask(state, "/health").status_code == 200, "a long step that answers is busy, not hung"
    engine.last_progress = now() - 31
    response = ask(state, "/health")
    assert response.status_code == 503
    assert "in one step for 31." in response.json()["reason"]
    engine.last_progress = now()
    engine.alive = False
    assert "does not answer" in ask(state, "/health").json()["reason"]


def test_one_hung_engine_of_two_is_unhealthy() -> None:
    good, bad = FakeEngine(), FakeEngine()
    state = make_state(good, bad)
    bad.last_progress -= 31
    assert "engine 1" in ask(state, "/health").json()["reason"]
    state.close()


def recovering(**settings):
    engine = FakeEngine()
    state = make_state(engine, restart=True, **settings)
    engine.info, engine.alive = None, False
    state.gate.feed_tree("recovering", "EngineCore_DP0: attempt 1 of 5")
    return state, engine


def test_while_an_engine_comes_back_requests_are_taken_and_probes_say_no() -> None:
    state, _ = recovering()
    assert ask(state, "/livez").status_code == 200
    assert ask(state, "/startupz").status_code == 200
    assert "attempt 1" in ask(state, "/readyz").json()["phase"]
    assert "attempt 1" in ask(state, "/health").json()["reason"]
    assert ask(state, "/v1/completions", json=COMPLETION).status_code == 200
    assert ask(state, "/v1/chat/completions", json=CHAT).status_code == 200
    state.gate.feed_tree("ready")  # the supervisor's word may come before the engine's
    assert ask(state, "/health").status_code == 503
    assert ask(state, "/readyz").status_code == 503
    assert ask(state, "/v1/completions", json=COMPLETION).status_code == 200
    state.gate.feed_tree("failed", "the restarts are used up")
    assert "used up" in error_of(ask(state, "/v1/completions", json=COMPLETION), 503)["message"]
    state.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda s, e: setattr(e, "last_info", None),  # it was never up: nothing is known of its limits
        lambda s, e: setattr(s, "tokenizer", None),
        lambda s, e: s.gate.feed("drain", "draining"),
        lambda s, e: s.gate.feed_tree("starting", "again"),
    ],
)
def test_what_does_not_wait_for_an_engine(change) -> None:
    state, engine = recovering()
    change(state, engine)
    response = ask(state, "/v1/completions", json=COMPLETION)
    error_of(response, 503)
    assert response.headers["retry-after"] == "1"
    state.close()


def test_only_so_many_wait_for_an_engine() -> None:
    state, engine = recovering(max_waiting=2)
    engine.gap = 0.05
    asker = Asker(state)

    async def main():
        body = {**COMPLETION, "max_tokens": 2}
        first = [asyncio.create_task(asker.ask("POST", "/v1/completions", json=body)) for _ in range(2)]
        while len(engine.params) < 2:
            await asyncio.sleep(0)
        refused = await asker.ask("POST", "/v1/completions", json=body)
        assert error_of(refused, 503)["code"] == "overloaded"
        assert refused.headers["retry-after"] == "1"
        assert [(await task).status_code for task in first] == [200, 200]

    asyncio.run(main())
    state.close()


def test_version_models_metrics(state, engine) -> None:
    assert ask(state, "/version").json() == {"version": __version__}
    card = ask(state, "/v1/models").json()["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("reference", "model", INFO.max_model_len)
    assert ask(state, "/v1/models/reference").json()["id"] == "reference"
    assert error_of(ask(state, "/v1/models/x/y"), 404)["code"] == "model_not_found"


def test_metrics(state, engine) -> None:
    asker = Asker(state)

    async def main():
        await asker.ask("POST", "/v1/completions", json={**COMPLETION, "max_tokens": 5})
        await asker.ask("GET", "/nowhere")
        return (await asker.ask("GET", "/metrics")).text

    text = asyncio.run(main())
    assert 'xserve_http_requests_total{path="/v1/completions",status="200"} 1.0' in text
    assert 'xserve_http_requests_total{path="other",status="404"} 1.0' in text
    assert "xserve_generated_tokens_total 5.0" in text
    assert "xserve_prompt_tokens_total 2.0" in text
    assert "xserve_requests_in_flight 0.0" in text
    assert "xserve_time_to_first_token_seconds_count 1.0" in text
    assert "xserve_inter_token_seconds_count 4.0" in text
    assert 'xserve_engine_sequences_waiting{engine="0"} 2.0' in text
    assert 'xserve_engine_preemptions_total{engine="0"} 5.0' in text
    names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    assert all(name.startswith("xserve_") for name in names)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_no_such_path_or_method(state) -> None:
    assert error_of(ask(state, "/v2/x"), 404)["code"] == "not_found"
    assert error_of(ask(state, "/v1/completions"), 405)["code"] == "method_not_allowed"


def test_unknown_model(state) -> None:
    error = error_of(ask(state, "/v1/chat/completions", json={**CHAT, "model": "gpt"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "reference" in error["message"]


def test_keys() -> None:
    state = make_state(api_keys=("one", "two"))
    header = {"authorization": "Bearer two"}
    assert ask(state, "/v1/completions", json=COMPLETION, headers=header).status_code == 200
    for headers, code in (
        ({}, "missing_api_key"),
        ({"authorization": "Basic two"}, "missing_api_key"),
        ({"authorization": "Bearer "}, "missing_api_key"),
        ({"authorization": "Bearer tw"}, "invalid_api_key"),
        ({"authorization": "Bearer \xe9"}, "invalid_api_key"),
    ):
        raw = {name: value.encode("latin-1") for name, value in headers.items()}
        assert error_of(ask(state, "/v1/models", headers=raw), 401)["code"] == code
    for path in ("/health", "/livez", "/readyz", "/startupz", "/metrics", "/version"):
        assert ask(state, path).status_code == 200
    state.close()


def test_too_large_a_body() -> None:
    state = make_state(max_body_bytes=1000)
    body = json.dumps({**COMPLETION, "prompt": "x" * 1000}).encode()
    assert error_of(ask(state, "/v1/completions", content=body), 413)["code"] == "request_too_large"

    async def pieces():
        for i in range(0, len(body), 100):
            yield body[i : i + 100]

    assert error_of(ask(state, "/v1/completions", content=pieces()), 413)["code"] == "request_too_large"
    state.close()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [1, 32000]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": "x" * 512}, "prompt"),
        ({"prompt": "x" * 500, "max_tokens": 20}, "max_tokens"),
        ({"prompt": "x", "n": 128, "max_tokens": 0}, "max_tokens"),
    ],
)
def test_bad_prompts_are_refused_and_leave_nothing(state, engine, body, param) -> None:
    assert error_of(ask(state, "/v1/completions", json={"model": "reference", **body}), 400)["param"] == param
    assert state.in_flight == 0
    assert not engine.params


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "text only"),
        ([{"type": "text"}], "text is missing"),
        (None, "content is missing"),
    ],
)
def test_bad_messages(state, content, words) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": content}]}
    assert words in error_of(ask(state, "/v1/chat/completions", json=body), 400)["message"]


def test_more_than_can_ever_be_taken_and_more_than_can_be_taken_now() -> None:
    engine = FakeEngine()
    engine.gap = 0.05
    state = make_state(engine, max_waiting=3)
    assert error_of(ask(state, "/v1/completions", json={**COMPLETION, "n": 4}), 400)["param"] == "n"
    asker = Asker(state)

    async def main():
        first = asyncio.create_task(asker.ask("POST", "/v1/completions", json={**COMPLETION, "n": 2}))
        while not engine.params:
            await asyncio.sleep(0)
        second = await asker.ask("POST", "/v1/completions", json={**COMPLETION, "n": 2})
        assert error_of(second, 503)["code"] == "overloaded"
        third = await asker.ask("POST", "/v1/completions", json={**COMPLETION, "max_tokens": 1})
        assert third.status_code == 200
        assert (await first).status_code == 200

    asyncio.run(main())
    assert state.in_flight == 0
    state.close()


# --- answers ---------------------------------------------------------------------------------------------------------


def test_prompt_forms_and_numbering(state, engine) -> None:
    body = {"model": "reference", "prompt": ["hi", [104, 105], "yo"], "n": 2, "max_tokens": 3, "temperature": 0}
    answer = ask(state, "/v1/completions", json=body).json()
    hi, yo = tokens_of(b"hi", 3), tokens_of(b"yo", 3)
    assert [c["text"] for c in answer["choices"]] == [text_of(t) for t in (hi, hi, hi, hi, yo, yo)]
    assert [c["index"] for c in answer["choices"]] == list(range(6))
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 18, "total_tokens": 24}


def test_chat_prompt_and_content_parts(state, engine) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    messages = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
    ]
    ask(state, "/v1/chat/completions", json={**CHAT, "messages": messages, "max_tokens": 1})
    (prompt,) = engine.prompts.values()
    assert bytes(prompt).decode() == "system: be\nuser: hi\nassistant: \nassistant: "


def test_a_long_prompt_is_encoded_on_a_thread(engine) -> None:
    engine.info = INFO.__class__(0, 100_000, 1, 16, 32000)
    state = make_state(engine)
    answer = ask(state, "/v1/completions", json={**COMPLETION, "prompt": "é" * 20_000}).json()
    assert answer["usage"]["prompt_tokens"] == 40_000
    state.close()


def test_engine_errors_are_500(state, engine) -> None:
    engine.dies_after = 2
    error = error_of(ask(state, "/v1/completions", json=COMPLETION), 500)
    assert (error["type"], error["code"]) == ("server_error", "engine_dead")
    engine.dies_after, engine.error_after = None, 2
    error = error_of(ask(state, "/v1/chat/completions", json={**CHAT, "n": 3}), 500)
    assert error["message"] == "a step failed"
    assert state.in_flight == 0
    assert state.engines[0].running == 0


def test_an_unexpected_error_is_500_and_logged(state, engine, caplog) -> None:
    def broken(prompt, params):
        raise ZeroDivisionError("oops")

    engine.script = broken
    error = error_of(ask(state, "/v1/completions", json=COMPLETION), 500)
    assert error["code"] == "internal_error"
    assert "oops" not in error["message"]
    assert "ZeroDivisionError: oops" in caplog.text


def test_the_least_loaded_engine_is_chosen() -> None:
    engines = [FakeEngine() for _ in range(3)]
    for engine in engines:
        engine.gap = 0.005
    engines[1].alive = False
    state = make_state(*engines)
    ask(state, "/v1/completions", json={**COMPLETION, "n": 6, "max_tokens": 2})
    assert [len(engine.params) for engine in engines] == [3, 0, 3]
    state.close()


def test_choices_have_seeds_of_their_own_that_repeat(state, engine) -> None:
    body = {**COMPLETION, "n": 3, "seed": 11}
    first = ask(state, "/v1/completions", json=body).json()["choices"]
    again = ask(state, "/v1/completions", json=body).json()["choices"]
    assert [c["text"] for c in first] == [c["text"] for c in again]
    assert len({c["text"] for c in first}) == 3
    alone = ask(state, "/v1/completions", json={**body, "n": 1}).json()["choices"]
    assert alone[0]["text"] == first[0]["text"]


def test_settings_defaults_are_served() -> None:
    assert ApiSettings().max_body_bytes > 1 << 20
