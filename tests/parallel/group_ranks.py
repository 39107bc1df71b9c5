"""Real ranks for the tests of this room: `run_ranks` starts one process per rank and collects what each returns."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from launcher.parallel.groups import Groups, join
from launcher.parallel.ranks import Layout


def _entry(
    pipe: Connection, body: Callable[..., Any], layout: Layout, rank: int, url: str, args: tuple[Any, ...]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        groups = join(url, layout, rank, torch.device("cpu"), timeout=60)
        try:
            pipe.send((True, body(groups, *args)))
        finally:
            groups.close()
    except BaseException as error:
        pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def run_ranks(directory: Path, layout: Layout, body: Callable[..., Any], *args: Any, timeout: float = 90) -> list[Any]:
    """``body(groups, *args)`` on every rank; the answers by rank. An answer is ``(True, value)`` or ``(False, error)``,
    or None for a rank that died without a word."""
    context = multiprocessing.get_context("spawn")
    url = f"file://{directory}/rendezvous"
    ends, processes = [], []
    for rank in range(layout.world_size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_entry, args=(theirs, body, layout, rank, url, args))
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    answers: list[Any] = [None] * len(ends)
    try:
        for rank, end in enumerate(ends):
            if wait([end], timeout):
                try:
                    answers[rank] = end.recv()
                except EOFError:
                    answers[rank] = None
            else:
                raise AssertionError(f"rank {rank} did not answer within {timeout} s")
    finally:
        for process, end in zip(processes, ends, strict=True):
            end.close()
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
    return answers


def values(answers: list[Any]) -> list[Any]:
    for rank, answer in enumerate(answers):
        assert answer is not None, f"rank {rank} died"
        assert answer[0], f"rank {rank}: {answer[1]}"
    return [answer[1] for answer in answers]


__all__ = ["Groups", "run_ranks", "values"]
