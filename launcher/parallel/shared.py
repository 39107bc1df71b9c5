"""All-reduce through memory that the ranks of one machine share. For tensors in host memory.

gloo takes milliseconds for the few kilobytes that a decode step sums twice per layer; this takes tens of microseconds.
The segment is an anonymous memfd that rank 0 makes and the others open through /proc; nothing is left of it when the
last rank ends, however it ends.

Layout (n ranks, offsets in bytes)::

    0          cookie, u64                  rank 0 writes it before anybody attaches
    64 (1+r)   arrival of rank r, u64       rank r writes: "my part of round k lies in its place"; everybody reads
    4096       even rounds: part of rank 0 | part of rank 1 | … | part of rank n-1, PART bytes each
    … + n PART odd rounds: likewise         rank r writes its own part; everybody reads all parts

Round k: copy the own tensor into the own part, write arrival k, wait until every arrival is at least k, then sum all
parts in rank order, so that every rank computes the same bits. A rank that writes its part of round k + 2 has seen all
arrivals of round k + 1, and a rank arrives there only when it has done reading round k: two halves are enough.

The order "part, then arrival" needs a machine that keeps stores in order (x86-64); elsewhere `attach` declines.
A wait yields the processor at first (ranks may outnumber the cores), then sleeps in short steps; it ends with an error
when a peer is dead (pidfd) or the deadline has passed.
"""

from __future__ import annotations

import logging
import mmap
import os
import platform
import secrets
import select
import time
from contextlib import suppress

import torch

from launcher.clock import Deadline
from launcher.errors import ClosedError, DeadlineError, PeerDiedError
from launcher.parallel.accord import machine
from launcher.parallel.communicators import Communicator

log = logging.getLogger(__name__)

PART = 1 << 20
"""Bytes of one rank's part of a round; longer tensors take several rounds."""
_HEAD = 4096
_LINE = 64
_YIELDS = 2000
"""Looks at the arrivals, with a yield between, before sleeping: a few milliseconds on an idle machine."""
_NAP = 0.0002
_VIEWS_KEPT = 256


def segment_bytes(size: int) -> int:
    return _HEAD + 2 * size * PART


class SharedCommunicator(Communicator):
    """One end. Made by `attach`. Not thread-safe: collectives are made by one thread, in one order."""

    kind = "shared"

    def __init__(self, segment: mmap.mmap, rank: int, pids: list[int], pidfds: dict[int, int], timeout: float) -> None:
        self.rank = rank
        self.size = len(pids)
        self._segment = segment
        self._pids = pids
        self._pidfds = pidfds
        """Peer's rank → pidfd, owned; readable once that peer is dead."""
        self._timeout = timeout
        self._round = 0
        self._arrivals = memoryview(segment).cast("Q")
        self._bytes = torch.frombuffer(segment, dtype=torch.uint8)
        self._views: dict[tuple[int, torch.dtype, int], list[torch.Tensor]] = {}
        self._others = [(peer, _arrival(peer)) for peer in range(self.size) if peer != rank]
        self._deaths = select.poll()
        for pidfd in pidfds.values():
            self._deaths.register(pidfd, select.POLLIN)
        self._closed = False

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.reshape(-1)  # a view where the tensor is contiguous, else a copy
        for part in _parts(flat):
            parts = self._exchange(part)
            if part.dtype in _EXACT:
                torch.add(parts[0], parts[1], out=part)
                for other in parts[2:]:
                    part.add_(other)
            else:  # short floats: sum in float32, round once
                total = parts[0].float()
                for other in parts[1:]:
                    total.add_(other)
                part.copy_(total)
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        flat = tensor.reshape(-1)
        found = [torch.empty_like(flat) for _ in range(self.size)]
        for place, part in zip(zip(*(_parts(whole) for whole in found), strict=True), _parts(flat), strict=True):
            for into, other in zip(place, self._exchange(part), strict=True):
                into.copy_(other)
        return [whole.view(tensor.shape) for whole in found]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._views.clear()
        del self._bytes
        self._arrivals.release()
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()
        with suppress(BufferError):  # a view of a part is still alive: the mapping goes with it
            self._segment.close()

    def _exchange(self, part: torch.Tensor) -> list[torch.Tensor]:
        """One round: everybody's part, by rank; valid until the next round but one."""
        if self._closed:
            raise ClosedError("the shared-memory communicator is closed")
        self._round += 1
        parts = self._parts_of(self._round & 1, part.dtype, part.numel())
        parts[self.rank].copy_(part)
        self._arrivals[_arrival(self.rank)] = self._round
        for peer, where in self._others:
            if self._arrivals[where] < self._round:
                self._wait(peer, where)
        return parts

    def _parts_of(self, half: int, dtype: torch.dtype, numel: int) -> list[torch.Tensor]:
        key = (half, dtype, numel)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _VIEWS_KEPT:
                self._views.clear()
            starts = [_HEAD + (half * self.size + rank) * PART for rank in range(self.size)]
            length = numel * dtype.itemsize
            views = self._views[key] = [self._bytes[at : at + length].view(dtype) for at in starts]
        return views

    def _wait(self, peer: int, where: int) -> None:
        arrivals, wanted = self._arrivals, self._round
        for _ in range(_YIELDS):
            os.sched_yield()
            if arrivals[where] >= wanted:
                return
        if self.on_wait is not None:
            self.on_wait(True)
        deadline = Deadline.after(self._timeout)
        while arrivals[where] < wanted:
            if self._deaths.poll(0):
                self._raise_if_dead(where)
            if deadline.expired:
                raise DeadlineError(
                    f"rank {self.rank} waited {self._timeout:.0f} s in an all-reduce for rank {peer} of its group "
                    f"(pid {self._pids[peer]}), which is at round {arrivals[where]}, not {wanted}"
                )
            time.sleep(_NAP)
        if self.on_wait is not None:
            self.on_wait(False)

    def _raise_if_dead(self, where: int) -> None:
        """The dead one need not be the one waited for: that one waits for it in turn, and nobody would ever arrive."""
        if self._arrivals[where] >= self._round:
            return  # it arrived, then ended
        for peer, pidfd in self._pidfds.items():
            if select.select([pidfd], [], [], 0)[0] and self._arrivals[_arrival(peer)] < self._round:
                pid = self._pids[peer]
                raise PeerDiedError(
                    f"rank {peer} of the group (pid {pid}) died while rank {self.rank} waited for it in an all-reduce",
                    rank=peer,
                    pid=pid,
                )


_EXACT = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})


def _arrival(rank: int) -> int:
    """Index of a rank's arrival among the segment's u64."""
    return _LINE * (1 + rank) // 8


def _parts(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    most = PART // flat.dtype.itemsize
    return (flat,) if flat.numel() <= most else flat.split(most)


def attach(by: Communicator, timeout: float) -> tuple[SharedCommunicator | None, str]:
    """Collective over `by`: a communicator for every rank, or for none and the reason. `timeout`: seconds, per call."""
    pid = os.getpid()
    facts = _tell(by, [pid, machine(), int(platform.machine() in ("x86_64", "AMD64"))])
    if any(fact[1] != facts[0][1] for fact in facts):
        return None, "the ranks are not on one machine"
    if not all(fact[2] for fact in facts):
        return None, f"not made for {platform.machine()}"
    if by.size > (_HEAD - _LINE) // _LINE:
        return None, f"not made for {by.size} ranks"
    pids = [fact[0] for fact in facts]
    opened: _Opened | None = None
    problem = ""
    try:
        offer = _offer(by.size) if by.rank == 0 else None
    except OSError as error:
        offer, problem = None, str(error)
    fd, cookie = _tell(by, [offer[0], offer[1]] if offer else [-1, 0])[0]
    try:
        if fd >= 0:
            opened = _open(by.rank, pids, fd, cookie, segment_bytes(by.size))
    except OSError as error:
        problem = str(error)
    finally:
        everybody = all(fact[0] for fact in _tell(by, [int(opened is not None)]))
        if offer:
            os.close(offer[0])
    if opened is None:
        return None, f"rank {by.rank} cannot map the segment: {problem or 'rank 0 has none'}"
    if not everybody:
        opened.close()
        return None, "a rank cannot map the segment"
    return SharedCommunicator(opened.segment, by.rank, pids, opened.pidfds, timeout), ""


class _Opened:
    def __init__(self, segment: mmap.mmap, pidfds: dict[int, int]) -> None:
        self.segment = segment
        self.pidfds = pidfds

    def close(self) -> None:
        self.segment.close()
        for pidfd in self.pidfds.values():
            os.close(pidfd)


def _tell(by: Communicator, values: list[int]) -> list[list[int]]:
    return [found.tolist() for found in by.all_gather(torch.tensor(values, dtype=torch.int64))]


def _offer(size: int) -> tuple[int, int]:
    """Rank 0: a new segment's descriptor and its cookie."""
    fd = os.memfd_create("xserve-allreduce", os.MFD_CLOEXEC)
    cookie = secrets.randbits(62)
    os.ftruncate(fd, segment_bytes(size))
    os.pwrite(fd, cookie.to_bytes(8, "little"), 0)
    return fd, cookie


def _open(rank: int, pids: list[int], fd: int, cookie: int, length: int) -> _Opened:
    """Map rank 0's segment and watch all peers. Raises OSError."""
    own = os.open(f"/proc/{pids[0]}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        # Checked before mapping: a stranger's file under that number is neither written nor read past its end.
        if os.fstat(own).st_size != length or os.pread(own, 8, 0) != cookie.to_bytes(8, "little"):
            raise OSError(f"descriptor {fd} of pid {pids[0]} is not the segment")
        segment = mmap.mmap(own, length)
    finally:
        os.close(own)
    opened = _Opened(segment, {})
    try:
        for peer, pid in enumerate(pids):
            if peer != rank:
                opened.pidfds[peer] = os.pidfd_open(pid)
    except OSError:
        opened.close()
        raise
    return opened
