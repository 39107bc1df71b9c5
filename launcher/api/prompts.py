"""From what a client sent to token ids. Long texts are encoded on threads: the Rust tokenizer lets go of the GIL, and
the streams of all other requests go on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from launcher.api.errors import ApiError, bad_request, unsupported
from launcher.api.schema import ChatRequest, Message
from launcher.api.tokenizer import TemplateError, Tokenizer

_INLINE = 4096
"""Characters. Encoding that many takes about a millisecond: less than it is worth to change threads for."""

Prompt = str | list[int]
T = TypeVar("T")


class TextWork:
    """Runs text work: short pieces at once, long ones on two threads. Owned by the server; `close` ends the threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="text")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        if size <= _INLINE:
            return work()
        return await self.run_on_thread(work)

    async def run_on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


def split_prompts(prompt: Any) -> list[Prompt]:
    """The four forms of a completion's `prompt`, told apart. ApiError (400) says which element is of no such form."""
    if prompt is None:
        raise bad_request("prompt is missing.", "prompt", "missing_required_parameter")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise bad_request(_FORMS.format(type(prompt).__name__), "prompt", "invalid_value")
    if not prompt:
        raise bad_request("prompt is an empty list; give at least one string or token id.", "prompt", "invalid_value")
    if _is_token(prompt[0]):
        return [_tokens(prompt, "prompt")]
    out: list[Prompt] = []
    for i, element in enumerate(prompt):
        if isinstance(element, str):
            out.append(element)
        elif isinstance(element, list):
            out.append(_tokens(element, f"prompt[{i}]"))
        else:
            raise bad_request(_FORMS.format(f"a list with {type(element).__name__}"), f"prompt[{i}]", "invalid_value")
    return out


_FORMS = "prompt must be a string, a list of strings, a list of token ids or a list of such lists; it is {}."


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tokens(values: list[Any], param: str) -> list[int]:
    for value in values:
        if not _is_token(value):
            raise bad_request(f"{param} holds {type(value).__name__} among token ids.", param, "invalid_value")
    return values


async def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, work: TextWork, vocab_size: int) -> list[int]:
    """Token ids of one prompt of a completion. ApiError (400) for an empty one or an id outside the vocabulary."""
    if isinstance(prompt, str):
        text = prompt
        ids = await work.run(len(text), lambda: tokenizer.encode(text))
    else:
        ids = prompt
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            wrong = next(i for i in ids if not 0 <= i < vocab_size)
            text = f"prompt holds the token id {wrong}; ids go from 0 to {vocab_size - 1}."
            raise bad_request(text, "prompt", "invalid_value")
    if not ids:
        raise bad_request("prompt is empty: it has no token to go on from.", "prompt", "invalid_value")
    return ids


async def encode_chat(request: ChatRequest, tokenizer: Tokenizer, work: TextWork) -> list[int]:
    """Token ids of a conversation, by the model's chat template. ApiError (400) when they do not fit together."""
    messages = [_plain(message, f"messages[{i}]") for i, message in enumerate(request.messages)]
    options = request.chat_template_kwargs or {}
    for name in _FIXED & options.keys():
        raise unsupported(f"chat_template_kwargs.{name}", "it is set by the server")

    def encode() -> list[int]:
        # The template writes the special tokens itself.
        return tokenizer.encode(tokenizer.render_chat(messages, options), special=False)

    try:
        ids = await work.run(sum(len(m["content"]) for m in messages), encode)
    except TemplateError as error:
        raise bad_request(str(error), "messages", "chat_template_error") from error
    if not ids:
        raise bad_request("The messages give an empty prompt.", "messages", "invalid_value")
    return ids


_FIXED = frozenset({"conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding",
                    "truncation", "max_length", "return_tensors", "return_dict", "add_generation_prompt",
                    "continue_final_message", "return_assistant_tokens_mask", "tokenizer_kwargs"})  # fmt: skip
"""Arguments of the rendering call itself; a client's options are for the template only."""


def _plain(message: Message, where: str) -> dict[str, Any]:
    """A message as templates take it: `content` one string."""
    return {**(message.model_extra or {}), "role": message.role, "content": _text(message, where)}


def _text(message: Message, where: str) -> str:
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise bad_request(f"{where}.content is missing.", f"{where}.content", "missing_required_parameter")
    if isinstance(message.content, str):
        return message.content
    texts = []
    for j, part in enumerate(message.content):
        texts.append(_part_text(part.type, part.text, f"{where}.content[{j}]"))
    return "".join(texts)


def _part_text(kind: str, text: str | None, where: str) -> str:
    if kind != "text":
        raise ApiError(400, f"{where} is of type {kind!r}; this model reads text only.", param=where,
                       code="unsupported_content")  # fmt: skip
    if text is None:
        raise bad_request(f"{where}.text is missing.", f"{where}.text", "missing_required_parameter")
    return text
