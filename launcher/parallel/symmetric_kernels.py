"""torch's symmetric-memory kernels on this rank's GPU: the `Kernels` of `launcher.parallel.symmetric`.

NVLink multicast stays off: its state belongs to all cards of the machine, and processes here must bear kill -9 at any
moment. torch makes multicast objects at the rendezvous unless TORCH_SYMM_MEM_DISABLE_MULTICAST=1, which the plan sets
(`launcher.plan.environment`); without it nothing is tried.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from launcher import envs
from launcher.clock import Deadline
from launcher.errors import DeadlineError
from launcher.parallel.accord import Facts, machine

_OPEN_LIMIT = 30.0
"""Seconds that a rank waits for the others when the buffers are shown to each other; a failed one never comes."""
_NAP = 0.0005


class TorchKernels:
    """For one process group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._name = group.group_name
        self._device = device
        self._buffer: torch.Tensor | None = None
        self._handle: Any = None
        """What keeps the others' memory mapped here."""
        self._views: dict[torch.dtype, torch.Tensor] = {}

    # --- before anything is tried --------------------------------------------------------------------------------

    def facts(self) -> Facts:
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        return Facts(machine=machine(), card=uuid, torch=str(torch.__version__), problem=self._problem(uuid))

    def _problem(self, uuid: str) -> str:
        if torch.version.cuda is None:
            return "this torch is not made for CUDA"
        if uuid.startswith("MIG-") or "MIG" in torch.cuda.get_device_name(self._device):
            return "it has a MIG slice, which reaches no other card"
        if not envs.multicast_is_off():
            return "TORCH_SYMM_MEM_DISABLE_MULTICAST is not 1 in its environment"
        try:
            import torch.distributed._symmetric_memory as symmetric
        except ImportError as error:
            return f"this torch has no symmetric memory: {error}"
        lacking = [name for name in ("empty", "rendezvous") if not hasattr(symmetric, name)]
        lacking += [name for name in ("one_shot_all_reduce_out", "two_shot_all_reduce_") if not _has(name)]
        return f"this torch has no {', '.join(lacking)}" if lacking else ""

    def reach(self, everybody: list[Facts]) -> str:
        indices = {
            str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())
        }
        own = self._device.index
        for rank, fact in enumerate(everybody):
            index = indices.get(fact["card"])
            if index is None:
                return f"the card of rank {rank} is not among those that it sees (CUDA_VISIBLE_DEVICES)"
            if index != own and not torch.cuda.can_device_access_peer(own, index):
                return f"its card has no peer access to that of rank {rank}"
        return ""

    # --- the buffer ----------------------------------------------------------------------------------------------

    def open(self, capacity: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        with torch.inference_mode(False), _patience(self._group, _OPEN_LIMIT):
            self._buffer = symmetric.empty(capacity, dtype=torch.uint8, device=self._device)
            self._handle = symmetric.rendezvous(self._buffer, self._name)
        if self._handle is None:
            raise RuntimeError("the ranks' buffers did not meet")

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The beginning of the buffer, as long as `tensor` is, which lies in it then."""
        assert self._buffer is not None
        view = self._views.get(tensor.dtype)
        if view is None:
            view = self._views[tensor.dtype] = self._buffer.view(tensor.dtype)
        place = view[: tensor.numel()]
        place.copy_(tensor.view(-1))
        return place

    def one_shot(self, tensor: torch.Tensor) -> None:
        torch.ops.symm_mem.one_shot_all_reduce_out(self._place(tensor), "sum", self._name, tensor.view(-1))

    def two_shot(self, tensor: torch.Tensor) -> None:
        place = self._place(tensor)
        torch.ops.symm_mem.two_shot_all_reduce_(place, "sum", self._name)
        tensor.view(-1).copy_(place)

    def close(self) -> None:
        self._views.clear()
        self._handle = None
        self._buffer = None

    # --- waiting and timing --------------------------------------------------------------------------------------

    def finish(self, timeout: float) -> None:
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._device))
        deadline = Deadline.after(timeout)
        while not done.query():
            if deadline.expired:
                raise DeadlineError(f"an all-reduce through symmetric memory did not end within {timeout:g} s")
            time.sleep(_NAP)

    def timed(self, call: Callable[[], object], rounds: int) -> float:
        for _ in range(3):
            call()
        pairs = []
        for _ in range(rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
        self.finish(_OPEN_LIMIT)
        return statistics.median(begin.elapsed_time(end) * 1000 for begin, end in pairs)


def _has(operator: str) -> bool:
    return hasattr(torch.ops.symm_mem, operator)


@contextlib.contextmanager
def _patience(group: dist.ProcessGroup, seconds: float) -> Iterator[None]:
    """The group's store, where the buffers are exchanged, waits at most so long."""
    try:
        store: Any = dist.distributed_c10d._get_process_group_store(group)
        before = store.timeout
        store.set_timeout(timedelta(seconds=seconds))
    except (AttributeError, RuntimeError):  # another torch: it waits as long as everything else
        yield
        return
    try:
        yield
    finally:
        store.set_timeout(before)
