"""Random arrivals and cancels in a tiny cache: everyone who stays gets exactly its tokens, and nothing is left over."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.engine.scheduled import ScheduledStep
from launcher.executor.base import StepOutput
from tests.engine.strict import expected
from tests.engine.test_scheduler import Bench


class Visitor(NamedTuple):
    arrives: int
    prompt_len: int
    max_tokens: int
    leaves: int | None
    replayed: int


visitors = st.lists(
    st.builds(
        Visitor,
        st.integers(0, 12),
        st.integers(1, 18),
        st.integers(1, 12),
        st.none() | st.integers(0, 30),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(
    people=visitors,
    blocks=st.integers(5, 12),
    seqs=st.integers(1, 5),
    budget=st.integers(1, 24),
    depth=st.integers(1, 3),
)
def test_everyone_gets_exactly_its_tokens(
    people: list[Visitor], blocks: int, seqs: int, budget: int, depth: int
) -> None:
    bench = Bench(blocks=blocks, seqs=seqs, budget=budget)
    under_way: deque[tuple[ScheduledStep, StepOutput | None]] = deque()
    clock, cancelled = 0, set()
    while clock < 31 or bench.scheduler.has_work or under_way:
        assert clock < 5000, "no end"
        for index, person in enumerate(people):
            if person.arrives == clock:
                prompt = [index] * person.prompt_len
                bench.add(str(index), prompt, expected(prompt, person.replayed), max_tokens=person.max_tokens)
            if person.leaves == clock and bench.scheduler.abort(str(index)):
                cancelled.add(str(index))
        sent = bench.send()
        if sent is not None:
            under_way.append(sent)
        if under_way and (sent is None or len(under_way) >= depth):
            bench.receive(under_way.popleft())
        clock += 1
    for index, person in enumerate(people):
        if str(index) in cancelled:
            assert str(index) not in bench.finished
            continue
        if person.prompt_len > blocks * 4 - 1:
            assert bench.finished[str(index)].finish_reason == "error"
            continue
        in_all = min(person.max_tokens, blocks * 4 - person.prompt_len)
        whole = expected([index] * person.prompt_len, max(in_all, person.replayed))
        assert bench.tokens.get(str(index), []) == whole[person.replayed :]
        assert bench.finished[str(index)].finish_reason == "length"
    bench.run()
    assert sorted(bench.scheduler._free_slots) == list(range(seqs))
