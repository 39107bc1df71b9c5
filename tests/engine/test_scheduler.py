"""Each rule of the scheduler, against the strict worker's own model of slots, blocks and tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from launcher.config import WorkerSettings
from launcher.engine.kv_blocks import BlockPool
from launcher.engine.messages import RequestOutput
from launcher.engine.request import Limits
from launcher.engine.scheduled import ScheduledStep
from launcher.engine.scheduler import Scheduler
from launcher.errors import InternalError
from launcher.executor.base import KVCacheConfig, StepOutput, StepPlan, pack, unpack
from tests.engine.strict import VOCAB, StrictWorker, add, expected


class Bench:
    """A scheduler and one strict worker."""

    def __init__(self, *, blocks: int = 100, seqs: int = 4, budget: int = 100, eos: tuple[int, ...] = ()) -> None:
        limits = Limits(64, blocks * 4, VOCAB, eos)
        self.pool = BlockPool(blocks, 4)
        self.scheduler = Scheduler(self.pool, limits, max_num_seqs=seqs, max_num_batched_tokens=budget)
        self.worker = StrictWorker(WorkerSettings(block_size=4), max_num_seqs=seqs, budget=budget)
        self.worker.initialize_from_config(KVCacheConfig(num_blocks=blocks, block_size=4))
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, RequestOutput] = {}

    def add(self, key: str, prompt: Sequence[int], output: Sequence[int] = (), **sampling: object) -> None:
        refused = self.scheduler.add(key, add(key, prompt, output, **sampling))
        if refused is not None:
            self.finished[key] = refused

    def send(self) -> tuple[ScheduledStep, StepOutput | None] | None:
        step = self.scheduler.schedule()
        self.scheduler.check()
        return None if step is None else (step, self.worker.execute_model(step.plan))

    def receive(self, sent: tuple[ScheduledStep, StepOutput | None]) -> None:
        for key, output in self.scheduler.update(*sent):
            assert key not in self.finished
            self.tokens.setdefault(key, []).extend(unpack(output.new_token_ids))
            if output.finish_reason is not None:
                self.finished[key] = output
        self.scheduler.check()

    def step(self) -> StepPlan:
        sent = self.send()
        assert sent is not None
        self.receive(sent)
        return sent[0].plan

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()
        assert self.pool.free == self.pool.num_blocks
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting) == (0, 0)


def rows(plan: StepPlan) -> list[tuple[int, int, int]]:
    return list(zip(unpack(plan.slots), unpack(plan.num_tokens), plan.sample, strict=True))


def test_a_request_gets_its_tokens_one_a_step() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3], max_tokens=4)
    first, second = bench.step(), bench.step()
    assert rows(first) == [(0, 3, 1)]
    assert unpack(first.new[0].token_ids) == [1, 2, 3]
    assert rows(second) == [(0, 1, 1)]
    bench.run()
    assert bench.tokens["a"] == expected([1, 2, 3], 4)
    assert bench.finished["a"].finish_reason == "length"


def test_plans_carry_deltas_only() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3], max_tokens=10)
    bench.step()
    plan = bench.step()  # computes token 3, in the first block
    assert (plan.new, plan.freed, plan.block_slots, plan.block_ids) == ((), b"", b"", b"")
    assert (unpack(plan.token_slots), unpack(plan.tokens)) == ([0], expected([1, 2, 3], 1))
    plan = bench.step()  # computes token 4, in a new one
    assert (unpack(plan.block_slots), unpack(plan.block_ids)) == ([0], [1])


def test_what_is_free_is_told_with_the_next_plan_before_its_slot_is_used_again() -> None:
    bench = Bench(seqs=1)
    bench.add("a", [1], max_tokens=1)
    bench.add("b", [2], max_tokens=1)
    assert bench.step().freed == b""
    plan = bench.step()
    assert unpack(plan.freed) == [0]
    assert plan.new[0].slot == 0
    assert plan.tokens == b"", "the last token of a finished request interests no worker"


def test_decodes_come_first_and_prefills_are_cut_to_the_budget() -> None:
    bench = Bench(budget=8)
    bench.add("a", [1, 2], max_tokens=20)
    bench.step()
    bench.add("b", list(range(20)), max_tokens=2)
    assert rows(bench.step()) == [(0, 1, 1), (1, 7, 0)]
    bench.add("c", [4], max_tokens=2)
    assert rows(bench.step()) == [(0, 1, 1), (1, 7, 0)], "the budget is spent before c"
    assert rows(bench.step()) == [(0, 1, 1), (1, 6, 1), (2, 1, 1)]
    assert rows(bench.step()) == [(0, 1, 1), (1, 1, 1), (2, 1, 1)]


def test_more_decodes_than_budget_makes_the_younger_wait() -> None:
    bench = Bench(budget=2)
    for key in "abc":
        bench.add(key, [ord(key)], max_tokens=4)
    bench.run()
    assert {key: bench.tokens[key] for key in "abc"} == {key: expected([ord(key)], 4) for key in "abc"}


def test_no_more_requests_than_slots() -> None:
    bench = Bench(seqs=2)
    for key in "abc":
        bench.add(key, [ord(key)], max_tokens=3)
    bench.step()
    stats = bench.scheduler.stats()
    assert (stats.running, stats.waiting) == (2, 1)
    bench.run()
    assert bench.tokens["c"] == expected([ord("c")], 3)


def test_the_first_that_does_not_fit_holds_the_others_back() -> None:
    bench = Bench(blocks=4)
    bench.add("a", [1] * 8, max_tokens=5)
    bench.step()
    bench.add("big", [2] * 12, max_tokens=1)
    bench.add("small", [3], max_tokens=1)
    bench.step()
    assert bench.scheduler.stats().waiting == 2
    bench.run()
    assert list(bench.finished) == ["a", "big", "small"] or list(bench.finished) == ["a", "small", "big"]


def test_the_youngest_is_preempted_and_comes_back_whole_and_first() -> None:
    bench = Bench(blocks=4)
    bench.add("old", [1] * 7, max_tokens=9)
    bench.add("young", [2] * 7, max_tokens=9)
    bench.add("later", [3], max_tokens=1)
    bench.step()
    bench.step()  # both compute token 7, the last place in their blocks; "later" has no block
    plan = bench.step()  # old needs a third block
    assert unpack(plan.freed) == [1]
    assert rows(plan) == [(0, 1, 1)]
    assert unpack(plan.token_slots) == [0], "the preempted one's token is void: it comes back whole"
    assert unpack(plan.block_slots) == [0]
    assert plan.new == (), "nobody is admitted in a step that preempted"
    stats = bench.scheduler.stats()
    assert (stats.preemptions, stats.running, stats.waiting) == (1, 1, 2)
    while not (plan := bench.step()).new:
        pass
    assert plan.new[0].prompt_len == 7
    assert unpack(plan.new[0].token_ids) == [2] * 7 + expected([2] * 7, 2)
    bench.run()
    assert bench.tokens["old"] == expected([1] * 7, 9)
    assert bench.tokens["young"] == expected([2] * 7, 9)
    assert bench.tokens["later"] == expected([3], 1)


def test_the_one_that_asks_is_preempted_when_it_is_the_youngest() -> None:
    bench = Bench(blocks=4)
    bench.add("old", [1] * 9, max_tokens=3)
    bench.add("young", [2] * 4, max_tokens=4)
    bench.step()
    plan = bench.step()  # young needs a block, old has one to grow in
    assert rows(plan) == [(0, 1, 1)]
    assert unpack(plan.freed) == [1]
    bench.run()
    assert bench.tokens["young"] == expected([2] * 4, 4)


def test_prompt_tokens_are_counted_once_whatever_is_computed_again() -> None:
    bench = Bench(blocks=4)
    bench.add("old", [1] * 7, max_tokens=9)
    bench.add("young", [2] * 7, max_tokens=9)
    bench.run()
    stats = bench.scheduler.stats()
    assert stats.preemptions > 0
    assert (stats.prompt_tokens, stats.generated_tokens) == (14, 18)


def test_one_request_may_use_the_whole_cache_and_no_more() -> None:
    bench = Bench(blocks=3)
    bench.add("a", [1] * 5, max_tokens=100)
    bench.run()
    assert bench.tokens["a"] == expected([1] * 5, 7)
    assert bench.finished["a"].finish_reason == "length"


def test_eos_and_stop_tokens_end_it_and_are_delivered() -> None:
    stop = expected([1], 3)[2]
    bench = Bench(eos=(stop,))
    bench.add("eos", [1], max_tokens=9)
    bench.add("ignored", [1], max_tokens=5, ignore_eos=True)
    bench.add("stop", [1], max_tokens=9, ignore_eos=True, stop_token_ids=(expected([1], 2)[1],))
    bench.run()
    assert bench.tokens["eos"] == expected([1], 3)
    assert (bench.finished["eos"].finish_reason, bench.finished["eos"].stop_token_id) == ("stop", stop)
    assert bench.tokens["ignored"] == expected([1], 5)
    assert bench.tokens["stop"] == expected([1], 2)


def test_a_replay_goes_on_where_it_was() -> None:
    bench = Bench()
    whole = expected([1, 2], 6)
    bench.add("a", [1, 2], whole[:4], max_tokens=6)
    plan = bench.step()
    assert plan.new[0].prompt_len == 2
    bench.run()
    assert bench.tokens["a"] == whole[4:]
    assert bench.finished["a"].finish_reason == "length"


def test_a_replay_that_was_complete_ends_at_once() -> None:
    bench = Bench(eos=(7,))
    bench.add("length", [1, 2], expected([1, 2], 3), max_tokens=3)
    bench.add("stop", [1, 2], [5, 7], max_tokens=30)
    assert bench.finished["length"].finish_reason == "length"
    assert (bench.finished["stop"].finish_reason, bench.finished["stop"].stop_token_id) == ("stop", 7)
    assert not bench.scheduler.has_work


def test_refusals() -> None:
    bench = Bench(blocks=4)
    bench.add("a", [1] * 16)
    assert bench.finished["a"].finish_reason == "error"
    assert "the whole KV cache holds 16" in bench.finished["a"].error
    torn = add("b", [1])
    torn = type(torn)("b", b"abc", torn.sampling)
    refused = bench.scheduler.add("b", torn)
    assert refused is not None
    assert "packed int32" in refused.error
    bench.add("c", [1])
    bench.add("c", [1])
    assert "'c' is in use" in bench.finished["c"].error
    bench.finished.clear()
    bench.run()


def test_abort_waiting_running_and_unknown() -> None:
    bench = Bench(seqs=1)
    bench.add("a", [1] * 9, max_tokens=50)
    bench.add("b", [2], max_tokens=5)
    bench.step()
    assert bench.scheduler.abort("b")
    assert bench.scheduler.abort("a")
    assert not bench.scheduler.abort("a")
    assert bench.pool.free == 100
    assert not bench.scheduler.has_work
    assert bench.scheduler.schedule() is None
    bench.add("c", [3], max_tokens=2)
    assert unpack(bench.step().freed) == [0]
    bench.run()
    assert bench.tokens["c"] == expected([3], 2)


def test_abort_while_its_step_is_under_way_drops_the_answer() -> None:
    bench = Bench()
    bench.add("a", [1], max_tokens=5)
    bench.add("b", [2], max_tokens=3)
    sent = bench.send()
    assert sent is not None
    bench.scheduler.abort("a")
    bench.add("c", [3], max_tokens=3)
    bench.receive(sent)
    assert "a" not in bench.tokens
    bench.run()
    assert bench.tokens == {"b": expected([2], 3), "c": expected([3], 3)}


def test_two_plans_under_way() -> None:
    bench = Bench()
    bench.add("a", [1], max_tokens=3)
    first = bench.send()
    assert bench.scheduler.schedule() is None, "its next token is not known yet"
    bench.add("b", [2], max_tokens=3)
    second = bench.send()
    assert first is not None
    assert second is not None
    assert unpack(second[0].plan.slots) == [1]
    bench.receive(first)
    bench.receive(second)
    bench.run()
    assert bench.tokens == {"a": expected([1], 3), "b": expected([2], 3)}


def test_preempted_while_its_step_is_under_way() -> None:
    bench = Bench(blocks=4)
    bench.add("old", [1] * 8, max_tokens=3)
    first = bench.send()
    bench.add("young", [2] * 8, max_tokens=2)
    second = bench.send()
    assert first is not None
    assert second is not None
    bench.receive(first)
    third = bench.send()  # old needs a third block
    assert third is not None
    assert unpack(third[0].plan.freed) == [1]
    bench.receive(second)
    assert "young" not in bench.tokens
    bench.receive(third)
    bench.run()
    assert bench.tokens == {"old": expected([1] * 8, 3), "young": expected([2] * 8, 2)}


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (None, "sampled nothing, 1 were due"),
        (StepOutput(9, pack([0]), pack([1])), "answered for step 9"),
        (StepOutput(1, pack([3]), pack([1])), r"slots \[3\], due were \[0\]"),
        (StepOutput(1, pack([0]), pack([1, 2])), "2 tokens and 0 logprobs for 1"),
    ],
)
def test_an_answer_that_does_not_fit_the_plan_is_a_bug(output: StepOutput | None, words: str) -> None:
    bench = Bench()
    bench.add("a", [1])
    step = bench.scheduler.schedule()
    assert step is not None
    with pytest.raises(InternalError, match=words):
        bench.scheduler.update(step, output)


def test_a_plan_that_samples_nothing_needs_no_answer() -> None:
    bench = Bench(budget=2)
    bench.add("a", [1, 2, 3], max_tokens=1)
    step = bench.scheduler.schedule()
    assert step is not None
    assert bench.scheduler.update(step, None) == []


def test_logprobs_go_to_those_they_belong_to() -> None:
    bench = Bench()
    bench.add("a", [1], max_tokens=2, logprobs=0)
    sent = bench.send()
    assert sent is not None
    [(_, output)] = bench.scheduler.update(*sent)
    assert [unpack(entry.ids) for entry in output.logprobs] == [expected([1], 1)]
    sent = bench.send()
    assert sent is not None
    [(_, output)] = bench.scheduler.update(*sent)
    assert output.logprobs == ()
