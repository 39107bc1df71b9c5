from __future__ import annotations

import json

import pytest

from launcher.api.errors import ApiError
from launcher.api.prompts import split_prompts
from launcher.api.schema import NEUTRAL, ChatRequest, CompletionRequest, parse

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def refused(kind, body) -> ApiError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as caught:
        parse(kind, raw)
    assert caught.value.status == 400
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b'"x"', None),
        (b"[]", None),
        (b"\xff", None),
        ({}, "model"),
        ({"model": 3}, "model"),
        ({"model": "m", "max_tokens": 0}, "max_tokens"),
        ({"model": "m", "max_tokens": "5"}, "max_tokens"),
        ({"model": "m", "temperature": 2.1}, "temperature"),
        ({"model": "m", "temperature": "warm"}, "temperature"),
        ({"model": "m", "top_p": 0}, "top_p"),
        ({"model": "m", "top_k": -2}, "top_k"),
        ({"model": "m", "n": 0}, "n"),
        ({"model": "m", "n": 129}, "n"),
        ({"model": "m", "seed": 2**63}, "seed"),
        ({"model": "m", "stop": ""}, "stop"),
        ({"model": "m", "stop": ["a", ""]}, "stop"),
        ({"model": "m", "stop": list("abcde")}, "stop"),
        ({"model": "m", "stop": 5}, "stop"),
        ({"model": "m", "stop": [5]}, "stop[0]"),
        ({"model": "m", "stream": "yes"}, "stream"),
        ({"model": "m", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"model": "m", "stream": True, "stream_options": {"x": True}}, "stream_options.x"),
        ({"model": "m", "logprobs": 21}, "logprobs"),
        ({"model": "m", "presence_penalty": 2.5}, "presence_penalty"),
        ({"model": "m", "frequency_penalty": -3}, "frequency_penalty"),
        ({"model": "m", "echo": True}, "echo"),
        ({"model": "m", "best_of": 2}, "best_of"),
        ({"model": "m", "suffix": "x"}, "suffix"),
        ({"model": "m", "logit_bias": {"5": 1}}, "logit_bias"),
        ({"model": "m", "min_p": 0.1}, "min_p"),
        ({"model": "m", "tempertaure": 1}, "tempertaure"),
        ({"model": "m", "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_refused_completions_name_the_parameter(body, param) -> None:
    error = refused(CompletionRequest, body)
    assert error.param == param
    if param:
        assert param in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"prompt": "x"}, "prompt"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
    ],
)
def test_refused_chats_name_the_parameter(fields, param) -> None:
    assert refused(ChatRequest, {**CHAT, **fields}).param == param


def test_lone_surrogates_are_refused() -> None:
    refused(CompletionRequest, b'{"model": "m", "prompt": "\\ud800"}')


@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_values_pass(name: str) -> None:
    for value in (None, *NEUTRAL[name][0]):
        parse(ChatRequest, json.dumps({**CHAT, name: value}).encode())


def test_harmless_ones_pass() -> None:
    fields = {"user": "u", "metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True}
    parse(ChatRequest, json.dumps({**CHAT, **fields, "response_format": {"type": "text"}}).encode())


def test_stop_forms() -> None:
    assert parse(CompletionRequest, b'{"model": "m", "stop": "a"}').stops == ["a"]
    assert parse(CompletionRequest, b'{"model": "m", "stop": ["a", "b"]}').stops == ["a", "b"]
    assert parse(CompletionRequest, b'{"model": "m"}').stops == []


def test_prompt_forms() -> None:
    assert split_prompts("a") == ["a"]
    assert split_prompts(["a", "b"]) == ["a", "b"]
    assert split_prompts([1, 2]) == [[1, 2]]
    assert split_prompts([[1], [2, 3]]) == [[1], [2, 3]]
    assert split_prompts(["a", [1]]) == ["a", [1]]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (None, "missing"),
        (5, "int"),
        ([], "empty list"),
        ([1, "a"], "str among token ids"),
        ([True], "bool"),
        ([1.5], "float"),
        ([[1, None]], "NoneType among"),
        ({"a": 1}, "dict"),
    ],
)
def test_prompts_of_no_form(prompt, words) -> None:
    with pytest.raises(ApiError, match=words):
        split_prompts(prompt)
