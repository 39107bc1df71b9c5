"""All-reduce through memory that the cards of one machine show to each other (torch's symmetric memory).

`connect` is collective and gives all ranks of a group a `SymmetricCommunicator`, or all of them the process group's own
with one reason. It trusts nothing: what the ranks know of themselves is compared first (`launcher.parallel.accord`),
then each way is tried with random tensors around every border, against NCCL's sums and bit for bit among the ranks,
then timed; a mismatch or an exception on any rank is everybody's. Only a kernel that never ends cannot be survived: it
holds the stream that NCCL would need, so that the start fails with words.

The symmetric buffer is one for all calls: each kernel ends with a meeting of the ranks, after which nobody reads or
writes another's memory, so that the next call may fill it. A tensor is copied into it, and the sum out of it (the
one-shot kernel writes the sum to where the tensor was).

Everything on the device is in `Kernels`: `launcher.parallel.symmetric_kernels` is torch's, tests have their own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from launcher.errors import DeadlineError, XserveError
from launcher.parallel.accord import Facts, agree, checksum, meet, same_everywhere, slowest, why_not
from launcher.parallel.communicators import Communicator
from launcher.parallel.ways import BORDERS, DEFAULT, OWN_WAYS, Table, Timing, Way, choose, shown, table_of, trial_sizes

log = logging.getLogger(__name__)

DTYPES = frozenset({torch.float32, torch.bfloat16})
"""What the kernels add; others go by NCCL."""
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.004}
"""Of the largest sum: the ways add in different orders, and round each time."""
_TRY_LIMIT = 30.0
"""Seconds that one kernel of the trial may take."""
_TIMING_LIMIT = 0.8
"""Seconds, by the slowest rank's clock, after which timing ends and the fixed table stays."""
_ROUNDS = 12

_NCCL: Way = "nccl"
_ALL_WAYS: tuple[Way, ...] = (_NCCL, *OWN_WAYS)


class Kernels(Protocol):
    """The device's part, for one rank. The ways are collective, on contiguous tensors of `DTYPES`, and only queue."""

    def facts(self) -> Facts: ...

    def reach(self, everybody: list[Facts]) -> str:
        """Why this rank cannot reach the others' cards; empty: it can."""

    def open(self, capacity: int) -> None:
        """Collective: make the buffer and meet. Raises anything."""

    def one_shot(self, tensor: torch.Tensor) -> None:
        """The sum over the ranks, in place."""

    def two_shot(self, tensor: torch.Tensor) -> None:
        """Likewise."""

    def finish(self, timeout: float) -> None:
        """Wait for all that is queued. Raises DeadlineError after `timeout` seconds."""

    def timed(self, call: Callable[[], object], rounds: int) -> float:
        """Median microseconds of `rounds` calls, each measured on the device."""

    def close(self) -> None: ...


class SymmetricCommunicator(Communicator):
    """Made by `connect`. The way depends on the tensor's size and type alone, which are the same on all ranks."""

    kind = "symmetric"

    def __init__(self, by: Communicator, kernels: Kernels, table: Table) -> None:
        self.rank = by.rank
        self.size = by.size
        self.table = table
        self._by = by
        self._kernels = kernels
        self._own: dict[Way, Callable[[torch.Tensor], None]] = {
            "one_shot": kernels.one_shot,
            "two_shot": kernels.two_shot,
        }

    def way(self, tensor: torch.Tensor) -> Way:
        if tensor.dtype not in DTYPES:
            return _NCCL
        return choose(tensor.numel() * tensor.dtype.itemsize, self.table)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.by_way(self.way(tensor), tensor)

    def by_way(self, way: Way, tensor: torch.Tensor) -> torch.Tensor:
        """As `all_reduce`, whatever the table says: for trials and timings."""
        if way == _NCCL:
            return self._inner().all_reduce(tensor)
        # The kernels move 16 bytes at a time from where the tensor begins. That may differ between ranks: it must not
        # decide the way.
        fits = tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
        whole = tensor if fits else tensor.clone(memory_format=torch.contiguous_format)
        self._own[way](whole)
        if whole is not tensor:
            tensor.copy_(whole)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._inner().all_gather(tensor)

    def close(self) -> None:
        self._kernels.close()
        self._by.close()

    def _inner(self) -> Communicator:
        self._by.on_wait = self.on_wait
        return self._by


def connect(by: Communicator, kernels: Kernels, device: torch.device) -> tuple[SymmetricCommunicator | None, str]:
    """Collective over `by`: a communicator for every rank, or for none and the reason, the same for all.

    Raises XserveError where a kernel hangs.
    """
    everybody = meet(by, _safe(kernels.facts))
    reason = why_not(everybody)
    if not reason:
        reason = agree(by, _problem(lambda: kernels.reach(everybody)))
    if not reason:
        reason = agree(by, _problem(lambda: kernels.open(BORDERS[-1])))
    if reason:
        _put_away(kernels)
        return None, reason
    made = SymmetricCommunicator(by, kernels, DEFAULT.get(by.size, ()))
    reason = _tried(made, by, kernels, device)
    if reason:
        _put_away(kernels)
        return None, reason
    made.table = _measured(made, by, kernels, device) or made.table
    if by.rank == 0:
        log.info("all-reduce through symmetric memory: %s", shown(made.table))
    return made, ""


def _tried(made: SymmetricCommunicator, by: Communicator, kernels: Kernels, device: torch.device) -> str:
    """Why the ways are not to be trusted here, the same for all; empty: their sums are right and bit-equal."""
    sums: list[int] = []
    cases = _cases()
    for dtype, size, way in cases:
        trial = _Trial(made, by, kernels, dtype, size, way, device)
        # Nobody queues the next one while another has failed at this one: its kernel would wait for ever.
        if reason := agree(by, _problem(partial(trial.run, sums))):
            return reason
    at = same_everywhere(by, sums)
    if at is None:
        return ""
    dtype, size, way = cases[at]
    return f"the ranks' sums of {size} bytes of {_name(dtype)} by {way} differ"


def _cases() -> list[tuple[torch.dtype, int, Way | None]]:
    """Each way around every border; and what the communicator itself does with types that are not for the kernels."""
    each: list[tuple[torch.dtype, int, Way | None]] = [
        (dtype, size, way) for size in trial_sizes() for dtype in (torch.bfloat16, torch.float32) for way in OWN_WAYS
    ]
    rest: list[tuple[torch.dtype, int, Way | None]] = [
        (dtype, size, None) for dtype in _TOLERANCE for size in (20, 64 << 10, BORDERS[-1] + 16)
    ]
    return each + rest


class _Trial:
    """One all-reduce of random numbers, another on each rank, against the sums in float32 by NCCL."""

    def __init__(
        self,
        made: SymmetricCommunicator,
        by: Communicator,
        kernels: Kernels,
        dtype: torch.dtype,
        size: int,
        way: Way | None,
        device: torch.device,
    ) -> None:
        self.made, self.by, self.kernels, self.dtype, self.size, self.way = made, by, kernels, dtype, size, way
        generator = torch.Generator().manual_seed(size * 31 + by.rank)
        length = size // dtype.itemsize
        # Drawn short and repeated: numbers are slow to draw on the host.
        drawn = torch.randn(min(length, 65537), generator=generator)
        self.tensor = drawn.repeat(-(-length // len(drawn)))[:length].to(dtype).to(device)

    def run(self, sums: list[int]) -> str:
        """Adds the sum's bits to `sums`."""
        expected = self.by.all_reduce(self.tensor.to(torch.float32, copy=True))
        found = self.tensor.clone()
        if self.way is None:
            self.made.all_reduce(found)
        else:
            self.made.by_way(self.way, found)
        self.kernels.finish(_TRY_LIMIT)
        sums.append(checksum(found))
        wrong = float((found.float() - expected).abs().max() / expected.abs().max().clamp(min=1.0))
        if wrong <= _TOLERANCE[self.dtype]:
            return ""
        return f"{self.size} bytes of {_name(self.dtype)} by {self.way or 'its choice'} are wrong by {wrong:.2g}"


def _measured(made: SymmetricCommunicator, by: Communicator, kernels: Kernels, device: torch.device) -> Table | None:
    """The table by this machine's own times; None: timing took too long."""
    timings: list[Timing] = []
    spent = 0.0
    for size in BORDERS:
        tensor = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        begin = time.perf_counter()
        mine = [kernels.timed(partial(made.by_way, way, tensor), _ROUNDS) for way in _ALL_WAYS]
        # Everybody's numbers are the slowest rank's: all come to the same table, and stop at the same size.
        *times, seconds = slowest(by, [*mine, time.perf_counter() - begin])
        timings.append(Timing(size, dict(zip(_ALL_WAYS, times, strict=True))))
        spent += seconds
        if spent > _TIMING_LIMIT:
            return None
    return table_of(timings)


def _safe(facts: Callable[[], Facts]) -> Facts:
    try:
        return facts()
    except Exception as error:  # whatever it is, it is a reason not to
        return Facts(machine=0, card="", torch=str(torch.__version__), problem=_words(error))


def _problem(call: Callable[[], str | None]) -> str:
    """What stands against it, an exception included."""
    try:
        return call() or ""
    except DeadlineError as error:
        raise XserveError(f"{error}: start without --worker-config all_reduce=symmetric") from error
    except Exception as error:  # any failure has one answer: NCCL
        return _words(error)


def _words(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _put_away(kernels: Kernels) -> None:
    try:
        kernels.close()
    except Exception as error:
        log.debug("closing the symmetric buffer: %s", error)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
