from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.engine.kv_blocks import BlockPool, blocks_for
from launcher.errors import InternalError


def test_rounds_up() -> None:
    assert [blocks_for(n, 4) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_grows_in_sequence_order_and_only_by_what_is_missing() -> None:
    pool = BlockPool(4, 4)
    assert pool.grow("a", 5) == [0, 1]
    assert pool.grow("a", 8) == []
    assert pool.grow("b", 1) == [2]
    assert pool.grow("a", 9) == [3]
    assert pool.blocks_of("a") == [0, 1, 3]
    assert pool.free == 0


def test_a_request_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(3, 4)
    pool.grow("a", 4)
    assert pool.grow("b", 12) is None
    assert pool.free == 2
    assert pool.blocks_of("b") == []
    pool.check()


def test_release_gives_all_back_and_twice_is_harmless() -> None:
    pool = BlockPool(3, 4)
    pool.grow("a", 12)
    assert pool.release("a") == 3
    assert pool.release("a") == 0
    assert pool.free == 3
    pool.check()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40))))
def test_no_block_is_lost_or_doubled(moves: list[tuple[str, int]]) -> None:
    pool = BlockPool(8, 4)
    held = dict.fromkeys("abc", 0)
    for owner, tokens in moves:
        if tokens == 0:
            held[owner] = 0
            pool.release(owner)
        elif pool.grow(owner, tokens) is not None:
            held[owner] = max(held[owner], blocks_for(tokens, 4))
        pool.check()
        assert pool.free == 8 - sum(held.values())


def test_check_sees_damage() -> None:
    pool = BlockPool(2, 4)
    pool.grow("a", 4)
    pool._free.append(0)
    with pytest.raises(InternalError, match="KV block 0 belongs to the free list and to a"):
        pool.check()
    pool._free = []
    with pytest.raises(InternalError, match="belong to nobody"):
        pool.check()
    pool._free = [7]
    with pytest.raises(InternalError, match="outside"):
        pool.check()
