"""A plan that is under way, and what its answer will mean. Pure."""

from __future__ import annotations

from typing import NamedTuple

from launcher.engine.request import Request
from launcher.errors import InternalError
from launcher.executor.base import StepOutput, StepPlan, pack, unpack


class Sampled(NamedTuple):
    """A row whose next token a plan samples. It is still meant if `request` has this slot and this life."""

    request: Request
    slot: int
    life: int
    """`Request.preemptions` when the plan was made."""

    @property
    def is_current(self) -> bool:
        return self.request.slot == self.slot and self.request.preemptions == self.life


class ScheduledStep(NamedTuple):
    """A plan on its way, and what its answer will mean."""

    plan: StepPlan
    sampled: tuple[Sampled, ...]

    def tokens_of(self, output: StepOutput | None) -> list[int]:
        """The sampled tokens, one for each of `sampled`. `InternalError` when this is not the answer to this plan."""
        if output is None:
            if self.sampled:
                raise InternalError(
                    f"step {self.plan.step}: the output rank sampled nothing, {len(self.sampled)} were due"
                )
            return []
        if output.step != self.plan.step:
            raise InternalError(f"step {self.plan.step}: the output rank answered for step {output.step}")
        if output.slots != pack(row.slot for row in self.sampled):
            due = [row.slot for row in self.sampled]
            raise InternalError(f"step {self.plan.step}: tokens for slots {unpack(output.slots)}, due were {due}")
        tokens = unpack(output.tokens)
        if len(tokens) != len(self.sampled) or len(output.logprobs) not in (0, len(tokens)):
            raise InternalError(
                f"step {self.plan.step}: {len(tokens)} tokens and {len(output.logprobs)} logprobs "
                f"for {len(self.sampled)} sampled requests"
            )
        return tokens
