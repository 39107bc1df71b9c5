"""One contender of `bench_serve.py`, in a process of its own.

    bench_contender.py NAME MODEL THREADS ROOM LONGEST

`ROOM` requests of `LONGEST` tokens must fit. It prints an empty object when it is ready, then answers each line with
prompts and a number of tokens by a line with the seconds that it took and the tokens, until its input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

CONTENDERS = ("mp", "uni", "generate", "continuous")

Prompts = list[list[int]]
Answer = Callable[[Prompts, int], Prompts]
"""(prompts, tokens of each answer) → the answers' tokens"""


@contextlib.contextmanager
def ours(backend: str, model: str, room: int) -> Iterator[Answer]:
    from launcher import Engine

    with Engine(model=model, tp=1, backend=backend, dtype="float32", device="cpu", max_num_seqs=room) as engine:

        def answer(prompts: Prompts, tokens: int) -> Prompts:
            answers = engine.generate(prompts, max_tokens=tokens, temperature=0, ignore_eos=True)
            return [one.token_ids for one in answers]

        yield answer


def load_transformers(model: str, threads: int) -> Any:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@contextlib.contextmanager
def generating(model: Any) -> Iterator[Answer]:
    import torch

    def answer(prompts: Prompts, tokens: int) -> Prompts:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        found: Prompts = out[:, longest:].tolist()
        return found

    yield answer


@contextlib.contextmanager
def continuous(model: Any, room: int, longest: int) -> Iterator[Answer]:
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    page = 16
    config = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=room * (longest // page + 2),
        max_batch_tokens=2048,
        max_requests_per_batch=room,
        allow_block_sharing=False,
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(generation, continuous_batching_config=config) as manager:

        def answer(prompts: Prompts, tokens: int) -> Prompts:
            ids = manager.add_requests(inputs=prompts, max_new_tokens=tokens)
            done: dict[str, list[int]] = {}
            while len(done) < len(ids):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done[result.request_id] = list(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("transformers' continuous batching ended by itself")
            return [done[request_id] for request_id in ids]

        yield answer


def contend(name: str, model: str, threads: int, room: int, longest: int) -> None:
    """Serve the parent: a line with prompts in, a line with seconds and tokens out, until it closes its end."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not for the parent
    if name in ("mp", "uni"):
        opened = ours(name, model, room)
    elif name == "generate":
        opened = generating(load_transformers(model, threads))
    else:
        opened = continuous(load_transformers(model, threads), room, longest)
    with opened as answer:
        print("{}", file=replies, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            began = time.perf_counter()
            tokens = answer(asked["prompts"], asked["tokens"])
            reply = {"seconds": time.perf_counter() - began, "tokens": tokens}
            print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    contend(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
