"""What a worker remembers between steps: one `Slot` per running request, changed only by `SlotTable.apply`.

Plans carry only what changed (see `launcher.worker.step`); this table is the other half of that bargain. It is pure
bookkeeping, without torch, so that every worker (the reference one, the Transformers one, yours) keeps the same books.

What always holds after `apply`: for every scheduled request the slot's `token_ids` reach to ``start + num_tokens``, its
blocks hold that many tokens, and `num_computed` is already past them (the step that was planned counts as done: a
worker that fails within a step is not asked again).
"""

from __future__ import annotations

from typing import NamedTuple

from launcher.errors import InternalError
from launcher.worker.step import NewRequest, SamplingParams, StepPlan, unpack


class Slot:
    """One request's state on a worker."""

    __slots__ = ("block_ids", "num_computed", "prompt_len", "sampling", "token_ids")

    def __init__(self, request: NewRequest) -> None:
        self.token_ids: list[int] = unpack(request.token_ids)
        """Prompt, then output, including tokens not computed yet."""
        self.prompt_len = request.prompt_len
        self.block_ids: list[int] = unpack(request.block_ids)
        self.num_computed = request.num_computed
        self.sampling: SamplingParams = request.sampling

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]


class Scheduled(NamedTuple):
    """One row of a step's batch: compute tokens ``start … start + num_tokens - 1`` of `slot`, sample if asked."""

    slot: int
    start: int
    num_tokens: int
    sample: bool


class SlotTable:
    """`slots` maps slot numbers to their requests. `block_size` is in tokens; 0 = do not check the block tables."""

    def __init__(self, block_size: int = 0) -> None:
        self.slots: dict[int, Slot] = {}
        self.block_size = block_size

    def apply(self, plan: StepPlan) -> list[Scheduled]:
        """Take in a plan's changes in their order; the rows to run. Raises InternalError on a plan that cannot be."""
        self._change(plan)
        rows = []
        for slot, count, sample in zip(unpack(plan.slots), unpack(plan.num_tokens), plan.sample, strict=True):
            state = self._slot(slot, plan, "schedules")
            start = state.num_computed
            self._check(state, slot, start + count, plan)
            state.num_computed = start + count
            rows.append(Scheduled(slot, start, count, bool(sample)))
        return rows

    def _change(self, plan: StepPlan) -> None:
        slots = self.slots
        for slot in unpack(plan.freed):
            self._slot(slot, plan, "frees")
            del slots[slot]
        for request in plan.new:
            if request.slot in slots:
                raise InternalError(f"step {plan.step} fills slot {request.slot}, which is taken")
            slots[request.slot] = Slot(request)
        for slot, block in zip(unpack(plan.block_slots), unpack(plan.block_ids), strict=True):
            self._slot(slot, plan, "gives a block to").block_ids.append(block)
        for slot, token in zip(unpack(plan.token_slots), unpack(plan.tokens), strict=True):
            self._slot(slot, plan, "gives a token to").token_ids.append(token)

    def _slot(self, slot: int, plan: StepPlan, verb: str) -> Slot:
        state = self.slots.get(slot)
        if state is None:
            raise InternalError(f"step {plan.step} {verb} slot {slot}, which is empty")
        return state

    def _check(self, state: Slot, slot: int, end: int, plan: StepPlan) -> None:
        if end > len(state.token_ids):
            known = len(state.token_ids)
            raise InternalError(f"step {plan.step} computes slot {slot} up to token {end}, but only {known} are known")
        if self.block_size and end > len(state.block_ids) * self.block_size:
            blocks = len(state.block_ids)
            raise InternalError(f"step {plan.step} computes slot {slot} up to token {end}, but it has {blocks} blocks")
