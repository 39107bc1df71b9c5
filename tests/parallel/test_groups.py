"""Groups and communicators between real processes."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.errors import HostError, UsageError
from launcher.parallel import shared
from launcher.parallel.communicators import HostCommunicator, TorchCommunicator
from launcher.parallel.groups import Groups, join
from launcher.parallel.ranks import GROUP_KINDS, Layout
from launcher.parallel.rendezvous import Rendezvous, open_store, parse
from tests.parallel.group_ranks import run_ranks, values

pytestmark = pytest.mark.keeps_descriptors


def describe_groups(groups: Groups) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in GROUP_KINDS:
        group = groups.by_kind[kind]
        mine = torch.tensor([groups.rank])
        found[kind] = [int(t) for t in groups.communicator(kind).all_gather(mine)]
        assert found[kind] == list(group.ranks)
    found["kinds"] = groups.communicator("tp").kind
    return found


def test_groups_of_a_grid(tmp_path: Path) -> None:
    layout = Layout(tp=2, pp=2)
    found = values(run_ranks(tmp_path, layout, describe_groups))
    for rank, seen in enumerate(found):
        assert {k: seen[k] for k in GROUP_KINDS} == {k: layout.group_of(k, rank) for k in GROUP_KINDS}
        assert seen["kinds"] == "shared"


def reduce_through_host(groups: Groups) -> list[bytes]:
    inner = groups.communicator("tp")
    by = HostCommunicator(inner)
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for length in (5, 4096, 3):
            tensor = torch.arange(length).mul(groups.rank + 1).to(dtype)
            gathered = by.all_gather(tensor)
            expected = torch.arange(length).to(dtype)
            assert torch.equal(gathered[1], expected * 2)
            column = tensor.repeat(2, 1).t()  # not contiguous
            assert by.all_reduce(column) is column
            assert torch.equal(column[:, 0], inner.all_reduce(tensor.clone()))
            found.append(column.float().numpy().tobytes())
    return found


def test_through_host_memory_as_within_it(tmp_path: Path) -> None:
    first, second = values(run_ranks(tmp_path, Layout(tp=2), reduce_through_host))
    assert first == second


def reduce_everything(groups: Groups) -> list[Any]:
    """Sums of all shapes and dtypes, by shared memory and by torch; returns the shared ones as bytes."""
    fast = groups.communicator("tp")
    assert fast.kind == "shared"
    group = groups.by_kind["tp"]
    assert group.process_group is not None
    slow = TorchCommunicator(group.process_group, group.index, group.size)
    generator = torch.Generator().manual_seed(groups.rank)
    found = []
    lengths = [1, 7, 576, shared.PART // 4, shared.PART // 4 + 1, 2 * shared.PART // 4 + 3]
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64):
        for length in lengths:
            tensor = (torch.randn(length, generator=generator) * 100).to(dtype)
            expected = slow.all_reduce(tensor.double()).to(torch.float64)
            gathered = fast.all_gather(tensor)
            assert len(gathered) == group.size
            assert torch.equal(gathered[groups.rank], tensor)
            result = fast.all_reduce(tensor)
            assert result is tensor
            tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(dtype, 1e-5)
            assert torch.allclose(result.double(), expected, rtol=tolerance, atol=tolerance * 200), (dtype, length)
            found.append(result.view(torch.uint8).sum().item())
    crossed = torch.arange(12.0).view(3, 4).t()
    fast.all_reduce(crossed)
    assert torch.equal(crossed, torch.arange(12.0).view(3, 4).t() * group.size)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_shared_all_reduce_is_right_and_bit_equal(tmp_path: Path, size: int) -> None:
    found = values(run_ranks(tmp_path, Layout(tp=size), reduce_everything))
    assert all(other == found[0] for other in found)


def many_rounds(groups: Groups, rounds: int) -> int:
    """Rounds with skewed ranks: a lost, doubled or overwritten part gives a wrong sum."""
    fast = groups.communicator("tp")
    size = groups.layout.tp
    for number in range(rounds):
        if number % 97 == groups.rank:
            time.sleep(0.001)
        tensor = torch.full((64,), float(number * (groups.rank + 1)))
        fast.all_reduce(tensor)
        assert tensor.tolist() == [number * size * (size + 1) / 2] * 64, number
    return rounds


def test_rounds_do_not_run_into_each_other(tmp_path: Path) -> None:
    assert values(run_ranks(tmp_path, Layout(tp=3), many_rounds, 2000)) == [2000] * 3


def one_dies(groups: Groups) -> None:
    fast = groups.communicator("tp")
    fast.all_reduce(torch.ones(4))
    if groups.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    fast.all_reduce(torch.ones(4))


def test_a_dead_peer_is_named(tmp_path: Path) -> None:
    began = time.monotonic()
    answers = run_ranks(tmp_path, Layout(tp=3), one_dies)
    assert time.monotonic() - began < 45
    assert answers[1] is None
    for rank in (0, 2):
        ok, text = answers[rank]
        assert not ok
        assert text.startswith("PeerDiedError: rank 1 of the group (pid ")


def one_is_stuck(groups: Groups) -> str:
    fast = groups.communicator("tp")
    fast.all_reduce(torch.ones(4))
    if groups.rank == 1:
        time.sleep(1.5)
        return "slept"
    fast._timeout = 0.5  # type: ignore[attr-defined]
    fast.all_reduce(torch.ones(4))
    return "not reached"


def test_a_stuck_peer_is_named_at_the_deadline(tmp_path: Path) -> None:
    answers = run_ranks(tmp_path, Layout(tp=2), one_is_stuck)
    assert answers[1] == (True, "slept")
    assert not answers[0][0]
    assert "waited 0 s in an all-reduce for rank 1" in answers[0][1]
    assert "at round 1, not 2" in answers[0][1]


def declined(groups: Groups) -> str:
    shared.platform.machine = lambda: "aarch64"  # type: ignore[attr-defined]
    communicator = groups.communicator("tp")
    total = communicator.all_reduce(torch.full((3, 5), 1.0).t())
    assert total.tolist() == [[2.0] * 3] * 5
    return communicator.kind


def test_falls_back_to_torch_where_it_must(tmp_path: Path) -> None:
    assert values(run_ranks(tmp_path, Layout(tp=2), declined)) == ["torch"] * 2


def test_a_world_of_one_touches_nothing() -> None:
    groups = join("", Layout(), 0, torch.device("cpu"))
    assert not torch.distributed.is_initialized()
    tensor = torch.ones(3)
    assert groups.communicator("tp").all_reduce(tensor) is tensor
    assert groups.communicator("ep").all_gather(tensor)[0] is tensor
    groups.close()


def test_no_rendezvous_given() -> None:
    with pytest.raises(UsageError, match="rank 1 of 2 was given no rendezvous"):
        join("", Layout(tp=2), 1, torch.device("cpu"))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("file:///run/x/rendezvous-1", Rendezvous(path=Path("/run/x/rendezvous-1"))),
        ("file:///with%20space", Rendezvous(path=Path("/with space"))),
        ("tcp://10.0.0.1:29501", Rendezvous(host="10.0.0.1", port=29501)),
        ("tcp://[fe80::1]:29501", Rendezvous(host="fe80::1", port=29501)),
    ],
)
def test_urls(url: str, expected: Rendezvous) -> None:
    assert parse(url) == expected


@pytest.mark.parametrize("url", ["", "env://", "file://relative", "tcp://host", "tcp://host:x", "tcp://:1", "/tmp/x"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(UsageError, match="is neither file:///absolute/path nor tcp://host:port"):
        parse(url)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="cannot be used by rank 0"):
        open_store(f"file://{tmp_path}/none/rendezvous", rank=0, world_size=2, timeout=1)


def test_a_tcp_store() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = open_store(f"tcp://127.0.0.1:{port}", rank=0, world_size=1, timeout=5)
    store.set("a", "b")
    assert store.get("a") == b"b"
