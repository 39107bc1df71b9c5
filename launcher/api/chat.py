"""``/v1/chat/completions``: the model's chat template makes one prompt of the messages; n choices answer it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from launcher.api.completions import Job, make_job
from launcher.api.errors import json_response
from launcher.api.logprobs import chat_logprobs
from launcher.api.prompts import encode_chat
from launcher.api.schema import ChatRequest, parse
from launcher.api.sequence import Answer, Piece, collect, run_all
from launcher.api.state import ApiState
from launcher.api.stream import DONE, WAITING, EventStream, event, while_wanted
from launcher.api.tokenizer import Tokenizer

_CHUNK = "chat.completion.chunk"


async def chat_completions(state: ApiState, http: Request, body: bytes) -> Response:
    tokenizer, info = state.ready()
    request = parse(ChatRequest, body)
    state.check_model(request.model)
    with state.admit(request.choices) as ticket:
        prompt = await encode_chat(request, tokenizer, state.work)
        job = make_job("chatcmpl", request, [prompt], info, continues=False)
        state.metrics.prompt_tokens.inc(job.prompt_tokens)
        if request.stream:
            return EventStream(lambda: _events(state, tokenizer, request, job), ticket.keep(), job.headers)
        work = collect(run_all(state, tokenizer, job.specs), len(job.specs))
        answers = await while_wanted(http.receive, ticket, work)
    choices = [_choice(request, index, answer, tokenizer) for index, answer in enumerate(answers)]
    usage = job.usage(sum(answer.tokens for answer in answers))
    return json_response({**job.envelope("chat.completion", choices), "usage": usage}, headers=job.headers)


def _choice(request: ChatRequest, index: int, answer: Answer, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": answer.text, "refusal": None},
        "logprobs": chat_logprobs(answer.notes, tokenizer) if request.logprobs else None,
        "finish_reason": answer.finish,
    }


async def _events(state: ApiState, tokenizer: Tokenizer, request: ChatRequest, job: Job) -> AsyncGenerator[bytes, None]:
    """For each choice: a chunk with the role, chunks with text, one with the reason it ended. Then usage, if asked."""
    tail = {"usage": None} if request.wants_usage else {}

    def chunk(index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return event({**job.envelope(_CHUNK, [choice]), **tail})

    def text(piece: Piece) -> bytes:
        if not piece.text and not piece.notes:
            return b""
        logprobs = chat_logprobs(piece.notes, tokenizer) if request.logprobs else None
        return chunk(piece.index, {"content": piece.text}, logprobs=logprobs)

    tokens = 0
    for spec in job.specs:
        yield chunk(spec.index, {"role": "assistant", "content": ""})
    async with aclosing(run_all(state, tokenizer, job.specs)) as pieces:
        async for piece in pieces:
            tokens += piece.tokens
            data = WAITING if piece.waits else text(piece)
            if piece.finish is not None:
                data += chunk(piece.index, {}, piece.finish)
            if data:
                yield data
    if request.wants_usage:
        yield event({**job.envelope(_CHUNK, []), "usage": job.usage(tokens)})
    yield DONE
