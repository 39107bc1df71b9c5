"""A symmetric all-reduce among real ranks, with a stand-in for the kernels: all ranks get the same, whoever fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.parallel import accord, symmetric
from launcher.parallel.accord import Facts, checksum, why_not
from launcher.parallel.communicators import TorchCommunicator
from launcher.parallel.groups import Groups
from launcher.parallel.ranks import Layout
from launcher.parallel.symmetric import connect
from launcher.parallel.ways import DEFAULT, trial_sizes
from tests.parallel.group_ranks import run_ranks, values
from tests.parallel.stand_in import StandIn
from tests.parallel.test_ways import FOUR_CARDS

pytestmark = pytest.mark.keeps_descriptors
CPU = torch.device("cpu")


def by_gloo(groups: Groups) -> TorchCommunicator:
    group = groups.by_kind["tp"]
    assert group.process_group is not None
    return TorchCommunicator(group.process_group, group.index, group.size)


def connected(groups: Groups, faults: list[tuple[str, int]]) -> list[Any]:
    """For each fault, on the rank it names: what `connect` gave here."""
    sizes = [size for size in trial_sizes() if size <= (256 << 10) + 16]  # `summed` has them all
    symmetric.trial_sizes = lambda: sizes  # type: ignore[attr-defined]
    by, found = by_gloo(groups), []
    for fault, rank in faults:
        kernels = StandIn(by, fault if rank in (groups.rank, -1) else "", FOUR_CARDS)
        made, reason = connect(by, kernels, CPU)
        assert (made is None) == (kernels.closed > 0) == bool(reason)
        found.append(reason if made is None else list(made.table))
    return found


FAULTS = {
    ("no facts", 1): "rank 1: ImportError: no such module",
    ("mig", 1): "rank 1: it has a MIG slice",
    ("other machine", 1): "the ranks are not on one machine",
    ("same card", 1): "ranks 0 and 1 share one card",
    ("old torch", 1): "the ranks have different versions of torch: 2.11.0 and 2.6.0",
    ("no peer", 1): "rank 1: its card has no peer access to that of rank 0",
    ("open", 0): "rank 0: RuntimeError: CUDA driver error: invalid argument",
    ("open", -1): "rank 0: RuntimeError: CUDA driver error: invalid argument",
    ("raise", 1): "rank 1: RuntimeError: one_shot_all_reduce: no",
    ("wrong", 1): "rank 1: 65552 bytes of bfloat16 by two_shot are wrong by",
    ("last bit", 1): "the ranks' sums of 262144 bytes of bfloat16 by one_shot differ",
}


def test_whatever_fails_on_one_rank_all_go_by_nccl(tmp_path: Path) -> None:
    each = values(run_ranks(tmp_path, Layout(tp=2), connected, [*FAULTS, ("", 0), ("slow", 1)]))
    assert each[0] == each[1]
    for reason, expected in zip(each[0], FAULTS.values(), strict=False):
        assert reason.startswith(expected)
    measured, fixed = each[0][len(FAULTS) :]
    assert measured == [(8 << 10, "two_shot"), (64 << 10, "one_shot"), (4 << 20, "two_shot")]
    assert fixed == list(DEFAULT[2])  # a rank that takes too long to time


def hung(groups: Groups) -> None:
    by = by_gloo(groups)
    connect(by, StandIn(by, "hang" * groups.rank), CPU)


def test_a_kernel_that_never_ends_ends_the_start(tmp_path: Path) -> None:
    answers = run_ranks(tmp_path, Layout(tp=2), hung)
    assert not answers[1][0]
    assert "did not end within 30 s: start without --worker-config all_reduce=symmetric" in answers[1][1]
    assert answers[0][1].startswith("PeerDiedError")


def summed(groups: Groups) -> list[Any]:
    by = by_gloo(groups)
    kernels = StandIn(by, times=FOUR_CARDS)
    made, _ = connect(by, kernels, CPU)
    assert made is not None
    waits: list[bool] = []
    made.on_wait = waits.append
    found: list[Any] = [made.kind]
    for dtype, size in [
        (torch.bfloat16, 8 << 10),
        (torch.bfloat16, 64 << 10),
        (torch.float32, 1 << 20),
        (torch.float32, (4 << 20) + 16),
        (torch.bfloat16, 6),
        (torch.float16, 8 << 10),
        (torch.int64, 8 << 10),
    ]:
        kernels.calls.clear()
        tensor = torch.full((size // dtype.itemsize,), groups.rank + 1.0).to(dtype)
        assert made.all_reduce(tensor) is tensor
        assert torch.equal(tensor, torch.full_like(tensor, 3))
        found.append([way for way, _ in kernels.calls])
    across = torch.ones(64, 128).t()  # its bytes are as many, its order is another
    beside = torch.ones(4097)[1:]  # does not begin at 16 bytes: on this rank alone
    assert torch.equal(made.all_reduce(across), torch.full((128, 64), 2.0))
    assert torch.equal(made.all_reduce(beside if groups.rank else torch.ones(4096)), torch.full((4096,), 2.0))
    assert [int(t) for t in made.all_gather(torch.tensor([groups.rank]))] == [0, 1]
    assert waits
    made.close()
    assert kernels.closed == 1
    return found


def test_each_size_and_type_goes_its_way(tmp_path: Path) -> None:
    each = values(run_ranks(tmp_path, Layout(tp=2), summed))
    assert each[0] == each[1] == ["symmetric", ["two_shot"], ["one_shot"], ["two_shot"], [], [], [], []]


def told(groups: Groups) -> list[Any]:
    by = by_gloo(groups)
    long = "ü" * 600
    return [
        accord.agree(by, "") == "",
        accord.agree(by, "here" * (groups.rank == 1)),
        accord.agree(by, long)[:20],
        accord.same_everywhere(by, [1, 2, 3 + groups.rank, 4]),
        accord.same_everywhere(by, [1]),
        accord.slowest(by, [1.5, groups.rank]),
        [fact["problem"][:2] for fact in accord.meet(by, Facts(machine=1, card="c", torch="t", problem='"ü' * 600))],
    ]


def test_of_one_mind(tmp_path: Path) -> None:
    each = values(run_ranks(tmp_path, Layout(tp=2), told))
    assert each[0] == each[1] == [True, "rank 1: here", "rank 0: " + "ü" * 12, 2, None, [1.5, 1.0], ['"ü'] * 2]


def asked_without_gpus(groups: Groups) -> str:
    groups.all_reduce = "symmetric"
    return groups.communicator("tp").kind


def test_asked_for_without_gpus(tmp_path: Path) -> None:
    assert values(run_ranks(tmp_path, Layout(tp=2), asked_without_gpus)) == ["shared"] * 2


@pytest.mark.parametrize("size", range(1, 10))
def test_group_sizes(size: int) -> None:
    facts = [Facts(machine=1, card=f"GPU-{rank}", torch="2.11.0", problem="") for rank in range(size)]
    assert why_not(facts) == ("" if size in (2, 4, 8) else f"not made for {size} ranks, only for 2, 4 and 8")


def test_a_checksum_sees_a_bit_and_an_order() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.randn(20000, generator=torch.Generator().manual_seed(1)).to(dtype)
        same, bit = tensor.clone(), tensor.clone()
        bit.view(torch.uint8)[777] ^= 4
        assert checksum(same) == checksum(tensor)
        assert len({checksum(t) for t in (tensor, bit, tensor.flip(0))}) == 3
