"""The reference worker: no model, no device, deterministic tokens, faults on demand.

Token i of a request is a function of its prompt and i alone (`expected_tokens`), computed from what the *plans* put
into the slot table. The worker checks whatever it is told against what it knows, and raises `InternalError` at the
first thing that does not fit:

* the sequence in a slot must be the prompt and exactly the tokens that were sampled for it, in order;
* a KV cache of fingerprints stands in for the real one: computing tokens writes the fingerprint of the sequence up to
  there into the block that the block table names, and the next step must find it there. A wrong block table, a block
  given to two requests or a chunk computed twice or never shows at once.

Settings (``--worker-config key=value``) are the fields of `ReferenceConfig`; faults come from ``XSERVE_FAULT``.
"""

from __future__ import annotations

import os
import signal
import time
import zlib
from array import array
from collections.abc import Sequence

import msgspec

from launcher.config import WorkerSettings
from launcher.errors import InternalError, UsageError
from launcher.worker.base import Worker
from launcher.worker.injury import make_injury
from launcher.worker.slots import Scheduled, Slot, SlotTable
from launcher.worker.step import (
    GrammarMask,
    KVCacheConfig,
    KVCacheSpec,
    StepOutput,
    StepPlan,
    TokenLogprobs,
    pack,
    unpack,
)

FIRST_TOKEN = 256
"""Below are the bytes of the reference tokenizer's input."""
VOCAB = 32000


class ReferenceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``worker_config`` of the reference worker, typed."""

    step_ms: float = 0.0
    """Length of a step."""
    token_ms: float = 0.0
    """Added to a step for each token that it computes."""
    import_ms: float = 0.0
    init_ms: float = 0.0
    load_ms: float = 0.0
    warm_up_ms: float = 0.0
    vocab: int = VOCAB
    max_model_len: int = 4096
    bytes_per_token: int = 1024
    """KV bytes: what makes a number of blocks of an amount of memory. None of it is really taken."""
    poison_token: int = -1
    """A prompt with this token in it kills the worker (SIGKILL) in its first step. -1: none does."""
    fault_dir: str = ""
    """A directory for the marks of ``,once`` faults."""


def seed_of(prompt: Sequence[int]) -> int:
    """What a request's tokens are drawn from: a checksum of its prompt."""
    return zlib.crc32(array("i", prompt).tobytes())


def token_at(seed: int, index: int, vocab: int = VOCAB) -> int:
    """Token `index` of the request with that seed: in 256 … vocab - 1."""
    mixed = (seed * 0x9E3779B1 + (index + 1) * 0x85EBCA77) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 12)) * 0x297A2D39) & 0xFFFFFFFF
    return FIRST_TOKEN + (mixed ^ (mixed >> 15)) % (vocab - FIRST_TOKEN)


def expected_tokens(prompt: Sequence[int], n: int, vocab: int = VOCAB) -> list[int]:
    """The first `n` tokens that the reference worker answers to `prompt`."""
    seed = seed_of(prompt)
    return [token_at(seed, index, vocab) for index in range(n)]


class _Record:
    """What the worker remembers of a slot besides the slot table, to check the plans against."""

    __slots__ = ("checked", "free_choice", "prints", "seed", "slot")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.seed = seed_of(slot.token_ids[: slot.prompt_len])
        self.checked = 0
        """Output tokens found to be right so far."""
        self.free_choice = False
        """A grammar chose a token: what follows can't be foretold."""
        self.prints: list[int] = []
        """Fingerprint of the sequence up to the end of each block (of its last one: up to what is computed)."""


class ReferenceWorker(Worker):
    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        try:
            self.config = msgspec.convert(settings.worker_config, ReferenceConfig, strict=False)
        except msgspec.ValidationError as error:
            known = ", ".join(ReferenceConfig.__struct_fields__)
            raise UsageError(f"--worker-config of the reference worker: {error}; it knows {known}") from None
        if self.config.vocab <= FIRST_TOKEN:
            raise UsageError(f"--worker-config vocab={self.config.vocab}: write {FIRST_TOKEN + 1} or more")
        self.vocab = self.config.vocab
        self.injury = make_injury(settings.ranks.rank, settings, lambda: self.progress)
        self.table = SlotTable(settings.block_size)
        self.num_blocks = 0
        self._records: dict[int, _Record] = {}
        self._cache: dict[int, int] = {}
        """Block → fingerprint: the KV cache."""
        self._unsampled: list[Scheduled] = []
        """Rows of a step that waits for its grammar mask."""
        self._step = 0
        _sleep(self.config.import_ms)
        self.injury.strike("import")

    def init_device(self) -> None:
        self.injury.strike("init")
        _sleep(self.config.init_ms)

    def load_model(self) -> None:
        _sleep(self.config.load_ms)

    def kv_cache_spec(self) -> KVCacheSpec:
        return KVCacheSpec(
            bytes_per_block=self.config.bytes_per_token * self.settings.block_size,
            block_size=self.settings.block_size,
            max_model_len=self.config.max_model_len,
            vocab_size=self.vocab,
            detail="reference worker: fingerprints in place of keys and values",
        )

    def initialize_from_config(self, config: KVCacheConfig) -> None:
        self.num_blocks = config.num_blocks
        self.table = SlotTable(config.block_size)
        self._records.clear()
        self._cache.clear()

    def compile_or_warm_up_model(self) -> None:
        _sleep(self.config.warm_up_ms)

    def execute_model(self, plan: StepPlan) -> StepOutput | None:
        self.injury.strike("step")
        rows = self.table.apply(plan)
        for freed in unpack(plan.freed):
            self._records.pop(freed, None)
        for request in plan.new:
            slot = self.table.slots[request.slot]
            self._records[request.slot] = _Record(slot)
            if self.config.poison_token in slot.token_ids[: slot.prompt_len]:
                os.kill(os.getpid(), signal.SIGKILL)
        self._step = plan.step
        for row in rows:
            self._compute(row)
        _sleep(self.config.step_ms + self.config.token_ms * sum(row.num_tokens for row in rows))
        sampled = [row for row in rows if row.sample]
        if plan.has_grammar:
            self._unsampled = sampled
            return None
        return self._sample(sampled, {})

    def sample_tokens(self, mask: GrammarMask | None) -> StepOutput | None:
        rows, self._unsampled = self._unsampled, []
        allowed = {}
        if mask is not None:
            slots = unpack(mask.slots)
            width = len(mask.rows) // len(slots) if slots else 0
            allowed = {slot: mask.rows[i * width : (i + 1) * width] for i, slot in enumerate(slots)}
        return self._sample(rows, allowed)

    def check_health(self) -> str:
        return "ok"

    def shutdown(self) -> None:
        self.injury.strike("cleanup")

    # --- one row -----------------------------------------------------------------------------------------------------

    def _compute(self, row: Scheduled) -> None:
        """ "Compute" the row's tokens: check what is there, then write the new fingerprints."""
        record = self._records[row.slot]
        self._check_output(record, row)
        state, size = record.slot, self.table.block_size
        if not record.prints and row.start:
            # A request that comes with computed tokens (a cached prefix): the cache must really hold them.
            record.prints = _fingerprints(state.token_ids, 0, row.start, size, [])
        self._check_cache(record, row)
        done = row.start // size
        record.prints = _fingerprints(
            state.token_ids, done * size, row.start + row.num_tokens, size, record.prints[:done]
        )
        for index in range(done, len(record.prints)):
            block = state.block_ids[index]
            if not 0 <= block < self.num_blocks:
                raise self._wrong(row, f"is given block {block}; there are {self.num_blocks}")
            self._cache[block] = record.prints[index]

    def _check_output(self, record: _Record, row: Scheduled) -> None:
        if record.free_choice:
            return
        state = record.slot
        for index in range(record.checked, len(state.token_ids) - state.prompt_len):
            token, right = state.token_ids[state.prompt_len + index], token_at(record.seed, index, self.vocab)
            if token != right:
                raise self._wrong(row, f"has {token} as output token {index}; {right} was sampled")
        record.checked = len(state.token_ids) - state.prompt_len

    def _check_cache(self, record: _Record, row: Scheduled) -> None:
        """The whole sequence when it has just got a block or more, else its last block: cheap, and no error stays."""
        blocks, size = record.slot.block_ids, self.table.block_size
        last = len(record.prints) - 1
        first = 0 if row.start % size == 0 or row.num_tokens > 1 else last
        for index in range(first, last + 1):
            found = self._cache.get(blocks[index])
            if found != record.prints[index]:
                what = "was never written" if found is None else "holds another sequence"
                raise self._wrong(row, f"relies on block {blocks[index]} (number {index} of its table), which {what}")

    def _sample(self, rows: Sequence[Scheduled], allowed: dict[int, bytes]) -> StepOutput | None:
        tokens = [self._next_token(row, allowed.get(row.slot)) for row in rows]
        if self.settings.ranks.rank != self.settings.ranks.world_size - self.settings.ranks.tp_size:
            return None
        logprobs = [
            _logprobs(token, self._records[row.slot].slot.sampling.logprobs, self.vocab)
            for row, token in zip(rows, tokens, strict=True)
        ]
        return StepOutput(
            step=self._step,
            slots=pack(row.slot for row in rows),
            tokens=pack(tokens),
            logprobs=tuple(logprobs) if any(logprobs) else (),
        )

    def _next_token(self, row: Scheduled, mask: bytes | None) -> int:
        record = self._records[row.slot]
        end, known = row.start + row.num_tokens, len(record.slot.token_ids)
        if end != known:
            raise self._wrong(row, f"is to sample after token {end}, but its sequence has {known}")
        if mask is None:
            return token_at(record.seed, known - record.slot.prompt_len, self.vocab)
        record.free_choice = True
        for index, byte in enumerate(mask):
            if byte:
                return index * 8 + (byte & -byte).bit_length() - 1
        raise self._wrong(row, "has a grammar mask that allows no token")

    def _wrong(self, row: Scheduled, what: str) -> InternalError:
        return InternalError(f"step {self._step}: slot {row.slot} {what}")


def _fingerprints(tokens: Sequence[int], begin: int, end: int, size: int, before: list[int]) -> list[int]:
    """`before` (the blocks up to `begin`, a multiple of `size`) and one for each block of tokens begin … end - 1.

    Each is a checksum of the whole sequence up to the block's end or `end`.
    """
    prints = list(before)
    for start in range(begin, end, size):
        part = array("i", tokens[start : min(end, start + size)]).tobytes()
        prints.append(zlib.crc32(part, prints[-1] if prints else 0))
    return prints


def _logprobs(token: int, best: int, vocab: int) -> TokenLogprobs | None:
    """A distribution that is sure of its token: probability 1; the others follow in the order of their ids."""
    if best < 0:
        return None
    others = [(token + 1 + i) % vocab for i in range(max(0, best - 1))]
    ids = [token, *([token, *others] if best else [])]
    values = [0.0, *([0.0, *(-20.0 - i for i in range(len(others)))] if best else [])]
    return TokenLogprobs(pack(ids), array("f", values).tobytes(), 0)


def _sleep(milliseconds: float) -> None:
    if milliseconds > 0:
        time.sleep(milliseconds / 1000)
