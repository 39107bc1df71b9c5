from __future__ import annotations

import pytest

from launcher.engine.kv_size import agree, decide_model_len, decide_num_blocks
from launcher.errors import HostError, InternalError, UsageError
from launcher.executor.base import KVCacheSpec


def spec(**changes: object) -> KVCacheSpec:
    values: dict[str, object] = {"bytes_per_block": 100, "block_size": 4, "max_model_len": 64, "vocab_size": 10}
    return KVCacheSpec(**{**values, **changes})  # type: ignore[arg-type]


def test_the_smallest_rank_decides() -> None:
    assert decide_num_blocks([spec()] * 3, [5000, 2000, 9000], 64, 100) == 20


def test_stages_may_hold_different_numbers_of_layers() -> None:
    specs = [spec(bytes_per_block=100), spec(bytes_per_block=300)]
    assert agree(specs) is specs[0]
    assert decide_num_blocks(specs, [5000, 9000], 64, 100) == 30


def test_no_more_than_all_slots_can_fill() -> None:
    assert decide_num_blocks([spec()], [1 << 40], 62, 3) == 3 * 16


def test_too_small_is_an_error_with_the_arithmetic() -> None:
    with pytest.raises(HostError) as caught:
        decide_num_blocks([spec(), spec()], [5000, 1599], 64, 4)
    line = str(caught.value)
    for words in (
        "64 tokens needs 16 blocks x 100 bytes = 1600 bytes",
        "rank 1 has 1599 bytes",
        "--max-model-len to at most 60",
        "--kv-cache-memory",
    ):
        assert words in line
    assert "\n" not in line


def test_nothing_at_all_does_not_advise_a_length_of_zero() -> None:
    with pytest.raises(HostError) as caught:
        decide_num_blocks([spec()], [99], 64, 4)
    assert "--max-model-len" not in str(caught.value)


@pytest.mark.parametrize(
    "change", [{"block_size": 8}, {"max_model_len": 32}, {"vocab_size": 11}, {"eos_token_ids": (1,)}]
)
def test_ranks_must_agree(change: dict[str, object]) -> None:
    with pytest.raises(InternalError, match=f"{next(iter(change))} is .* on rank 0 and .* on rank 1"):
        agree([spec(), spec(**change)])


def test_nonsense_from_a_worker_is_named() -> None:
    with pytest.raises(InternalError, match=r"rank 0's kv_cache_spec.. says bytes_per_block=0"):
        agree([spec(bytes_per_block=0)])


def test_model_len() -> None:
    assert decide_model_len(None, spec()) == 64
    assert decide_model_len(64, spec()) == 64
    with pytest.raises(UsageError, match="--max-model-len 65 is more than this model's 64"):
        decide_model_len(65, spec())
    with pytest.raises(UsageError, match="at least 2"):
        decide_model_len(1, spec())
