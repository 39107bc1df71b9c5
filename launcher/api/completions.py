"""``/v1/completions``: one answer per prompt and choice; answer number = prompt number times n plus choice."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from time import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from launcher.api.errors import json_response
from launcher.api.logprobs import completion_logprobs
from launcher.api.prompts import encode_prompt, split_prompts
from launcher.api.sampling import choice_seed, sampling_params
from launcher.api.schema import BaseRequest, CompletionRequest, parse
from launcher.api.sequence import Answer, Piece, SequenceSpec, collect, run_all
from launcher.api.state import ApiState
from launcher.api.stream import DONE, WAITING, EventStream, event, while_wanted
from launcher.api.tokenizer import Tokenizer
from launcher.engine.messages import EngineInfo


@dataclass(frozen=True)
class Job:
    """A request that was found to be in order: its sequences, and what every part of its answer says of it."""

    id: str
    created: int
    """Unix seconds."""
    model: str
    specs: list[SequenceSpec]
    prompt_tokens: int
    """Each prompt counted once, however many answers it gets."""

    @property
    def headers(self) -> dict[str, str]:
        return {"x-request-id": self.id}

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def usage(self, completion_tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
        }


def make_job(
    prefix: str, request: BaseRequest, prompts: Sequence[list[int]], info: EngineInfo, *, continues: bool
) -> Job:
    """The sequences of a request, seeds set. ApiError (400) when a prompt and its answer do not fit the model."""
    job_id = f"{prefix}-{uuid.uuid4().hex}"
    specs: list[SequenceSpec] = []
    for prompt in prompts:
        params = sampling_params(request, len(prompt), info)
        for choice in range(request.choices):
            seeded = msgspec.structs.replace(params, seed=choice_seed(request.seed, choice))
            index = len(specs)
            specs.append(
                SequenceSpec(f"{job_id}-{index}", index, prompt, seeded, tuple(request.stops), continues=continues)
            )
    return Job(job_id, int(time()), request.model, specs, sum(map(len, prompts)))


async def completions(state: ApiState, http: Request, body: bytes) -> Response:
    tokenizer, info = state.ready()
    request = parse(CompletionRequest, body)
    state.check_model(request.model)
    forms = split_prompts(request.prompt)
    with state.admit(len(forms) * request.choices) as ticket:
        prompts = [await encode_prompt(form, tokenizer, state.work, info.vocab_size) for form in forms]
        job = make_job("cmpl", request, prompts, info, continues=True)
        state.metrics.prompt_tokens.inc(job.prompt_tokens)
        if request.stream:
            return EventStream(lambda: _events(state, tokenizer, request, job), ticket.keep(), job.headers)
        work = collect(run_all(state, tokenizer, job.specs), len(job.specs))
        answers = await while_wanted(http.receive, ticket, work)
    return json_response(_body(request, job, answers, tokenizer), headers=job.headers)


def _body(request: CompletionRequest, job: Job, answers: list[Answer], tokenizer: Tokenizer) -> dict[str, Any]:
    choices = [_choice(request, i, a.text, a, tokenizer) for i, a in enumerate(answers)]
    return {**job.envelope("text_completion", choices), "usage": job.usage(sum(a.tokens for a in answers))}


def _choice(
    request: CompletionRequest, index: int, text: str, part: Answer | Piece, tokenizer: Tokenizer
) -> dict[str, Any]:
    logprobs = None
    if request.logprobs is not None:
        logprobs = completion_logprobs(part.notes, tokenizer, request.logprobs)
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": part.finish}


async def _events(
    state: ApiState, tokenizer: Tokenizer, request: CompletionRequest, job: Job
) -> AsyncGenerator[bytes, None]:
    tail = {"usage": None} if request.wants_usage else {}
    tokens = 0
    async with aclosing(run_all(state, tokenizer, job.specs)) as pieces:
        async for piece in pieces:
            tokens += piece.tokens
            if piece.text or piece.finish:
                choice = _choice(request, piece.index, piece.text, piece, tokenizer)
                yield event({**job.envelope("text_completion", [choice]), **tail})
            elif piece.waits:
                yield WAITING
    if request.wants_usage:
        yield event({**job.envelope("text_completion", []), "usage": job.usage(tokens)})
    yield DONE
