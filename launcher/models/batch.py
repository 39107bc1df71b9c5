"""From a step's rows to flat columns: what is computed, where its keys go, which blocks each row reads. No torch.

The token axis puts all decodes first (rows of one token), then the prompt chunks, whatever order the plan has: the
attention runs the decodes as one batch, so they must be one slice. `samples` stays in the plan's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from launcher.worker.slots import Scheduled, Slot


class Chunk(NamedTuple):
    """A run of one sequence's tokens: ``first … first + length - 1`` on the token axis."""

    first: int
    length: int
    context: int
    """Tokens of the sequence up to and including this chunk."""
    blocks: list[int]
    """The blocks that hold them: ``ceil(context / block_size)``."""


class Sample(NamedTuple):
    """A row whose next token is wanted."""

    slot: int
    token: int
    """Place on the token axis of the sequence's last token."""


@dataclass
class Batch:
    """One step, T tokens on the token axis."""

    token_ids: list[int] = field(default_factory=list)
    """[T]"""
    positions: list[int] = field(default_factory=list)
    """[T]: each token's place in its sequence."""
    places: list[int] = field(default_factory=list)
    """[T]: each token's place in the cache, ``block * block_size + offset``."""
    decodes: list[Chunk] = field(default_factory=list)
    """B chunks of one token, at 0 … B - 1."""
    prefills: list[Chunk] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    """In the plan's order."""

    def tables(self) -> list[list[int]]:
        """[B, N]: the decodes' blocks, padded with block 0 to the longest: the attention masks what is past the end."""
        longest = max((len(chunk.blocks) for chunk in self.decodes), default=0)
        return [chunk.blocks + [0] * (longest - len(chunk.blocks)) for chunk in self.decodes]


def build(rows: Sequence[Scheduled], slots: dict[int, Slot], block_size: int) -> Batch:
    """`rows` as `SlotTable.apply` gives them, right after it."""
    batch = Batch()
    last: dict[int, int] = {}
    for row in sorted(rows, key=lambda row: row.num_tokens != 1):
        slot = slots[row.slot]
        chunk = _append(batch, row, slot, block_size)
        (batch.decodes if row.num_tokens == 1 else batch.prefills).append(chunk)
        last[row.slot] = chunk.first + chunk.length - 1
    batch.samples = [Sample(row.slot, last[row.slot]) for row in rows if row.sample]
    return batch


def _append(batch: Batch, row: Scheduled, slot: Slot, block_size: int) -> Chunk:
    end = row.start + row.num_tokens
    first = len(batch.token_ids)
    batch.token_ids += slot.token_ids[row.start : end]
    batch.positions += range(row.start, end)
    blocks = slot.block_ids
    batch.places += [
        blocks[position // block_size] * block_size + position % block_size for position in range(row.start, end)
    ]
    return Chunk(first, row.num_tokens, end, blocks[: -(-end // block_size)])
