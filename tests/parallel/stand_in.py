"""The device's part of a symmetric all-reduce, by gloo on the CPU, with faults on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from launcher.errors import DeadlineError
from launcher.parallel.accord import Facts, machine
from launcher.parallel.communicators import Communicator


class StandIn:
    """`launcher.parallel.symmetric.Kernels`. `fault` is this rank's; empty: it does what it must."""

    def __init__(self, by: Communicator, fault: str = "", times: dict[int, tuple[float, float, float]] | None = None):
        self._by = by
        self._fault = fault
        self._times = times or {}
        self._queue: list[float] = []
        self.calls: list[tuple[str, int]] = []
        self.opened = 0
        self.closed = 0

    def facts(self) -> Facts:
        if self._fault == "no facts":
            raise ImportError("no such module")
        card = "GPU-0" if self._fault == "same card" else f"GPU-{self._by.rank}"
        here = machine() + (self._fault == "other machine")
        version = "2.6.0" if self._fault == "old torch" else "2.11.0"
        return Facts(machine=here, card=card, torch=version, problem="it has a MIG slice" * (self._fault == "mig"))

    def reach(self, everybody: list[Facts]) -> str:
        assert [fact["card"] for fact in everybody] == [f"GPU-{rank}" for rank in range(self._by.size)]
        return "its card has no peer access to that of rank 0" if self._fault == "no peer" else ""

    def open(self, capacity: int) -> None:
        self.opened = capacity
        if self._fault == "open":
            raise RuntimeError("CUDA driver error: invalid argument\nmore")

    def one_shot(self, tensor: torch.Tensor) -> None:
        self._sum("one_shot", tensor)

    def two_shot(self, tensor: torch.Tensor) -> None:
        self._sum("two_shot", tensor)

    def _sum(self, way: str, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0
        size = tensor.numel() * tensor.dtype.itemsize
        assert size % 16 == 0
        assert size <= self.opened
        self.calls.append((way, size))
        self._by.all_reduce(tensor)
        if self._fault == "raise" and size == 65536:
            raise RuntimeError("one_shot_all_reduce: no")
        if self._fault == "wrong" and way == "two_shot" and size > 65536:
            tensor[-1] += 9
        if self._fault == "last bit" and size == 262144:
            tensor.view(torch.uint8)[0] ^= 1

    def finish(self, timeout: float) -> None:
        if self._fault == "hang" and self.calls:
            raise DeadlineError("an all-reduce through symmetric memory did not end within 30 s")

    def timed(self, call: Callable[[], object], rounds: int) -> float:
        begin = len(self.calls)
        call()
        way, size = self.calls[-1] if len(self.calls) > begin else ("nccl", 0)
        if way == "nccl":  # it does not come by here: its size is the one that the others are timed with next
            size = [8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20][len(self._queue)]
            self._queue.append(size)
        if self._fault == "slow":
            time.sleep(0.5)
        return self._times.get(size, (1.0, 2.0, 2.0))[("nccl", "one_shot", "two_shot").index(way)]

    def close(self) -> None:
        self.closed += 1
        if self._fault == "close":
            raise RuntimeError("no")
