"""One sequence: an engine's tokens become pieces of text, with stop strings cut and tokens counted.

`SequenceText` is pure; `run_sequence` and `run_all` connect it to an engine. However they end (stop string, closed by
the consumer, cancelled), the engine's iterator is closed, which aborts the request in the core.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

from launcher.api.detokenize import Detokenizer, StopStrings
from launcher.api.errors import engine_failed
from launcher.api.state import ApiState
from launcher.api.tokenizer import Tokenizer
from launcher.clock import now
from launcher.engine.messages import RequestOutput, SamplingParams, TokenLogprobs, unpack

Finish = Literal["stop", "length"]
_CONTEXT = 6
"""Tokens of a completion's prompt that its first token is decoded after: enough to complete a character."""


@dataclass(frozen=True)
class TokenNote:
    """A token's log-probabilities and where its text begins in the answer (characters)."""

    logprobs: TokenLogprobs
    offset: int


@dataclass
class Piece:
    """News of one choice. The last piece, and no other, has a `finish`."""

    index: int
    text: str = ""
    tokens: int = 0
    """Tokens generated since the last piece, whether their text is already out or not."""
    notes: list[TokenNote] = field(default_factory=list)
    finish: Finish | None = None
    waits: bool = False
    """No news but this: the engine is gone, and the choice goes on when it is back."""


@dataclass(frozen=True)
class SequenceSpec:
    """What is to be generated for one choice."""

    request_id: str
    index: int
    prompt: list[int]
    params: SamplingParams
    stops: Sequence[str] = ()
    continues: bool = False
    """The answer continues the prompt's own text (completions); else it begins a text of its own (chat)."""


class SequenceText:
    """Feeds tokens of one sequence, answers text. Holds back half characters and what may begin a stop string."""

    def __init__(self, spec: SequenceSpec, tokenizer: Tokenizer) -> None:
        self._spec = spec
        self._text = Detokenizer(tokenizer.decode, spec.prompt[-_CONTEXT:] if spec.continues else ())
        self._stops = StopStrings(spec.stops)
        self._tokens = 0
        self._length = 0
        """Characters of the answer so far, held ones included."""
        self._notes: list[TokenNote] = []
        """Of tokens whose text is still held back."""

    def feed(self, output: RequestOutput) -> Piece | None:
        """None when there is nothing to tell yet. ApiError (500) when the engine gave the request up."""
        if output.finish_reason in ("error", "abort"):
            raise engine_failed(output.error or "The engine aborted the request.", f"engine_{output.finish_reason}")
        piece = Piece(self._spec.index)
        tokens = unpack(output.new_token_ids)
        for i, token in enumerate(tokens):
            piece.tokens += 1
            if i == len(tokens) - 1 and output.stop_token_id == token:
                break  # it ended the answer and is none of its text
            if self._push(piece, token, output.logprobs[i] if i < len(output.logprobs) else None):
                return self._last(piece, "stop")  # what the engine computed beyond is not the client's
        if output.finish_reason is not None:
            self._flush(piece)
            return self._last(piece, "stop" if piece.finish or output.finish_reason == "stop" else "length")
        if piece.text:
            piece.notes, self._notes = self._notes, []
        return piece if piece.text or piece.tokens else None

    def _push(self, piece: Piece, token: int, logprobs: TokenLogprobs | None) -> bool:
        self._tokens += 1
        if logprobs is not None:
            self._notes.append(TokenNote(logprobs, self._length))
        return self._emit(piece, self._text.push(token))

    def _emit(self, piece: Piece, text: str) -> bool:
        self._length += len(text)
        out, stopped = self._stops.feed(text, armed=self._tokens > self._spec.params.min_tokens)
        piece.text += out
        return stopped

    def _flush(self, piece: Piece) -> None:
        if self._emit(piece, self._text.flush()):
            piece.finish = "stop"
        else:
            piece.text += self._stops.flush()

    def _last(self, piece: Piece, finish: Finish) -> Piece:
        piece.notes, self._notes = self._notes, []
        piece.finish = finish
        return piece


async def run_sequence(state: ApiState, tokenizer: Tokenizer, spec: SequenceSpec) -> AsyncGenerator[Piece, None]:
    """Generate on the least loaded engine. ApiError and the engine client's errors come out of the iteration."""
    text = SequenceText(spec, tokenizer)
    slot = state.choose()
    slot.running += 1
    started = now()
    last = 0.0
    try:
        async with aclosing(slot.engine.generate(spec.request_id, spec.prompt, spec.params)) as outputs:
            async for output in outputs:
                if not output.new_token_ids and output.finish_reason is None:
                    yield Piece(spec.index, waits=True)
                    continue
                piece = text.feed(output)
                if piece is None:
                    continue
                last = state.metrics.tokens(piece.tokens, since_start=now() - started, last=last)
                yield piece
                if piece.finish is not None:
                    state.metrics.finished.labels(piece.finish).inc()
                    return
        raise engine_failed("The engine ended the request without a word.")
    finally:
        slot.running -= 1


async def run_all(state: ApiState, tokenizer: Tokenizer, specs: Sequence[SequenceSpec]) -> AsyncGenerator[Piece, None]:
    """Pieces of all choices as they come. The first error of any of them ends them all."""
    if len(specs) == 1:
        async with aclosing(run_sequence(state, tokenizer, specs[0])) as pieces:
            async for piece in pieces:
                yield piece
        return
    # None: one sequence is complete. Unbounded, but never more than the tokens asked for.
    queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()

    async def one(spec: SequenceSpec) -> None:
        try:
            async with aclosing(run_sequence(state, tokenizer, spec)) as pieces:
                async for piece in pieces:
                    queue.put_nowait(piece)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(one(spec)) for spec in specs]
    try:
        left = len(specs)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Answer:
    """A choice, complete."""

    text: str = ""
    tokens: int = 0
    notes: list[TokenNote] = field(default_factory=list)
    finish: Finish | None = None


async def collect(pieces: AsyncIterator[Piece], count: int) -> list[Answer]:
    """All choices to their ends."""
    answers = [Answer() for _ in range(count)]
    texts: list[list[str]] = [[] for _ in range(count)]
    async for piece in pieces:
        answer = answers[piece.index]
        texts[piece.index].append(piece.text)
        answer.tokens += piece.tokens
        answer.notes += piece.notes
        answer.finish = piece.finish
    for answer, parts in zip(answers, texts, strict=True):
        answer.text = "".join(parts)
    return answers
