"""All-reduce and gather within one group, by the fastest means at hand.

======================  =========================================================================================
`SoleCommunicator`      a group of one: nothing to do
`TorchCommunicator`     the process group itself (nccl, gloo): works everywhere
`SharedCommunicator`    host memory shared by ranks of one machine (see `launcher.parallel.shared`): tens of
                        microseconds where gloo takes milliseconds
`SymmetricCommunicator` memory that cards show to each other, when asked for (see `launcher.parallel.symmetric`)
`HostCommunicator`      tensors on a device, copied to host memory for one of the two above: for ranks that share a GPU
======================  =========================================================================================

`launcher.parallel.groups` picks, collectively: either all ranks of a group get shared memory or none.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from launcher.errors import PeerDiedError


class Communicator(ABC):
    """Every method is collective: all ranks of the group call it, in the same order, with the same shape and dtype."""

    rank: int
    size: int
    kind: str
    on_wait: Callable[[bool], None] | None = None
    """Told True before a wait for the others and False after it."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; bit-equal on all of them. Returns `tensor`."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everyone's tensor, by rank."""

    def close(self) -> None:  # noqa: B027  (not every kind holds something)
        """Give back what this end holds; never waits for the others."""


class SoleCommunicator(Communicator):
    rank = 0
    size = 1
    kind = "sole"

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]


class TorchCommunicator(Communicator):
    """Through torch's process group. A peer's death is raised as PeerDiedError."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.group: dist.ProcessGroup | None = group
        self.rank = rank
        self.size = size
        self.kind = "torch"

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        whole = tensor.contiguous()
        with self._waiting():
            dist.all_reduce(whole, group=self.group)
        if whole is not tensor:
            tensor.copy_(whole)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        tensor = tensor.contiguous()
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._waiting():
            dist.all_gather(found, tensor, group=self.group)
        return found

    def close(self) -> None:
        self.group = None

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        if self.on_wait is not None:
            self.on_wait(True)
        try:
            yield
        except RuntimeError as error:
            raise self._translated(error) from error
        if self.on_wait is not None:
            self.on_wait(False)

    def _translated(self, error: RuntimeError) -> Exception:
        text = str(error)
        if any(sign in text for sign in _PEER_LOST):
            return PeerDiedError(f"rank {self.rank} of {self.size} lost a peer in a collective: {text.splitlines()[0]}")
        return error


class HostCommunicator(Communicator):
    """Tensors that are on a device, by way of host memory and `inner`, a communicator for tensors there."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self.kind = f"host, {inner.kind}"
        self._stage = torch.empty(0, dtype=torch.uint8)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor.copy_(self._ours().all_reduce(self._staged(tensor)), non_blocking=True)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [found.to(tensor.device) for found in self._ours().all_gather(self._staged(tensor))]

    def close(self) -> None:
        self._inner.close()

    def _ours(self) -> Communicator:
        self._inner.on_wait = self.on_wait
        return self._inner

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, finished. The last copy out of the same place comes before it on the stream."""
        size = tensor.numel() * tensor.dtype.itemsize
        if self._stage.numel() < size:
            self._stage = torch.empty(size, dtype=torch.uint8, pin_memory=tensor.is_cuda)
        return self._stage[:size].view(tensor.dtype).view(tensor.shape).copy_(tensor)


_PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "remote process exited",  # NCCL
    "communicator was aborted",  # NCCL, by its own watchdog
)
"""How gloo's and NCCL's messages tell that the other end is gone."""
