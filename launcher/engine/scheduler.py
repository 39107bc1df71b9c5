"""Who computes what in the next step: continuous batching, chunked prefill, paged KV blocks, preemption. Pure: no I/O.

A request *waits* (no slot, no block, nothing computed) or *runs* (a slot, and blocks for every token it has). One step:

1. Decodes, oldest first: each running request that lacks one token's keys and values takes 1 of the token budget, and a
   block when its last one is full.
2. Prefills that were cut short, oldest first: as many tokens as the budget has left.
3. Waiting requests in order, while a slot, budget and blocks for *all* tokens they have are there. The first that does
   not fit holds the others back, so none starves. (One preempted in this step is the first, and cannot fit: an older
   one has taken of the blocks that it had, or it lacked one itself.)

No block left in 1: the youngest running request gives up its slot and blocks, and is the next to be admitted, as
prompt + output. It may be the one that asked. (2 needs no block: a prefill got all of them when admitted.) Always:

- every running request is older than every waiting one, and both are kept in order of age;
- the oldest one can get every block (`Limits.max_len`), so whoever has work makes progress;
- what the workers know of a slot is the sum of the plans sent, in order: `freed`, `new`, blocks, tokens.

`schedule` counts the tokens of a plan as computed at once, `update` adds the sampled ones when the answer is there.
Several plans may be under way; a request whose next token is being sampled is left out of plans until it is known. An
abort or preemption in between leaves its row in the plan under way, and the answer to that row is dropped: workers run
plans in order, so the slot and blocks may be given away in the next plan already.
"""

from __future__ import annotations

import struct
from collections import OrderedDict

from launcher.engine.kv_blocks import BlockPool
from launcher.engine.messages import AddRequest, RequestOutput, SchedulerStats
from launcher.engine.request import Limits, Request, refusal, token_column
from launcher.engine.scheduled import Sampled, ScheduledStep
from launcher.errors import InternalError
from launcher.executor.base import NewRequest, StepOutput, StepPlan, pack

_INT32 = struct.Struct("<i")


class _Draft:
    """A plan in the making."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: dict[Request, int] = {}
        """Tokens to compute, in batch order."""
        self.new: list[NewRequest] = []
        self.blocks: list[tuple[int, int]] = []
        """(slot, block appended to it)"""

    def take(self, request: Request) -> None:
        count = min(request.to_compute, self.budget)
        self.rows[request] = count
        self.budget -= count


class Scheduler:
    """One engine core's requests. One thread."""

    def __init__(self, pool: BlockPool, limits: Limits, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.pool = pool
        self.limits = limits
        self.max_num_batched_tokens = max_num_batched_tokens
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        # News for the workers since the last plan.
        self._freed: list[int] = []
        self._tokens: list[tuple[Sampled, int]] = []
        self._steps = self._preemptions = self._generated = self._prompted = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def unfinished(self) -> list[tuple[str, str]]:
        """(key, the client's request id) of every request here."""
        return [(key, request.request_id) for key, request in self._requests.items()]

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            free_blocks=self.pool.free,
            total_blocks=self.pool.num_blocks,
            preemptions=self._preemptions,
            steps=self._steps,
            generated_tokens=self._generated,
            prompt_tokens=self._prompted,
        )

    # --- requests come and go ----------------------------------------------------------------------------------------

    def add(self, key: str, add: AddRequest) -> RequestOutput | None:
        """Queue a request under `key`. Its last output at once when it is refused, or a replay that was complete."""
        if key in self._requests:
            return _failed(add, f"request id {add.request_id!r} is in use; choose another")
        try:
            prompt, output = token_column(add.prompt_token_ids), token_column(add.output_token_ids)
        except ValueError:
            return _failed(add, "token ids must be packed int32, 4 bytes each")
        if why := refusal(add, prompt, output, self.limits):
            return _failed(add, why)
        request = Request(key, add, prompt, output, self.limits)
        if output:
            reason, stop_token = request.finish_after(output[-1])
            if reason is not None:
                return RequestOutput(add.request_id, b"", reason, stop_token)
        self._requests[key] = self._waiting[key] = request
        return None

    def abort(self, key: str) -> bool:
        """Forget a request, whatever it is doing; False when it is not here (it had ended already)."""
        request = self._requests.get(key)
        if request is None:
            return False
        self._end(request)
        return True

    def _end(self, request: Request) -> None:
        del self._requests[request.key]
        if request.slot < 0:
            del self._waiting[request.key]
        else:
            self._running.remove(request)
            self._vacate(request)

    def _vacate(self, request: Request) -> None:
        """Slot and blocks are free for the next plan."""
        self._freed.append(request.slot)
        self._free_slots.append(request.slot)
        self.pool.release(request.key)
        request.slot = -1
        request.room = 0

    # --- a plan ------------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """The next plan; None when there is nothing to compute (or all that is there is under way)."""
        draft = _Draft(self.max_num_batched_tokens)
        self._decode(draft)
        self._go_on_prefilling(draft)
        self._admit(draft)
        return self._seal(draft) if draft.rows else None

    def _decode(self, draft: _Draft) -> None:
        for request in list(self._running):
            if draft.budget == 0:
                return
            # A slot of -1: preempted by one that came before it in this loop.
            if request.slot >= 0 and request.to_compute == 1 and self._make_room(request, draft):
                draft.take(request)

    def _go_on_prefilling(self, draft: _Draft) -> None:
        for request in self._running:
            if draft.budget == 0:
                return
            if request.to_compute > 1:
                draft.take(request)

    def _make_room(self, request: Request, draft: _Draft) -> bool:
        """Blocks for every token that `request` has, taken from the youngest if need be; False: it was the youngest."""
        if len(request.tokens) <= request.room:
            return True
        while (added := self.pool.grow(request.key, len(request.tokens))) is None:
            victim = self._running[-1]
            self._preempt(victim, draft)
            if victim is request:
                return False
        request.room += len(added) * self.pool.block_size
        draft.blocks.extend((request.slot, block) for block in added)
        return True

    def _preempt(self, request: Request, draft: _Draft) -> None:
        # Rows are taken from the oldest to the youngest: the victim has none in this plan yet.
        assert request not in draft.rows
        self._running.pop()
        self._vacate(request)
        request.num_computed = 0
        request.preemptions += 1
        self._waiting[request.key] = request
        self._waiting.move_to_end(request.key, last=False)
        self._preemptions += 1

    def _admit(self, draft: _Draft) -> None:
        while self._waiting and self._free_slots and draft.budget > 0:
            request = next(iter(self._waiting.values()))
            blocks = self.pool.grow(request.key, len(request.tokens))
            if blocks is None:
                return
            del self._waiting[request.key]
            self._running.append(request)
            request.slot = self._free_slots.pop()
            request.room = len(blocks) * self.pool.block_size
            sequence, table = request.tokens.tobytes(), pack(blocks)
            draft.new.append(NewRequest(request.slot, sequence, request.prompt_len, table, 0, request.sampling))
            draft.take(request)
            if request.preemptions == 0:
                self._prompted += request.prompt_len

    def _seal(self, draft: _Draft) -> ScheduledStep:
        # What a preempted request was to be told is void: it comes back whole.
        tokens = [(row.slot, token) for row, token in self._tokens if row.is_current]
        sampled = []
        ends = bytearray()
        for request, count in draft.rows.items():
            request.num_computed += count
            is_end = request.num_computed == len(request.tokens)
            ends.append(is_end)
            if is_end:
                sampled.append(Sampled(request, request.slot, request.preemptions))
        self._steps += 1
        plan = StepPlan(
            step=self._steps,
            slots=pack([request.slot for request in draft.rows]),
            num_tokens=pack(draft.rows.values()),
            sample=bytes(ends),
            new=tuple(draft.new),
            freed=pack(self._freed),
            block_slots=pack([slot for slot, _ in draft.blocks]),
            block_ids=pack([block for _, block in draft.blocks]),
            token_slots=pack([slot for slot, _ in tokens]),
            tokens=pack([token for _, token in tokens]),
        )
        self._freed.clear()
        self._tokens.clear()
        return ScheduledStep(plan, tuple(sampled))

    # --- its answer --------------------------------------------------------------------------------------------------

    def update(self, step: ScheduledStep, output: StepOutput | None) -> list[tuple[str, RequestOutput]]:
        """Take in the workers' answer to `step`: (key, new token) of every request that is still meant by it."""
        tokens = step.tokens_of(output)
        logprobs = output.logprobs if output is not None else ()
        news = []
        for index, (row, token) in enumerate(zip(step.sampled, tokens, strict=True)):
            if not row.is_current:
                continue
            request = row.request
            request.tokens.append(token)
            self._generated += 1
            reason, stop_token = request.finish_after(token)
            entry = logprobs[index] if logprobs else None
            shown = (entry,) if entry is not None else ()
            news.append(
                (request.key, RequestOutput(request.request_id, _INT32.pack(token), reason, stop_token, shown)),
            )
            if reason is None:
                self._tokens.append((row, token))
            else:
                self._end(request)
        return news

    def check(self) -> None:
        """`InternalError` when an invariant of this file does not hold. For tests."""
        self.pool.check()
        slots = [request.slot for request in self._running]
        if sorted(slots + self._free_slots) != list(range(len(slots) + len(self._free_slots))):
            raise InternalError(f"slots are lost or doubled: running {slots}, free {self._free_slots}")
        if self._requests.keys() != {r.key for r in self._running} | self._waiting.keys():
            raise InternalError("a request neither runs nor waits")
        for request in self._waiting.values():
            if request.slot >= 0 or request.num_computed or self.pool.blocks_of(request.key):
                raise InternalError(f"waiting request {request.key} has a slot, tokens or blocks")
        for request in self._running:
            held = len(self.pool.blocks_of(request.key)) * self.pool.block_size
            if not request.num_computed <= request.room == held:
                raise InternalError(f"running request {request.key} lacks blocks for its computed tokens")


def _failed(add: AddRequest, why: str) -> RequestOutput:
    return RequestOutput(add.request_id, b"", "error", error=why)
