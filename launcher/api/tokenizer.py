"""Text to token ids and back. Two tokenizers: the reference one, and a model directory's own.

Both are safe to call from several threads at once: long texts are encoded off the event loop (`prompts`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from launcher.errors import UsageError

Messages = Sequence[Mapping[str, Any]]


class TemplateError(Exception):
    """The messages do not fit the model's chat template, or there is none. The text is for the client."""


class Tokenizer(Protocol):
    vocab_size: int
    """Ids are below it; 0: not known."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """`special`: add what the model wants around a text (a beginning-of-text token)."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out; half characters become U+FFFD."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for, special ones by name; a part of a character is just those bytes."""

    def render_chat(self, messages: Messages, options: Mapping[str, Any]) -> str:
        """The conversation as the model's prompt, ready for its answer. TemplateError."""


class ReferenceTokenizer:
    """For the worker without a model: a text's ids are its UTF-8 bytes; an id's text is the number and a space.

    So the text of an answer can be read back as the exact tokens that were sampled.
    """

    vocab_size = 32000

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        del special  # there are none
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return "".join([f"{token} " for token in ids])

    def token_bytes(self, token: int) -> bytes:
        return f"{token} ".encode()

    def render_chat(self, messages: Messages, options: Mapping[str, Any]) -> str:
        del options
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: "


class ModelTokenizer:
    """A Hugging Face tokenizer, through its Rust core where it has one."""

    def __init__(self, directory: str | Path) -> None:
        try:
            from transformers import AutoTokenizer

            self._outer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except Exception as error:
            raise UsageError(f"no tokenizer in {directory}: {_first_line(error)}") from error
        core = getattr(self._outer, "backend_tokenizer", None)
        if core is None:
            raise UsageError(f"the tokenizer in {directory} has no tokenizer.json; only fast tokenizers are served")
        # Set once here: transformers sets both at each call, which two threads must not do at once.
        core.no_truncation()
        core.no_padding()
        self._core = core
        self.vocab_size = core.get_vocab_size(with_added_tokens=True)
        self._special = frozenset(self._outer.all_special_ids)
        self._byte_level = "ByteLevel" in str(core.decoder)
        self._has_template = bool(getattr(self._outer, "chat_template", None))
        if self._has_template:
            self._compile_template()

    def _compile_template(self) -> None:
        try:
            self.render_chat([{"role": "user", "content": "hi"}], {})
        except TemplateError:
            pass  # it may want other messages; this was only to have it compiled before the first request

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        ids: list[int] = self._core.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._core.decode(ids, skip_special_tokens=True)
        return text

    def token_bytes(self, token: int) -> bytes:
        piece = self._core.id_to_token(token)
        if piece is None:  # a padded vocabulary: the model may emit ids that have no text
            return b""
        if token in self._special:
            return str(piece).encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        if self._byte_level:
            values = [_BYTE_OF.get(char) for char in piece]
            if None not in values:
                return bytes([v for v in values if v is not None])
        return str(piece).replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def render_chat(self, messages: Messages, options: Mapping[str, Any]) -> str:
        if not self._has_template:
            raise TemplateError("This model has no chat template; use /v1/completions with a prompt instead.")
        try:
            text: str = self._outer.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=True, **options
            )
        except Exception as error:
            # A template is a program of the model's author: whatever it raises is about these messages.
            raise TemplateError(f"The messages do not fit the model's chat template: {_first_line(error)}") from error
        return text


def load_tokenizer(directory: str | None) -> Tokenizer:
    """The model directory's tokenizer; None: the reference one. UsageError if there is none that we can use."""
    return ReferenceTokenizer() if directory is None else ModelTokenizer(directory)


@contextmanager
def torch_hidden() -> Iterator[None]:
    """While inside, `import torch` fails as if it were not installed: tokenizers need none, and it costs seconds and
    hundreds of megabytes. For a process of one's own: transformers remembers for ever that it saw no torch."""
    if "torch" in sys.modules:
        yield
        return
    quiet = logging.getLogger("transformers")
    quiet.addFilter(_advises_nothing)
    sys.modules["torch"] = None  # type: ignore[assignment]  # the import system's own way to say "not there"
    try:
        yield
    finally:
        del sys.modules["torch"]
        quiet.removeFilter(_advises_nothing)


def _advises_nothing(record: logging.LogRecord) -> bool:
    """transformers advises to install the torch that we have just hidden."""
    return "PyTorch was not found" not in record.getMessage()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one printable character: those that are printable in Latin-1 as
    themselves, the others, in order, from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(sorted(set(range(256)) - printable))})
    return table


_BYTE_OF = _byte_alphabet()
