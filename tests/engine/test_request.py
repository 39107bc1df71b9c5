from __future__ import annotations

from array import array
from typing import Any

import pytest

from launcher.engine.request import Limits, Request, refusal, token_column
from tests.engine.strict import add

LIMITS = Limits(max_model_len=20, kv_tokens=1000, vocab_size=100, eos_token_ids=(2,))


def request(prompt: list[int], output: list[int], limits: Limits = LIMITS, **sampling: Any) -> Request:
    return Request("k", add("r", prompt, output, **sampling), array("i", prompt), array("i", output), limits)


@pytest.mark.parametrize(
    ("output", "sampling", "expect"),
    [
        ([5], {}, (None, None)),
        ([5, 2], {}, ("stop", 2)),
        ([5, 2], {"ignore_eos": True}, (None, None)),
        ([2], {"ignore_eos": True, "stop_token_ids": (2,)}, ("stop", 2)),
        ([7], {"stop_token_ids": (7, 8)}, ("stop", 7)),
        ([7], {"stop_token_ids": (7,), "min_tokens": 2}, (None, None)),
        ([7, 7], {"stop_token_ids": (7,), "min_tokens": 2}, ("stop", 7)),
        ([2], {"min_tokens": 2}, (None, None)),
        ([5, 5], {"max_tokens": 2}, ("length", None)),
        ([5, 2], {"max_tokens": 2}, ("stop", 2)),
        ([7], {"max_tokens": 1, "min_tokens": 5, "stop_token_ids": (7,)}, ("length", None)),
        ([5] * 9, {"max_tokens": 100}, (None, None)),
        ([5] * 10, {"max_tokens": 100}, ("length", None)),
    ],
)
def test_when_a_request_ends(output: list[int], sampling: dict[str, Any], expect: tuple[object, object]) -> None:
    assert request([9] * 10, output, **sampling).finish_after(output[-1]) == expect


def test_max_tokens_is_clipped_to_what_model_and_cache_hold() -> None:
    assert request([9] * 10, [], max_tokens=5).max_tokens == 5
    assert request([9] * 10, [], max_tokens=50).max_tokens == 10
    assert request([9] * 10, [], Limits(20, 16, 100, ()), max_tokens=50).max_tokens == 6


@pytest.mark.parametrize(
    ("prompt", "output", "sampling", "words"),
    [
        ([], [], {}, "no token"),
        ([1], [], {"max_tokens": 0}, "max_tokens is 0"),
        ([1] * 20, [], {}, "shorten it to 19"),
        ([1, 100], [], {}, "token id 100 is outside the vocabulary of 100"),
        ([1, -1], [], {}, "token id -1"),
        ([1], [100], {}, "token id 100"),
    ],
)
def test_what_is_refused(prompt: list[int], output: list[int], sampling: dict[str, object], words: str) -> None:
    line = refusal(add("r", prompt, output, **sampling), array("i", prompt), array("i", output), LIMITS)
    assert words in line
    assert "\n" not in line


def test_a_prompt_larger_than_the_whole_cache_is_refused() -> None:
    line = refusal(add("r", [1] * 16), array("i", [1] * 16), array("i"), Limits(20, 16, 100, ()))
    assert "the whole KV cache holds 16" in line
    assert "--kv-cache-memory" in line


def test_the_longest_prompt_is_taken() -> None:
    assert refusal(add("r", [1] * 19), array("i", [1] * 19), array("i"), LIMITS) == ""


def test_torn_token_columns_are_seen() -> None:
    with pytest.raises(ValueError, match="multiple of item size"):
        token_column(b"abc")
