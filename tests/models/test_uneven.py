"""Sizes that the number of ranks does not divide: a vocabulary, and rows that are fewer than the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from launcher.errors import UsageError
from launcher.models import shard
from launcher.models.tiny import make_tiny
from launcher.parallel.communicators import Communicator
from launcher.parallel.groups import all_reduce_of
from tests.models.conftest import Reference
from tests.models.driver import Driver
from tests.models.tensor_ranks import TensorRanks
from tests.models.test_worker import workload

pytestmark = pytest.mark.keeps_descriptors


class Recorded(Communicator):
    """One rank of several that run one after another: what it would have sent is kept."""

    kind = "recorded"

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.sent: list[torch.Tensor] = []

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sent.append(tensor.clone())
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.sent.append(tensor.clone())
        return [tensor] * self.size


def part(whole: nn.Module, by: Recorded, **sizes: int) -> Any:
    """`whole` as it is on this rank: its rows of the weight, the sizes of the whole."""
    first, end = shard.span(whole.weight.shape[0], by.rank, by.size)  # type: ignore[union-attr, operator, index]
    module = nn.Module()
    module.weight = nn.Parameter(whole.weight[first:end].clone(), requires_grad=False)  # type: ignore[index]
    module.bias = None  # type: ignore[assignment]
    for name, size in sizes.items():
        setattr(module, name, size)
    return module


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [5, 9, 16, 321])
def test_a_vocabulary_in_uneven_parts(rows: int, size: int) -> None:
    embedding, head = nn.Embedding(rows, 6), nn.Linear(6, rows, bias=False)
    ids, x = torch.arange(rows).view(1, -1), torch.randn(1, 3, 6)
    sums, columns = torch.zeros(1, rows, 6), []
    for rank in range(size):
        by = Recorded(rank, size)
        rowwise = part(embedding, by, num_embeddings=rows, embedding_dim=6)
        shard._embedding_rowwise(rowwise, by)(ids)
        sums += by.sent.pop()
        assert shard._colwise_gather(part(head, by, out_features=rows), by)(x).shape == (1, 3, rows)
        columns.append(by.sent.pop())
    assert torch.equal(sums, embedding(ids))
    assert len({c.shape for c in columns}) == 1  # a gather takes equal parts only
    assert torch.allclose(torch.cat(columns, -1)[..., :rows], head(x))


@pytest.mark.parametrize("tied", [True, False])
def test_tokens_equal_generate(tied: bool, reference: Reference, tmp_path: Path) -> None:
    directory = make_tiny(tmp_path / "m", "llama", vocab_size=323, tie_word_embeddings=tied)
    with TensorRanks(directory, 2, tmp_path) as ranks:
        requests = workload(Driver(ranks.execute))
    for done in requests:
        assert done.output == reference(directory, done.prompt, 20)


def test_the_setting() -> None:
    assert [all_reduce_of(given) for given in ({}, {"all_reduce": "symmetric"}, {"other": "x"})] == [
        "nccl",
        "symmetric",
        "nccl",
    ]
    with pytest.raises(UsageError, match="all_reduce=fast: it is nccl"):
        all_reduce_of({"all_reduce": "fast"})
