"""What the ranks of a group must be of one mind about, told through their communicator in host memory.

Each function is collective, and gives every rank the same answer: nobody goes on alone.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import torch

from launcher.parallel.communicators import Communicator
from launcher.parallel.ways import SIZES

_TEXT = 512
"""Bytes that a rank may say."""


class Facts(TypedDict):
    """What one rank knows of itself before anything is tried."""

    machine: int
    card: str
    """UUID of its GPU."""
    torch: str
    problem: str
    """Why it cannot; empty: nothing stands against it."""


def agree(by: Communicator, problem: str) -> str:
    """``rank 2: its problem`` of the first rank that has one; empty: nobody has."""
    return next((f"rank {rank}: {said}" for rank, said in enumerate(tell(by, problem)) if said), "")


def tell(by: Communicator, text: str) -> list[str]:
    """Everybody's text, by rank; cut at its end where it is too long."""
    mine = text.encode()[:_TEXT].ljust(_TEXT, b"\0")
    found = by.all_gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    return [bytes(t.tolist()).rstrip(b"\0").decode(errors="ignore") for t in found]


def meet(by: Communicator, facts: Facts) -> list[Facts]:
    """Everybody's facts, by rank."""
    problem = facts["problem"]
    while len(text := json.dumps({**facts, "problem": problem})) > _TEXT:
        problem = problem[: len(problem) // 2]
    return [json.loads(told) for told in tell(by, text)]


def why_not(facts: Sequence[Facts]) -> str:
    """The first thing that stands against a symmetric all-reduce among these ranks; empty: nothing does."""
    if len(facts) not in SIZES:
        return f"not made for {len(facts)} ranks, only for {', '.join(map(str, SIZES[:-1]))} and {SIZES[-1]}"
    for rank, fact in enumerate(facts):
        if fact["problem"]:
            return f"rank {rank}: {fact['problem']}"
    if any(fact["machine"] != facts[0]["machine"] for fact in facts):
        return "the ranks are not on one machine"
    owners: dict[str, int] = {}
    for rank, fact in enumerate(facts):
        if fact["card"] in owners:
            return f"ranks {owners[fact['card']]} and {rank} share one card"
        owners[fact["card"]] = rank
    if versions := sorted({fact["torch"] for fact in facts} - {facts[0]["torch"]}):
        return f"the ranks have different versions of torch: {facts[0]['torch']} and {versions[0]}"
    return ""


def same_everywhere(by: Communicator, sums: Sequence[int]) -> int | None:
    """Where the ranks' lists, of one length, differ first; None: nowhere."""
    found = by.all_gather(torch.tensor(sums, dtype=torch.int64))
    return next((at for at in range(len(sums)) if any(t[at] != found[0][at] for t in found)), None)


def slowest(by: Communicator, times: Sequence[float]) -> list[float]:
    """For each place the largest among the ranks: a collective takes as long as its last rank."""
    found = by.all_gather(torch.tensor(times, dtype=torch.float64))
    return torch.stack(found).amax(0).tolist()


def checksum(tensor: torch.Tensor) -> int:
    """Of its bits; equal for equal ones, and other for a bit changed or two places swapped."""
    width = {2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
    bits = tensor.reshape(-1).view(width).to(torch.int64)
    places = torch.arange(bits.numel(), device=bits.device).remainder_(8191).add_(1)
    return int((bits * places).sum())


def machine() -> int:
    """The same number on ranks that see each other's /proc: one boot of one machine, one pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return zlib.crc32(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode())
