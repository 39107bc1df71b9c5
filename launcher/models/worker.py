"""`TransformersWorker`: one rank of a decoder-only Hugging Face model, tensor parallel, with a paged KV cache."""

from __future__ import annotations

import logging
from typing import Any

import torch

from launcher.config import WorkerSettings
from launcher.errors import HostError, InternalError, UsageError
from launcher.host import memory_headroom
from launcher.host.card_holders import Holder, card_holders
from launcher.models import batch_sampler, paged, sampler
from launcher.models import load as loading
from launcher.models.batch import Batch, Chunk, Sample, build
from launcher.models.card_memory import Card, kv_room, no_room_for_weights, shortage
from launcher.models.packed import find_kernel
from launcher.parallel.groups import Groups, all_reduce_of, join
from launcher.parallel.ranks import Layout
from launcher.worker.base import (
    GrammarMask,
    KVCacheConfig,
    KVCacheSpec,
    NewRequest,
    SamplingParams,
    StepOutput,
    StepPlan,
    Worker,
    pack,
    unpack,
)
from launcher.worker.slots import SlotTable

log = logging.getLogger(__name__)

_CPU_SHARE = 0.5
"""Of what the machine and its control groups have left, over all local ranks."""
_WORST_ROW = sampler.Row(SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=1.0, logprobs=20), 0, (0,))
"""What takes the sampler the most memory."""


class TransformersWorker(Worker):
    """See `launcher.worker.base` for the order of calls; the room's page for what happens in each."""

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.groups: Groups | None = None
        self._model: Any = None
        self._state = paged.PagedState()
        self._table = SlotTable(settings.block_size)
        self._pending: tuple[StepPlan, list[Sample], torch.Tensor] | None = None
        """A step with a grammar, between `execute_model` and `sample_tokens`."""

    # --- start ---------------------------------------------------------------------------------------------------

    def init_device(self) -> None:
        settings, ranks = self.settings, self.settings.ranks
        if settings.model is None:
            raise UsageError("the transformers worker needs a model: give --model DIR")
        if ranks.pp_size > 1:
            raise UsageError(f"pipeline size {ranks.pp_size}: the transformers worker shards by tensors only so far")
        torch.set_num_threads(max(1, settings.num_threads))
        if settings.device == "cuda":
            self.device = torch.device("cuda", settings.device_index)
            torch.cuda.set_device(self.device)
        layout = Layout(tp=ranks.tp_size)
        self.groups = join(
            settings.rendezvous,
            layout,
            ranks.tp_rank,
            self.device,
            settings.group_timeout,
            via_host=settings.host_collectives,
            all_reduce=all_reduce_of(settings.worker_config),
        )
        self._communicator = self.groups.communicator("tp")
        self._communicator.on_wait = lambda waiting: self.waits(waiting)
        # Handles and workspaces of the matrix library are made now, so that later measurements count them.
        ones = torch.ones(8, 8, device=self.device)
        self._communicator.all_reduce(ones @ ones)

    def load_model(self) -> None:
        settings = self.settings
        config = loading.read_config(settings.model or "")
        loading.check_shards(config, settings.ranks.tp_size)
        self.dtype = loading.choose_dtype(settings.dtype, self.device, config)
        try:
            self._model = loading.load(
                settings.model or "", config, self.dtype, self.device, self._communicator, self.progress
            )
        except torch.OutOfMemoryError as error:
            raise self._full() from error
        self._state = loading.probe(self._model, self.device)
        self._state.kernel, why_not = find_kernel(self._state.shapes.values(), self.dtype, self.device)
        if self.device.type == "cuda":
            log.info(
                "attention: %s", f"padded, not torch's varlen_attn: {why_not}" if why_not else "torch's varlen_attn"
            )
        difference = loading.prove(self._model, self._state, self.device, self.dtype)
        log.debug("%s: paged attention is within %.1e of its own", type(self._model).__name__, difference)

    def kv_cache_spec(self) -> KVCacheSpec:
        settings, config = self.settings, self._model.config
        per_token = sum(shape.elements for shape in self._state.shapes.values()) * self.dtype.itemsize
        longest = loading.model_length(config)
        return KVCacheSpec(
            bytes_per_block=per_token * settings.block_size,
            block_size=settings.block_size,
            max_model_len=min(longest, settings.max_model_len or longest),
            vocab_size=int(config.get_text_config().vocab_size),
            eos_token_ids=loading.eos_ids(self._model),
            detail=f"{type(self._model).__name__}, {len(self._state.shapes)} layers, {self.dtype}".replace(
                "torch.", ""
            ),
        )

    def determine_available_memory(self) -> int:
        settings = self.settings
        if settings.kv_cache_memory is not None:
            return settings.kv_cache_memory
        if self.device.type == "cpu":
            return int(memory_headroom() * _CPU_SHARE) // max(1, settings.local_world_size)
        return self._room_on_card()

    def initialize_from_config(self, config: KVCacheConfig) -> None:
        try:
            self._state.cache = paged.PagedCache(
                self._state.shapes, config.num_blocks, config.block_size, self.dtype, self.device
            )
        except (torch.OutOfMemoryError, OSError) as error:
            raise HostError(f"no memory for {config.num_blocks} KV blocks: {error}") from error
        self._table = SlotTable(config.block_size)

    def compile_or_warm_up_model(self) -> None:
        """A prompt and one decode, in blocks that nobody owns yet: their content is overwritten before it is read."""
        if self._state.cache is None:
            raise InternalError("warm-up before the KV cache was cut")
        greedy = SamplingParams(temperature=0)
        first = NewRequest(0, pack([1, 2, 3, 4]), 4, pack([0]), 0, greedy)
        one, four, yes = pack([1]), pack([4]), b"\1"
        self.execute_model(StepPlan(step=-2, slots=pack([0]), num_tokens=four, sample=yes, new=(first,)))
        zero, five = pack([0]), pack([5])
        self.execute_model(StepPlan(-1, slots=zero, num_tokens=one, sample=yes, token_slots=zero, tokens=five))
        self.execute_model(StepPlan(step=0, freed=pack([0])))

    # --- service -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute_model(self, plan: StepPlan) -> StepOutput | None:
        rows = self._table.apply(plan)
        self._pending = None
        if not rows:
            return StepOutput(plan.step) if self.settings.ranks.tp_rank == 0 else None
        batch = build(rows, self._table.slots, self._table.block_size)
        logits = self._forward(batch)
        if plan.has_grammar:
            self._pending = (plan, batch.samples, logits)
            return None
        return self._sample(plan, batch.samples, logits, {})

    @torch.inference_mode()
    def sample_tokens(self, mask: GrammarMask | None) -> StepOutput | None:
        if self._pending is None:
            raise InternalError("sample_tokens without a step that waits for its grammar")
        plan, samples, logits = self._pending
        self._pending = None
        return self._sample(plan, samples, logits, _mask_rows(mask))

    def check_health(self) -> str:
        """Raises when the device has failed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return "ok"

    def shutdown(self) -> None:
        self._pending = None
        self._state.cache = None
        self._model = None
        if self.groups is not None:
            self.groups.close()
            self.groups = None

    # --- within --------------------------------------------------------------------------------------------------

    def _forward(self, batch: Batch) -> torch.Tensor:
        """Logits ``[S, V]`` of the rows to sample, on every rank."""
        # A step without samples still needs its keys and values; one row of logits is the least that a model computes.
        wanted = [sample.token for sample in batch.samples] or [0]
        step = paged.Step(batch, self._table.block_size, self.device, wanted, self._state.kernel)
        logits = loading.run(self._model, self._state, step)
        return logits[: len(batch.samples)]

    def _sample(
        self, plan: StepPlan, samples: list[Sample], logits: torch.Tensor, masks: dict[int, bytes]
    ) -> StepOutput | None:
        if self.settings.ranks.tp_rank != 0:
            return None  # the tokens come back with the next plan
        if not samples:
            return StepOutput(plan.step)
        rows = [self._row(sample.slot, masks) for sample in samples]
        tokens, logprobs = self._choose(logits, rows)
        return StepOutput(plan.step, pack(sample.slot for sample in samples), pack(tokens), logprobs)

    def _choose(self, logits: torch.Tensor, rows: list[sampler.Row]) -> sampler.Chosen:
        if self.device.type != "cuda":
            return sampler.sample(logits, rows)
        # NCCL's sums are only queued before: here is where this rank waits for the others.
        self.waits(self.settings.ranks.tp_size > 1 and not self.settings.host_collectives)
        found = batch_sampler.sample(logits, rows)
        self.waits(False)
        return found

    def _row(self, slot: int, masks: dict[int, bytes]) -> sampler.Row:
        state = self._table.slots[slot]
        params = state.sampling
        penalised = params.presence_penalty or params.frequency_penalty
        output = state.output_ids if penalised else ()
        return sampler.Row(params, len(state.token_ids), output, masks.get(slot))

    def _room_on_card(self) -> int:
        """Bytes for the KV cache. Raises HostError, with the whole sum, where not even one sequence has room."""
        settings, spec = self.settings, self.kv_cache_spec()
        own = torch.cuda.memory_allocated(self.device)
        peak = self._profile()
        # Nobody's step is running, and everybody's weights are there.
        self._communicator.all_reduce(torch.zeros(1, device=self.device))
        free, total = torch.cuda.mem_get_info(self.device)
        card = Card(total, total - free, own, peak, settings.device_ranks)
        room = kv_room(card, settings.gpu_memory_utilization)
        least = -(-spec.max_model_len // spec.block_size) * spec.bytes_per_block
        if room < least:
            raise HostError(
                shortage(
                    card,
                    settings.gpu_memory_utilization,
                    name=str(self.device),
                    batch=settings.max_num_batched_tokens,
                    least=least,
                    length=spec.max_model_len,
                    holders=self._holders(),
                )
            )
        return room

    @torch.inference_mode()
    def _profile(self) -> int:
        """Bytes that a step of the largest batch takes at its peak, beyond what is held already."""
        count = self.settings.max_num_batched_tokens
        length = min(count, loading.model_length(self._model.config))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_reserved(self.device)
        try:
            logits = self._forward(_largest(count, length, self.settings.max_num_seqs))
            self._choose(logits, [_WORST_ROW] * len(logits))
            del logits
        except torch.OutOfMemoryError as error:
            raise self._full() from error
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_reserved(self.device) - before
        torch.cuda.empty_cache()
        return peak

    def _full(self) -> HostError:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return HostError(no_room_for_weights(total, free, name=str(self.device), holders=self._holders()))

    def _holders(self) -> list[Holder] | str:
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        return card_holders(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")


def _mask_rows(mask: GrammarMask | None) -> dict[int, bytes]:
    if mask is None:
        return {}
    slots = unpack(mask.slots)
    width = len(mask.rows) // len(slots) if slots else 0
    return {slot: mask.rows[i * width : (i + 1) * width] for i, slot in enumerate(slots)}


def _largest(count: int, length: int, rows: int) -> Batch:
    """`count` tokens in prompts of `length`, `rows` of them sampled."""
    batch = Batch([0] * count, [i % length for i in range(count)], [0] * count)
    for first in range(0, count, length):
        size = min(length, count - first)
        batch.prefills.append(Chunk(first, size, size, [0]))
    batch.samples = [Sample(0, i) for i in range(min(rows, count))]
    return batch
