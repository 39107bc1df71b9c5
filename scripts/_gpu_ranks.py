"""What gpu_check --gpus N runs in processes of their own. One JSON value as the last line.

_gpu_ranks.py reduce N            all-reduce by each way on N cards, 8 KiB to 16 MiB
_gpu_ranks.py make DIR            a random Llama of several billion parameters, bf16, as large as memory and disk allow
_gpu_ranks.py rate DIR TP         tokens a second and the time of a step, at batch 1 and 64
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _gpu_programs import save_llama

KIB = 1 << 10
SIZES = [8 * KIB << doublings for doublings in range(12)]
ROUNDS = 50
BATCHES = (1, 64)
PROMPT, SHORT, LONG = 128, 16, 80
"""Tokens. The difference of two answers' times is steps alone, without the prompts."""
SHAPES = ((3.2, 3072, 8192, 28, 24), (1.2, 2048, 8192, 16, 32))
"""Billions, hidden size, inner size, layers, heads; 8 key-value heads each."""


def reduce(size: str) -> Any:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="xs") as meeting:
        ours, theirs = context.Pipe()
        ranks = [context.Process(target=_rank, args=(meeting, rank, int(size), theirs)) for rank in range(int(size))]
        for process in ranks:
            process.start()
        theirs.close()
        try:
            return ours.recv() if ours.poll(100) else {"reason": "no answer within 100 s"}
        except EOFError:
            return {"reason": "the ranks died"}
        finally:
            for process in ranks:
                process.join(10)
                if process.is_alive():
                    process.kill()
                process.join()


def _rank(meeting: str, rank: int, size: int, answer: Any) -> None:
    import torch

    from launcher.parallel.groups import join
    from launcher.parallel.ranks import Layout
    from launcher.parallel.symmetric import connect
    from launcher.parallel.symmetric_kernels import TorchKernels

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    groups = join(f"file://{meeting}/rendezvous", Layout(tp=size), rank, device, 60)
    by, group = groups.communicator("tp"), groups.by_kind["tp"].process_group
    assert group is not None
    by.all_reduce(torch.ones(8, device=device))
    begin = time.monotonic()
    kernels = TorchKernels(group, device)
    made, reason = connect(by, kernels, device)
    seconds = round(time.monotonic() - begin, 2)
    found = {"reason": reason} if made is None else _figures(made, by, kernels, device) | {"connect_s": seconds}
    if rank == 0:
        answer.send(found)
    if made is not None:
        made.close()
    groups.close()


def _figures(made: Any, by: Any, kernels: Any, device: Any) -> dict[str, Any]:
    import torch

    from launcher.parallel.accord import checksum, same_everywhere, slowest
    from launcher.parallel.ways import Timing, fastest, shown

    rows = []
    for size in SIZES:
        tensor = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        ways = ("nccl", "one_shot", "two_shot")
        times = slowest(by, [kernels.timed(lambda w=w, t=tensor: made.by_way(w, t), ROUNDS) for w in ways])
        drawn = torch.randn(size // 2, generator=torch.Generator().manual_seed(by.rank)).to(torch.bfloat16).to(device)
        sums = [checksum(made.by_way(way, drawn.clone())) for way in ways]
        by_way = {way: round(value, 1) for way, value in zip(ways, times, strict=True)}
        best = fastest(Timing(size, by_way))  # type: ignore[arg-type]
        rows.append({"bytes": size, **by_way, "fastest": best, "equal": same_everywhere(by, sums) is None})
    return {"sizes": rows, "table": shown(made.table)}


def make(directory: str) -> float:
    """Billions of parameters."""
    import torch

    free = min(torch.cuda.mem_get_info()[0] // 3, shutil.disk_usage(Path(directory).parent).free // 2)
    shape = next((s for s in SHAPES if s[0] * 2e9 < free), SHAPES[-1])
    _, hidden, inner, layers, heads = shape
    return save_llama(directory, hidden=hidden, inner=inner, layers=layers, heads=heads)


def rate(directory: str, tp: str, *settings: str) -> dict[str, Any]:
    from launcher import Engine

    config = dict(setting.split("=", 1) for setting in settings)
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "backend": "mp", "max_model_len": 1024}
    found: dict[str, Any] = {}
    with Engine(directory, tp=int(tp), worker_config=config, **options) as engine:
        for batch in BATCHES:
            prompts = [[(7 * i + 13 * j) % 250 + 5 for j in range(PROMPT)] for i in range(batch)]

            def seconds(tokens: int, prompts: list[list[int]] = prompts) -> float:
                begin = time.monotonic()
                engine.generate(prompts, max_tokens=tokens, temperature=0.0, ignore_eos=True)
                return time.monotonic() - begin

            seconds(SHORT)
            short, long = (min(seconds(tokens) for _ in range(2)) for tokens in (SHORT, LONG))
            step = (long - short) / (LONG - SHORT)
            found[str(batch)] = {"tokens_per_s": round(batch * LONG / long, 1), "step_ms": round(step * 1000, 2)}
    return found


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    program: Any = {f.__name__: f for f in (reduce, make, rate)}[sys.argv[1]]
    print(json.dumps(program(*sys.argv[2:])))
