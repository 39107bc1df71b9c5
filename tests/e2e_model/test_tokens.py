"""Greedy tokens through the whole program equal those of transformers' own `generate`, in fp32."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
import transformers

from launcher.api.tokenizer import load_tokenizer
from tests.e2e_model.served import Served

CLOSE = 2e-3
"""Greatest difference of a token's log-probability from transformers' (fp32; measured: 1e-4)."""


class Chat(NamedTuple):
    messages: list[dict[str, str]]
    max_tokens: int


class Told(NamedTuple):
    """An answer: the bytes and log-probability of each token, and why it ended."""

    tokens: list[bytes]
    logprobs: list[float]
    finish: str


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


CHATS = [
    Chat(_user("Hi!"), 40),
    Chat(_user("What is the capital of France? Answer in one sentence."), 24),
    Chat(_user("List the first ten prime numbers, then say in two sentences what makes a number prime."), 48),
    Chat(_user("Summarise: " + "The river is wide here and the ferry is late. " * 6), 32),
    Chat([{"role": "system", "content": "You answer in verse."}, *_user("Tell me about the sea.")], 45),
    Chat([*_user("2 + 2?"), {"role": "assistant", "content": "4."}, *_user("And 3 + 3?")], 17),
    Chat(_user("Größe, naïve, 東京, 🙂: translate."), 29),
    Chat(_user("Name a colour."), 5),
]
"""Different lengths of prompts and answers: they join and leave the batch at different times."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For transformers in this process, for the reason that `Served` has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def expected(model_dir: Path, chats: list[Chat]) -> list[Told]:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model_dir)
    pieces = load_tokenizer(str(model_dir))
    ends = model.generation_config.eos_token_id
    found = []
    for chat in chats:
        text = tokenizer.apply_chat_template(chat.messages, tokenize=False, add_generation_prompt=True)
        prompt = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.inference_mode():
            out = model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=chat.max_tokens,
                do_sample=False,
                pad_token_id=2,
                output_logits=True,
                return_dict_in_generate=True,
            )
        ids = out.sequences[0, prompt.shape[1] :].tolist()
        ended = ids[-1] in ([ends] if isinstance(ends, int) else ends)
        ids = ids[:-1] if ended else ids
        chosen = [logits[0].log_softmax(-1)[token].item() for logits, token in zip(out.logits, ids, strict=False)]
        found.append(Told([pieces.token_bytes(token) for token in ids], chosen, "stop" if ended else "length"))
    return found


def answered(url: str, model: str, chats: list[Chat]) -> list[Told]:
    """All chats at once."""

    async def ask(http: httpx.AsyncClient, chat: Chat) -> Told:
        body = {"model": model, "messages": chat.messages, "max_tokens": chat.max_tokens}
        reply = await http.post("/v1/chat/completions", json={**body, "temperature": 0, "logprobs": True})
        assert reply.status_code == 200, reply.text
        [choice] = reply.json()["choices"]
        content = choice["logprobs"]["content"]
        tokens = [bytes(token["bytes"]) for token in content]
        return Told(tokens, [token["logprob"] for token in content], choice["finish_reason"])

    async def ask_all() -> list[Told]:
        async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as http:
            return await asyncio.gather(*(ask(http, chat) for chat in chats))

    return asyncio.run(ask_all())


def check(model: Path, runtime: Path, flags: list[str]) -> None:
    wanted = expected(model, CHATS)
    assert len({len(told.tokens) for told in wanted}) > 3  # they do end at different times
    with Served(runtime, model, *flags) as served:
        got = answered(served.url, served.model, CHATS)
        workers = [p["role"] for p in served.status()["processes"]].count("worker")
    assert workers == (0 if "uni" in flags else int(flags[-1]))
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.finish == theirs.finish
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=CLOSE)


SHAPES = [
    pytest.param(["--backend", "uni"], id="uni"),
    pytest.param(["--backend", "mp", "--tp", "1"], id="mp-tp1"),
    pytest.param(["--backend", "mp", "--tp", "2"], id="mp-tp2"),
]


@pytest.mark.parametrize("flags", SHAPES)
def test_tiny_llama(tiny_llama: Path, runtime: Path, flags: list[str]) -> None:
    check(tiny_llama, runtime, flags)


@pytest.mark.parametrize("flags", SHAPES)
def test_tiny_qwen3(tiny_qwen3: Path, runtime: Path, flags: list[str]) -> None:
    check(tiny_qwen3, runtime, flags)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("flags", [["--backend", "uni"], ["--tp", "3"]], ids=["uni", "tp3"])
def test_the_demo_model(demo: Path, runtime: Path, flags: list[str]) -> None:
    check(demo, runtime, flags)
