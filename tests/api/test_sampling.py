from __future__ import annotations

import json

import msgspec
import pytest

from launcher.api.errors import ApiError
from launcher.api.sampling import choice_seed, sampling_params
from launcher.api.schema import ChatRequest, CompletionRequest, parse
from tests.api.fakes import INFO


def completion(**fields):
    return parse(CompletionRequest, json.dumps({"model": "m", "prompt": "x", **fields}).encode())


def chat(**fields):
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return parse(ChatRequest, json.dumps(body).encode())


def refused(call, **fields) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(**fields)
    assert caught.value.status == 400
    return caught.value


def test_everything_arrives() -> None:
    request = completion(
        max_tokens=5, temperature=0.5, top_p=0.9, top_k=7, logprobs=3, stop_token_ids=[4], ignore_eos=True,
        min_tokens=2, presence_penalty=1, frequency_penalty=-1.5, seed=9,
    )  # fmt: skip
    params = sampling_params(request, 10, INFO)
    assert params.max_tokens == 5
    assert (params.temperature, params.top_p, params.top_k, params.logprobs) == (0.5, 0.9, 7, 3)
    assert (params.stop_token_ids, params.ignore_eos, params.min_tokens) == ((4,), True, 2)
    assert (params.presence_penalty, params.frequency_penalty) == (1.0, -1.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=type(params)) == params


def test_defaults() -> None:
    assert sampling_params(completion(), 10, INFO).max_tokens == 16
    assert sampling_params(completion(), INFO.max_model_len - 3, INFO).max_tokens == 3
    params = sampling_params(chat(), 12, INFO)
    assert params.max_tokens == INFO.max_model_len - 12
    assert (params.temperature, params.top_p, params.top_k, params.logprobs) == (1.0, 1.0, 0, -1)
    assert sampling_params(chat(temperature=0, top_k=-1), 1, INFO).temperature == 0.0


def test_chat_names() -> None:
    assert sampling_params(chat(max_tokens=3), 1, INFO).max_tokens == 3
    assert sampling_params(chat(max_completion_tokens=4, max_tokens=3), 1, INFO).max_tokens == 4
    assert sampling_params(chat(logprobs=True), 1, INFO).logprobs == 0
    assert sampling_params(chat(logprobs=True, top_logprobs=2), 1, INFO).logprobs == 2
    assert sampling_params(chat(logprobs=False), 1, INFO).logprobs == -1


def test_too_long_has_numbers() -> None:
    error = refused(lambda: sampling_params(completion(max_tokens=13), 500, INFO))
    assert error.code == "context_length_exceeded"
    assert "500" in error.message
    assert "513" in error.message
    assert "at most 12" in error.message
    error = refused(lambda: sampling_params(completion(), 512, INFO))
    assert error.param == "prompt"
    assert "512" in error.message
    assert sampling_params(completion(max_tokens=12), 500, INFO).max_tokens == 12
    error = refused(lambda: sampling_params(chat(max_completion_tokens=13), 500, INFO))
    assert error.param == "max_completion_tokens"
    assert refused(lambda: sampling_params(chat(), 600, INFO)).param == "messages"


def test_impossible_minimum_and_stop_token() -> None:
    assert refused(lambda: sampling_params(completion(min_tokens=17), 1, INFO)).param == "min_tokens"
    assert "32000" in refused(lambda: sampling_params(completion(stop_token_ids=[32000]), 1, INFO)).message


def test_seeds() -> None:
    assert choice_seed(7, 0) == 7
    assert choice_seed(7, 1) == choice_seed(7, 1) != choice_seed(7, 2)
    seeds = {choice_seed(seed, choice) for seed in range(50) for choice in range(50)}
    assert len(seeds) == 50 * 50
    for seed in (-(2**63), -1, 2**63 - 1):
        for choice in (0, 1):
            assert 0 <= choice_seed(seed, choice) < 2**63
    assert choice_seed(None, 0) != choice_seed(None, 0)
