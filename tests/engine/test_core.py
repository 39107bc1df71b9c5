from __future__ import annotations

from collections.abc import Sequence

import pytest

from launcher.engine import core as core_module
from launcher.errors import ChildFailedError, DeadlineError, HostError, InternalError
from launcher.executor.base import GrammarMask, StepPlan
from launcher.process.reports import Step
from tests.engine.strict import StrictWorker, add, expected, gather, last, make_core


def test_initialize_asks_all_ranks_and_warms_up() -> None:
    def shrink(workers: list[StrictWorker]) -> None:
        workers[1].available = 3000

    core, executor = make_core(world=2, prepare=shrink, max_model_len=40, generation=3)
    steps: list[Step] = []
    info = core.initialize(lambda step, _detail: steps.append(step))
    assert executor.started
    assert steps == [Step.KV_CACHE, Step.WARM_UP]
    assert (info.num_blocks, info.block_size, info.max_model_len, info.generation) == (30, 4, 40, 3)
    assert [worker.num_blocks for worker in executor.workers] == [30, 30]
    assert all("warm_up" in worker.calls for worker in executor.workers)


def test_too_little_memory_names_the_flags() -> None:
    def shrink(workers: list[StrictWorker]) -> None:
        workers[0].available = 300

    core, _ = make_core(prepare=shrink)
    with pytest.raises(HostError, match=r"--max-model-len to at most 12 or .*--kv-cache-memory"):
        core.initialize()


def test_use_before_initialize_is_a_bug() -> None:
    core, _ = make_core()
    with pytest.raises(InternalError, match="before initialize"):
        core.add_request(add("a", [1]))


def test_every_rank_executes_and_requests_get_their_tokens() -> None:
    core, executor = make_core(world=2)
    core.initialize()
    for name in "abcdef":
        core.add_request(add(name, [ord(name)] * 5, max_tokens=7))
    assert gather(core) == {name: expected([ord(name)] * 5, 7) for name in "abcdef"}
    assert executor.workers[0].steps == executor.workers[1].steps == core.stats().steps
    assert core.stats().free_blocks == core.stats().total_blocks


def test_a_refusal_comes_with_the_next_step() -> None:
    core, executor = make_core()
    core.initialize()
    core.add_request(add("a", []), "7/a")
    assert core.has_work
    [(key, output)] = core.step()
    assert (key, output.request_id, output.finish_reason) == ("7/a", "a", "error")
    assert not core.has_work
    assert core.step() == []
    assert executor.workers[0].steps == 0


def test_an_aborted_refusal_is_not_told() -> None:
    core, _ = make_core()
    core.initialize()
    core.add_request(add("a", []))
    core.abort(["a", "unknown"])
    assert not core.has_work


def test_abort_all_tells_everyone() -> None:
    core, _ = make_core(max_num_seqs=1)
    core.initialize()
    core.add_request(add("a", [1]), "1/a")
    core.add_request(add("b", [1]), "1/b")
    core.add_request(add("c", []), "1/c")
    core.step()
    core.add_request(add("d", []), "1/d")
    ended = {key: output.finish_reason for key, output in core.abort_all()}
    assert ended == {"1/a": "abort", "1/b": "abort", "1/d": "error"}
    assert not core.has_work
    assert core.stats().free_blocks == core.stats().total_blocks


def test_a_death_ends_the_step() -> None:
    core, executor = make_core()
    core.initialize()
    core.add_request(add("a", [1]))
    executor.is_dead = True
    with pytest.raises(ChildFailedError, match="killed by SIGKILL"):
        core.step()


def test_a_step_that_hangs_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    core, executor = make_core()
    core.initialize()
    core.add_request(add("a", [1], max_tokens=1))
    executor.hangs = True
    looked = 0

    def look() -> None:
        nonlocal looked
        looked += 1
        executor.hangs = looked < 3

    core.while_waiting = look
    assert last(core.step()).finish_reason == "length"
    assert looked == 3


def test_a_call_has_a_deadline() -> None:
    core, executor = make_core()
    core.initialize()
    executor.hangs = True
    with pytest.raises(DeadlineError):
        core.collective_rpc("echo", timeout=0.01)
    executor.hangs = False
    assert core.collective_rpc("echo", ["x"], timeout=1) == [[0, "x"]]
    assert core.collective_rpc("echo", ["x"], timeout=1, unique_reply_rank=0) == [0, "x"]


class _Grammar:
    def __init__(self) -> None:
        self.masked: list[list[str]] = []

    def is_wanted(self, keys: Sequence[str]) -> bool:
        return "g" in keys

    def mask(self, plan: StepPlan, keys: Sequence[str]) -> GrammarMask | None:
        assert plan.has_grammar
        self.masked.append(list(keys))
        return GrammarMask(b"", b"")


def test_a_grammar_samples_in_a_second_call() -> None:
    core, _ = make_core()
    core.initialize()
    grammar = core.grammar = _Grammar()
    core.add_request(add("g", [1], max_tokens=2))
    core.add_request(add("h", [2], max_tokens=4))
    assert gather(core) == {"g": expected([1], 2), "h": expected([2], 4)}
    assert grammar.masked == [["g", "h"], ["g", "h"]]


def test_the_wait_slice_is_short() -> None:
    assert core_module.WAIT_SLICE <= 0.5
