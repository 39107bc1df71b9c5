"""One request as the engine core sees it, and the rules that refuse, clip and finish it. Pure: no I/O, no clock.

When a request ends (`finish_after`), first match wins:

==========================================================  =========  =================
after a token was appended                                  reason     stop_token_id
==========================================================  =========  =================
fewer than `min_tokens` output tokens: no token stops it    (go on)
the token is one of `stop_token_ids`                        stop       the token
the token is one of the model's EOS, unless `ignore_eos`    stop       the token
`max_tokens` output tokens are reached                      length
the sequence has the greatest length that can be served     length
==========================================================  =========  =================

The token that ends a request is delivered with it.
"""

from __future__ import annotations

from array import array

from launcher.engine.messages import AddRequest, FinishReason
from launcher.executor.base import SamplingParams


class Limits:
    """What one engine core can serve; the same for all its requests."""

    __slots__ = ("eos_token_ids", "max_len", "max_model_len", "vocab_size")

    def __init__(self, max_model_len: int, kv_tokens: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.max_model_len = max_model_len
        self.max_len = min(max_model_len, kv_tokens)
        """Tokens of prompt and output together. No request can outgrow the cache, so the oldest one always goes on."""
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)


class Request:
    """A request from admission to its last token. Changed by the scheduler only."""

    __slots__ = (
        "key",
        "max_tokens",
        "num_computed",
        "preemptions",
        "prompt_len",
        "request_id",
        "room",
        "sampling",
        "slot",
        "stop_ids",
        "tokens",
    )

    def __init__(self, key: str, add: AddRequest, prompt: array[int], output: array[int], limits: Limits) -> None:
        self.key = key
        """Unique in the core; names its KV blocks."""
        self.request_id = add.request_id
        """The client's name for it."""
        self.sampling: SamplingParams = add.sampling
        self.tokens = prompt + output
        """Prompt, then output."""
        self.prompt_len = len(prompt)
        self.max_tokens = min(add.sampling.max_tokens, limits.max_len - len(prompt))
        """The client's, clipped to what the model and the cache can hold."""
        eos = frozenset() if add.sampling.ignore_eos else limits.eos_token_ids
        self.stop_ids = eos | frozenset(add.sampling.stop_token_ids)
        self.num_computed = 0
        """Tokens whose keys and values the workers have, or will have after the steps already sent to them."""
        self.room = 0
        """Tokens that its KV blocks can hold: saves a look into the pool for each token."""
        self.slot = -1
        """Its place in every worker; -1 while it waits."""
        self.preemptions = 0

    @property
    def to_compute(self) -> int:
        """Tokens not computed yet; 0 while its next token is being sampled by a step in flight."""
        return len(self.tokens) - self.num_computed

    def finish_after(self, token: int) -> tuple[FinishReason | None, int | None]:
        """Reason and stop token, `token` being the last one of `tokens`; (None, None): it goes on."""
        count = len(self.tokens) - self.prompt_len
        if token in self.stop_ids and count >= self.sampling.min_tokens:
            return "stop", token
        if count >= self.max_tokens:
            return "length", None
        return None, None


def token_column(column: bytes) -> array[int]:
    """Token ids out of a message. ValueError when the bytes are no whole int32s."""
    out = array("i")
    out.frombytes(column)
    return out


def refusal(add: AddRequest, prompt: array[int], output: array[int], limits: Limits) -> str:
    """Why this request can never be served, in one line for the client; empty: it can."""
    if not prompt:
        return "the prompt has no token; send at least one"
    if add.sampling.max_tokens < 1:
        return f"max_tokens is {add.sampling.max_tokens}; ask for at least 1"
    if len(prompt) > limits.max_model_len - 1:
        return (
            f"the prompt has {len(prompt)} tokens, and this model takes {limits.max_model_len} with at least one of "
            f"output; shorten it to {limits.max_model_len - 1}"
        )
    if len(prompt) > limits.max_len - 1:
        return (
            f"the prompt has {len(prompt)} tokens, and the whole KV cache holds {limits.max_len}; shorten it to "
            f"{limits.max_len - 1}, or start with a larger --kv-cache-memory"
        )
    for tokens in (prompt, output):
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < limits.vocab_size:
                return f"token id {token} is outside the vocabulary of {limits.vocab_size}"
    return ""
