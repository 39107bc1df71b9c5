"""Log-probabilities in the two styles of the API: chat's list of objects, and the older four parallel lists."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from launcher.api.sequence import TokenNote
from launcher.api.tokenizer import Tokenizer
from launcher.engine.messages import TokenLogprobs, unpack

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


def pairs(logprobs: TokenLogprobs) -> list[tuple[int, float]]:
    """(token id, log-probability): the sampled token first, then the best ones in falling order."""
    values = array("f")
    values.frombytes(logprobs.values)
    return [(token, max(value, _LOWEST)) for token, value in zip(unpack(logprobs.ids), values, strict=True)]


def chat_logprobs(notes: Sequence[TokenNote], tokenizer: Tokenizer) -> dict[str, Any]:
    content = []
    for note in notes:
        sampled, *best = [_entry(token, value, tokenizer) for token, value in pairs(note.logprobs)]
        content.append({**sampled, "top_logprobs": best})
    return {"content": content, "refusal": None}


def _entry(token: int, value: float, tokenizer: Tokenizer) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {"token": raw.decode(errors="replace"), "logprob": value, "bytes": list(raw)}


def completion_logprobs(notes: Sequence[TokenNote], tokenizer: Tokenizer, count: int) -> dict[str, Any]:
    """`count`: the best ones asked for; with 0 there is no list of them."""
    rows = [pairs(note.logprobs) for note in notes]
    return {
        "tokens": [_name(row[0][0], tokenizer) for row in rows],
        "token_logprobs": [row[0][1] for row in rows],
        # A dictionary by text: the sampled token is among them even when it is not one of the best.
        "top_logprobs": [{_name(t, tokenizer): v for t, v in row[1:] + row[:1]} for row in rows] if count else None,
        "text_offset": [note.offset for note in notes],
    }


def _name(token: int, tokenizer: Tokenizer) -> str:
    """A token that is no text by itself is written as its bytes, so that two of them stay two."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
