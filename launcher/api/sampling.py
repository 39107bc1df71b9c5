"""A request's sampling options as the engine's `SamplingParams`, one per choice. Pure."""

from __future__ import annotations

import secrets

from launcher.api.errors import bad_request, too_long
from launcher.api.schema import BaseRequest, ChatRequest, CompletionRequest
from launcher.engine.messages import EngineInfo, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
_MASK = (1 << 63) - 1
"""Seeds travel as non-negative 63-bit integers: every signed 64-bit place on the way takes them."""


def choice_seed(seed: int | None, choice: int) -> int:
    """The seed of the choice with this number. Choice 0 draws what a request with ``n=1`` draws; others are mixed
    (splitmix64), so that neighbouring seeds do not share choices. None: a fresh one."""
    if seed is None:
        return secrets.randbits(63)
    if choice == 0:
        return seed & _MASK
    z = (seed + choice * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) & _MASK


def output_limit(request: BaseRequest, prompt_len: int, max_model_len: int) -> int:
    """Tokens that the answer may have. ApiError (400) when prompt and wanted answer do not fit together.

    A default is cut to what is left; a number that the client named is kept or refused.
    """
    left = max_model_len - prompt_len
    wanted, name = request.max_tokens, "max_tokens"
    prompt_name, default = "prompt", DEFAULT_COMPLETION_TOKENS
    if isinstance(request, ChatRequest):
        prompt_name, default = "messages", left
        if request.max_completion_tokens is not None:
            wanted, name = request.max_completion_tokens, "max_completion_tokens"
    if left < 1 or (wanted is not None and wanted > left):
        raise too_long(prompt_len, wanted or 1, max_model_len, prompt_name=prompt_name, limit_name=name)
    return wanted if wanted is not None else min(default, left)


def sampling_params(request: BaseRequest, prompt_len: int, info: EngineInfo) -> SamplingParams:
    """What holds for every choice of the request; `seed` is set per choice. ApiError (400)."""
    limit = output_limit(request, prompt_len, info.max_model_len)
    min_tokens = request.min_tokens or 0
    if min_tokens > limit:
        raise bad_request(f"min_tokens is {min_tokens}, but the answer may have only {limit} tokens.", "min_tokens")
    for token in request.stop_token_ids or ():
        if not 0 <= token < info.vocab_size:
            text = f"stop_token_ids holds {token}; token ids go from 0 to {info.vocab_size - 1}."
            raise bad_request(text, "stop_token_ids", "invalid_value")
    return SamplingParams(
        max_tokens=limit,
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=max(request.top_k or 0, 0),
        logprobs=_logprobs(request),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=min_tokens,
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
    )


def _logprobs(request: BaseRequest) -> int:
    """The engine's count: -1 none, k: the sampled token's and the k best."""
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else -1
    if isinstance(request, CompletionRequest) and request.logprobs is not None:
        return request.logprobs
    return -1


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)
