"""What gpu_check runs in processes of their own, each with the card for itself. One JSON value as the last line.

_gpu_programs.py expected MODEL TOKENS PROMPTS     texts by transformers' generate, fp32
_gpu_programs.py make DIR                          a random Llama of about one billion parameters, bf16
_gpu_programs.py theirs DIR | ours DIR             tokens a second at each batch size
_gpu_programs.py library MODEL                     start methods in a process that has initialised CUDA
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

BATCHES = (1, 8, 64)
PROMPT, NEW = 128, 128
"""Tokens."""


def prompts_of(batch: int) -> list[list[int]]:
    return [[(7 * i + 13 * j) % 250 + 5 for j in range(PROMPT)] for i in range(batch)]


def expected(model: str, tokens: str, prompts: str) -> list[str]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).cuda().eval()
    loaded.generation_config.eos_token_id = None  # as with ignore_eos: the end token is a token like any other
    found = []
    for prompt in json.loads(prompts):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]]).cuda()
        mask = torch.ones_like(ids)
        got = loaded.generate(ids, attention_mask=mask, max_new_tokens=int(tokens), do_sample=False, pad_token_id=2)
        found.append(tokenizer.decode(got[0, ids.shape[1] :], skip_special_tokens=True))
    return found


def make(directory: str) -> float:
    """Billions of parameters."""
    return save_llama(directory, hidden=2048, inner=8192, layers=16, heads=32)


def save_llama(directory: str, *, hidden: int, inner: int, layers: int, heads: int) -> float:
    """A random Llama with 8 key-value heads, bf16; billions of parameters."""
    import torch
    import transformers

    from launcher.models.tiny import byte_tokenizer

    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=hidden // heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=4,
        pad_token_id=2,
    )
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    count: int = sum(p.numel() for p in model.parameters())
    return round(count / 1e9, 2)


def rates(answer: Callable[[list[list[int]]], int]) -> dict[str, float]:
    """Batch → new tokens a second, prompts included in the time; the better of two runs after a warm one."""
    found = {}
    for batch in BATCHES:
        prompts, best = prompts_of(batch), 0.0
        for _ in range(3 if batch == BATCHES[0] else 2):
            begin = time.monotonic()
            count = answer(prompts)
            best = max(best, count / (time.monotonic() - begin))
        found[str(batch)] = round(best, 1)
    return found


def theirs(directory: str) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).cuda().eval()
    model.generation_config.eos_token_id = None

    def answer(prompts: list[list[int]]) -> int:
        ids = torch.tensor(prompts).cuda()
        mask = torch.ones_like(ids)
        got = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=2)
        torch.cuda.synchronize()
        return int(got.shape[0] * (got.shape[1] - PROMPT))

    return rates(answer)


def ours(directory: str) -> dict[str, float]:
    from launcher import Engine

    with Engine(directory, device="cuda", dtype="bfloat16", backend="mp", max_model_len=1024) as engine:

        def answer(prompts: list[list[int]]) -> int:
            done = engine.generate(prompts, max_tokens=NEW, temperature=0.0, ignore_eos=True)
            return sum(len(completion.token_ids) for completion in done)

        return rates(answer)


def library(model: str) -> dict[str, Any]:
    import logging

    import torch

    from launcher import Engine
    from launcher.errors import UsageError

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("launcher").addHandler(handler)
    torch.zeros(1, device="cuda")
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "backend": "mp", "kv_cache_memory": 1 << 28}
    try:
        Engine(model, start_method="fork", **options).close()
        refused = "NOT REFUSED"
    except UsageError as error:
        refused = str(error)
    with Engine(model, **options) as engine:
        [completion] = engine.generate(["Hi!"], max_tokens=8, temperature=0.0, ignore_eos=True)
    chosen = next((line for line in said if "spawn" in line), "no line about it")
    return {"fork": refused, "auto": chosen, "tokens": len(completion.token_ids)}


if __name__ == "__main__":
    program: Any = {f.__name__: f for f in (expected, make, theirs, ours, library)}[sys.argv[1]]
    print(json.dumps(program(*sys.argv[2:])))
