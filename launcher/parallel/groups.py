"""Join the world and cut it into groups; the `Groups` object is passed to whoever communicates.

torch keeps one default process group per process: that is the only state here that is not in the object.

===========  ==========================================================================================
device       backend of every group
===========  ==========================================================================================
cpu          gloo
cuda         nccl for tensors on the GPU, gloo for tensors in host memory, in one group
cuda shared  gloo: ranks share a GPU, which nccl refuses; tensors take the way through host memory
===========  ==========================================================================================

The device is not bound to the world (``device_id``): torch would then split NCCL's communicator for each group of one
that a mesh makes (`launcher.models.load`). NCCL's own is made by the first collective, in `init_device`.

With `all_reduce` ``symmetric`` the TP group's sums on GPUs go through memory that the cards show to each other, where
that is right and faster (`launcher.parallel.symmetric`).

A kind whose groups have one member has no process group; one whose group is the whole world uses the default group.
gloo listens on an interface of its own choice unless the environment names one: the plan sets GLOO_SOCKET_IFNAME.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, get_args

import torch
import torch.distributed as dist

from launcher.errors import UsageError, XserveError
from launcher.parallel.communicators import (
    Communicator,
    HostCommunicator,
    SoleCommunicator,
    TorchCommunicator,
)
from launcher.parallel.ranks import GROUP_KINDS, GroupKind, Layout
from launcher.parallel.rendezvous import open_store
from launcher.parallel.shared import attach
from launcher.parallel.symmetric import connect
from launcher.parallel.symmetric_kernels import TorchKernels

log = logging.getLogger(__name__)

AllReduce = Literal["nccl", "symmetric"]

JOIN_TIMEOUT = 600.0
"""Seconds that a rank waits for the others, at the rendezvous and in a collective."""


@dataclass(frozen=True)
class Group:
    """One group of one kind: `ranks` of the world, ascending; `index` is this rank's place among them."""

    kind: GroupKind
    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None
    """None for a group of one."""

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass
class Groups:
    """Everything that this rank communicates through. `close` it, on every rank, in any order."""

    layout: Layout
    rank: int
    device: torch.device
    by_kind: dict[GroupKind, Group]
    timeout: float
    via_host: bool = False
    all_reduce: AllReduce = "nccl"
    _communicators: dict[GroupKind, Communicator] = field(default_factory=dict)

    def communicator(self, kind: GroupKind) -> Communicator:
        """The fastest way to reduce and gather within this rank's group of `kind`.

        The first call for a kind is collective: every rank of the group makes it at the same point.
        """
        if kind not in self._communicators:
            group = self.by_kind[kind]
            made = _connect(group, self.device, self.timeout, self.via_host)
            if kind == "tp" and self.all_reduce == "symmetric":
                made = _through_cards(group, made, self.device, self.via_host)
            self._communicators[kind] = made
        return self._communicators[kind]

    def close(self) -> None:
        """Leave. Waits for nobody, except that NCCL waits for the sums that are under way: where a peer is dead, the
        parent's kill ends that."""
        for communicator in self._communicators.values():
            communicator.close()
        self._communicators.clear()
        self.by_kind.clear()
        if dist.is_initialized():
            dist.destroy_process_group()


def all_reduce_of(config: Mapping[str, str]) -> AllReduce:
    """``all_reduce`` among the settings of a worker. Raises UsageError for a value that is none."""
    value = config.get("all_reduce", "nccl")
    found = next((known for known in get_args(AllReduce) if known == value), None)
    if found is None:
        raise UsageError(f"--worker-config all_reduce={value}: it is nccl (the default) or symmetric")
    return found


def join(
    url: str,
    layout: Layout,
    rank: int,
    device: torch.device,
    timeout: float = JOIN_TIMEOUT,
    *,
    via_host: bool = False,
    all_reduce: AllReduce = "nccl",
) -> Groups:
    """Meet the other ranks at `url` and make the groups. Collective over the world; `timeout` in seconds.

    `via_host`: tensors on a device are reduced in host memory; all ranks say the same. `all_reduce`: likewise.
    Raises UsageError, HostError (the URL), XserveError naming rank and size when the others do not come.
    A world of one rank needs no URL and touches torch.distributed not at all.
    """
    size = layout.world_size
    if size > 1:
        if not url:
            raise UsageError(f"rank {rank} of {size} was given no rendezvous")
        _join_world(url, rank, size, torch.device("cpu") if via_host else device, timeout)
    by_kind = {kind: _own_group(layout, kind, rank, timeout) for kind in GROUP_KINDS}
    return Groups(layout, rank, device, by_kind, timeout, via_host, all_reduce)


def _join_world(url: str, rank: int, size: int, device: torch.device, timeout: float) -> None:
    cuda = device.type == "cuda"
    store = open_store(url, rank=rank, world_size=size, timeout=timeout)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
    except (RuntimeError, ValueError) as error:
        raise XserveError(f"rank {rank} of {size} could not join the others at {url}: {error}") from error


def _own_group(layout: Layout, kind: GroupKind, rank: int, timeout: float) -> Group:
    """Make all groups of a kind (torch wants every rank to make every group, in one order); keep the own one."""
    groups = layout.groups(kind)
    own = layout.group_of(kind, rank)
    process_group: dist.ProcessGroup | None = None
    if len(own) == layout.world_size > 1:
        process_group = dist.group.WORLD
    elif len(own) > 1:
        made = [dist.new_group(ranks, timeout=timedelta(seconds=timeout)) for ranks in groups]
        process_group = made[groups.index(own)]
    return Group(kind, tuple(own), own.index(rank), process_group)


def _connect(group: Group, device: torch.device, timeout: float, via_host: bool) -> Communicator:
    """The group's communicator. Collective: all ranks get the same class."""
    if group.process_group is None:
        return SoleCommunicator()
    if via_host and device.type != "cpu":
        return HostCommunicator(_connect(group, torch.device("cpu"), timeout, False))
    by_torch = TorchCommunicator(group.process_group, group.index, group.size)
    if device.type != "cpu":
        return by_torch
    shared, why_not = attach(by_torch, timeout)
    if shared is not None:
        return shared
    if group.index == 0:
        log.warning("the %s group's all-reduce goes through gloo, which is slow: %s", group.kind, why_not)
    return by_torch


def _through_cards(group: Group, by: Communicator, device: torch.device, via_host: bool) -> Communicator:
    """`by`, or one through the cards' memory on top of it. Collective: all ranks get the same class."""
    if group.process_group is None:
        return by
    if via_host:
        reason = "ranks share a card"
    elif device.type != "cuda":
        reason = "the ranks are not on GPUs"
    else:
        made, reason = connect(by, TorchKernels(group.process_group, device), device)
        if made is not None:
            return made
    if group.index == 0:
        log.warning("all_reduce=symmetric is not to be had, sums go by %s: %s", _library(by), reason)
    return by


def _library(by: Communicator) -> str:
    return "NCCL" if isinstance(by, TorchCommunicator) else f"{by.kind} memory"
