"""Reference tokens, and that wrong plans are found out."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from launcher.config import RankSettings, WorkerSettings
from launcher.errors import InternalError, UsageError
from launcher.worker.reference import VOCAB, ReferenceWorker, expected_tokens
from launcher.worker.step import (
    GrammarMask,
    KVCacheConfig,
    NewRequest,
    SamplingParams,
    StepOutput,
    StepPlan,
    pack,
    unpack,
)

PROMPT = [72, 105, 33, 10] * 5  # 20 tokens: two blocks of 16


def make(config: dict[str, str] | None = None, **ranks: int) -> ReferenceWorker:
    worker = ReferenceWorker(WorkerSettings(worker_config=config or {}, ranks=RankSettings(**ranks)))
    worker.init_device()
    worker.load_model()
    worker.initialize_from_config(KVCacheConfig(num_blocks=8, block_size=16))
    worker.compile_or_warm_up_model()
    return worker


@dataclass
class Script:
    """One request in slot 0, planned step by step as an engine would."""

    blocks: list[int] = field(default_factory=lambda: [3, 5])
    sampling: SamplingParams = field(default_factory=SamplingParams)
    step: int = 0
    length: int = len(PROMPT)

    def prefill(self, count: int = len(PROMPT), *, sample: bool = True) -> StepPlan:
        self.step += 1
        new = NewRequest(0, pack(PROMPT), len(PROMPT), pack(self.blocks), 0, self.sampling)
        return StepPlan(self.step, pack([0]), pack([count]), bytes([sample]), (new,))

    def go_on(self, token: int | None, *, count: int = 1, block: int | None = None) -> StepPlan:
        self.step += 1
        added = {} if token is None else {"token_slots": pack([0]), "tokens": pack([token])}
        blocks = {} if block is None else {"block_slots": pack([0]), "block_ids": pack([block])}
        return StepPlan(self.step, pack([0]), pack([count]), b"\x01", **added, **blocks)


def token_of(output: StepOutput | None) -> int:
    assert output is not None
    (token,) = unpack(output.tokens)
    return token


def run(worker: ReferenceWorker, script: Script, n: int) -> list[int]:
    tokens = [token_of(worker.execute_model(script.prefill()))]
    for _ in range(n - 1):
        at = len(PROMPT) + len(tokens)
        block = {33: 6, 49: 7}.get(at)
        tokens.append(token_of(worker.execute_model(script.go_on(tokens[-1], block=block))))
    return tokens


def test_tokens_are_those_expected_over_block_borders() -> None:
    assert run(make(), Script(), 40) == expected_tokens(PROMPT, 40)


def test_expected_tokens_depend_on_prompt_and_place_only() -> None:
    tokens = expected_tokens(PROMPT, 500)
    assert expected_tokens(PROMPT, 20) == tokens[:20]
    assert all(256 <= token < VOCAB for token in tokens)
    assert len(set(tokens)) > 480
    assert expected_tokens([*PROMPT, 1], 20) != tokens[:20]
    assert expected_tokens([1, 2], 5) != expected_tokens([2, 1], 5)
    assert all(256 <= token < 300 for token in expected_tokens(PROMPT, 99, vocab=300))


def test_chunked_prefill_gives_the_same() -> None:
    worker, script = make(), Script()
    assert worker.execute_model(script.prefill(7, sample=False)) == StepOutput(step=1)
    output = worker.execute_model(script.go_on(None, count=13))
    assert token_of(output) == expected_tokens(PROMPT, 1)[0]


def test_only_the_output_rank_answers() -> None:
    others = [make(rank=rank, world_size=4, tp_size=2, pp_size=2) for rank in range(4)]
    answers = [worker.execute_model(Script().prefill()) for worker in others]
    assert [answer is not None for answer in answers] == [False, False, True, False]


def _lost(worker: ReferenceWorker, script: Script) -> StepPlan:
    return script.go_on(expected_tokens(PROMPT, 2)[1])


def _foreign_block(worker: ReferenceWorker, script: Script) -> StepPlan:
    worker.table.slots[0].block_ids[0] = 1
    return script.go_on(expected_tokens(PROMPT, 1)[0], count=1)


def _stolen_block(worker: ReferenceWorker, script: Script) -> StepPlan:
    thief = NewRequest(1, pack([9] * 16), 16, pack([5]), 0, SamplingParams())
    worker.execute_model(StepPlan(2, pack([1]), pack([16]), b"\x00", (thief,)))
    return script.go_on(expected_tokens(PROMPT, 1)[0])


def _too_few_blocks(worker: ReferenceWorker, script: Script) -> StepPlan:
    worker.table.slots[0].block_ids.pop()
    return script.go_on(expected_tokens(PROMPT, 1)[0])


def _early_sample(worker: ReferenceWorker, script: Script) -> StepPlan:
    worker.table.slots[0].token_ids += expected_tokens(PROMPT, 2)
    return script.go_on(None)


def _no_such_block(worker: ReferenceWorker, script: Script) -> StepPlan:
    new = NewRequest(1, pack([9] * 16), 16, pack([8]), 0, SamplingParams())
    return StepPlan(2, pack([1]), pack([16]), b"\x00", (new,))


def _uncached_prefix(worker: ReferenceWorker, script: Script) -> StepPlan:
    new = NewRequest(1, pack([9] * 20), 20, pack([1, 2]), 16, SamplingParams())
    return StepPlan(2, pack([1]), pack([4]), b"\x01", (new,))


WRONG = [
    (_lost, "as output token 0"),
    (_foreign_block, "relies on block"),
    (_stolen_block, "relies on block 5 (number 1 of its table), which holds another sequence"),
    (_too_few_blocks, "it has 1 blocks"),
    (_early_sample, "is to sample after token 21, but its sequence has 22"),
    (_no_such_block, "is given block 8; there are 8"),
    (_uncached_prefix, "relies on block 1 (number 0 of its table), which was never written"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_a_wrong_plan_is_found_out(wrong, message: str) -> None:  # type: ignore[no-untyped-def]
    worker, script = make(), Script()
    worker.execute_model(script.prefill())
    plan = wrong(worker, script)
    with pytest.raises(InternalError) as error:
        _go_on_for_a_block(worker, script, plan)
    assert message in str(error.value)


def _go_on_for_a_block(worker: ReferenceWorker, script: Script, plan: StepPlan) -> None:
    """A block that was swapped shows at the next whole look, within a block's length."""
    tokens = expected_tokens(PROMPT, 20)
    for index in range(1, 16):
        worker.execute_model(plan)
        plan = script.go_on(tokens[index], block=7 if index == 12 else None)


def test_a_cached_prefix_is_accepted() -> None:
    worker = make()
    worker.execute_model(Script().prefill())
    new = NewRequest(1, pack([*PROMPT[:16], 1, 2]), 18, pack([3, 6]), 16, SamplingParams())
    output = worker.execute_model(StepPlan(2, pack([1]), pack([2]), b"\x01", (new,)))
    assert token_of(output) == expected_tokens([*PROMPT[:16], 1, 2], 1)[0]


def test_a_resumed_request_goes_on() -> None:
    worker, tokens = make(), expected_tokens(PROMPT, 6)
    worker.execute_model(Script().prefill())
    again = NewRequest(0, pack([*PROMPT, *tokens[:5]]), len(PROMPT), pack([1, 2]), 0, SamplingParams())
    plan = StepPlan(2, pack([0]), pack([25]), b"\x01", (again,), freed=pack([0]))
    assert token_of(worker.execute_model(plan)) == tokens[5]


def test_logprobs() -> None:
    worker = make()
    output = worker.execute_model(Script(sampling=SamplingParams(logprobs=3)).prefill())
    assert output is not None
    (entry,) = output.logprobs
    assert entry is not None
    ids = unpack(entry.ids)
    assert len(ids) == 4
    assert ids[0] == ids[1] == token_of(output)
    assert len(entry.values) == 16
    assert entry.rank == 0
    none = make().execute_model(Script().prefill())
    assert none is not None
    assert none.logprobs == ()


def test_a_grammar_gets_its_first_allowed_token() -> None:
    worker, script = make(), Script()
    plan = script.prefill()
    plan = StepPlan(1, plan.slots, plan.num_tokens, plan.sample, plan.new, has_grammar=True)
    assert worker.execute_model(plan) is None
    row = bytearray(VOCAB // 8)
    row[500], row[501] = 0b1000, 0xFF
    assert token_of(worker.sample_tokens(GrammarMask(pack([0]), bytes(row)))) == 4003
    output = worker.execute_model(script.go_on(4003))
    assert token_of(output) == expected_tokens(PROMPT, 2)[1]


BAD_CONFIG = [({"step": "3"}, "unknown field `step`"), ({"step_ms": "x"}, "$.step_ms"), ({"vocab": "256"}, "vocab=256")]


@pytest.mark.parametrize(("config", "message"), BAD_CONFIG)
def test_bad_config(config: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        make(config)
    assert message in str(error.value)
    assert "--worker-config" in str(error.value)
