"""Which request holds which block of the paged KV cache. Numbers only: the memory itself is the workers'.

A *block* is room for `block_size` tokens of one sequence; the same number means the same place on every rank. Always:

- a block is free or belongs to exactly one request;
- ``free + held == num_blocks``;
- a request's list is in sequence order: token t lies in block ``t // block_size`` of it.

`BlockPool.check` proves them (tests call it after every step). One thread, no I/O.
"""

from __future__ import annotations

from launcher.errors import InternalError


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that `tokens` tokens take, rounded up."""
    return -(-tokens // block_size)


class BlockPool:
    """All blocks of one engine core, and the list of each request that holds any."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Last freed, first reused: its memory is the likeliest to be in a cache. Block 0 is given out first.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held: dict[str, list[int]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def missing(self, owner: str, tokens: int) -> int:
        """Blocks that `owner` lacks to hold `tokens` tokens."""
        return max(0, blocks_for(tokens, self.block_size) - len(self._held.get(owner, ())))

    def grow(self, owner: str, tokens: int) -> list[int] | None:
        """Give `owner` room for `tokens` tokens in all; the blocks added, or None and no change when they are short."""
        count = self.missing(owner, tokens)
        if count == 0:
            return []
        if count > len(self._free):
            return None
        added = self._free[: -count - 1 : -1]
        del self._free[-count:]
        self._held.setdefault(owner, []).extend(added)
        return added

    def blocks_of(self, owner: str) -> list[int]:
        """Its blocks, in sequence order; empty when it holds none."""
        return list(self._held.get(owner, ()))

    def release(self, owner: str) -> int:
        """Take back all of `owner`'s blocks; how many there were."""
        blocks = self._held.pop(owner, [])
        self._free.extend(reversed(blocks))
        return len(blocks)

    def check(self) -> None:
        """`InternalError` when a block is lost, doubled or out of range."""
        seen: dict[int, str] = {}
        for owner, blocks in [("the free list", self._free), *self._held.items()]:
            for block in blocks:
                if block in seen:
                    raise InternalError(f"KV block {block} belongs to {seen[block]} and to {owner}")
                if not 0 <= block < self.num_blocks:
                    raise InternalError(f"KV block {block} of {owner} is outside 0..{self.num_blocks - 1}")
                seen[block] = owner
        if len(seen) != self.num_blocks:
            lost = sorted(set(range(self.num_blocks)) - seen.keys())
            raise InternalError(f"KV blocks {lost[:8]} belong to nobody ({len(lost)} of {self.num_blocks})")
