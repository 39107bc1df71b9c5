"""From a model directory to a module on this rank: checked, loaded in slices, sharded, proven.

Order: the configuration is read and refused in words where it must be (before a byte of weights is read); each rank
reads its own slices; the model's layers are asked whether they reach the paged attention at all (`probe`); then one
short sequence is run both by transformers' own attention and by ours (`prove`): a model that would run wrong is refused
at the start, never served.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed import DistributedConfig
from transformers.distributed.utils import TransformersDeviceMesh
from transformers.utils import logging as transformers_logging

from launcher.config import DType
from launcher.errors import HostError, UsageError
from launcher.models import paged
from launcher.models.batch import Batch, Chunk
from launcher.models.shard import localize
from launcher.parallel.communicators import Communicator
from launcher.worker.base import Progress

log = logging.getLogger(__name__)

_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")


def read_config(directory: str) -> Any:
    """The text model's configuration. Raises UsageError when there is none that transformers knows."""
    if not Path(directory, "config.json").is_file():
        raise UsageError(f"model {directory!r} has no config.json: give a directory with a Hugging Face model")
    try:
        config = transformers.AutoConfig.from_pretrained(directory)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"model {directory}: {str(error).splitlines()[0]}") from error
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise UsageError(f"model {directory} is a {config.model_type!r}, which is no causal language model")
    return config


def model_class(config: Any) -> type[Any]:
    found = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found


def choose_dtype(wanted: DType, device: torch.device, config: Any) -> torch.dtype:
    """``auto``: float32 on CPU, else the checkpoint's own."""
    if wanted != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[wanted]
    if device.type == "cpu":
        return torch.float32
    own = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    return own if isinstance(own, torch.dtype) else torch.float32


def check_shards(config: Any, tp: int) -> None:
    """Raises UsageError, with the sizes that work, when `tp` does not divide the heads, or the model has no plan."""
    if tp == 1:
        return
    text = config.get_text_config()
    if not getattr(text, "base_model_tp_plan", None):
        raise UsageError(f"model type {config.model_type!r} has no tensor-parallel plan: use --tp 1")
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    if heads % tp or kv_heads % tp:
        work = ", ".join(str(n) for n in range(1, kv_heads + 1) if kv_heads % n == 0 and heads % n == 0)
        raise UsageError(
            f"--tp {tp} does not divide the model's {heads} attention heads and {kv_heads} key-value heads; "
            f"sizes that work: {work}"
        )


def model_length(config: Any) -> int:
    """The longest sequence, in tokens. Raises UsageError when the configuration does not say."""
    text = config.get_text_config()
    for name in _LENGTH_NAMES:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise UsageError(f"model type {config.model_type!r} does not say how long a sequence may be: give --max-model-len")


def eos_ids(model: Any) -> tuple[int, ...]:
    """Every token that ends an answer, by the generation configuration or the model's own."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config.get_text_config()):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return tuple(sorted(found))


def load(
    directory: str, config: Any, dtype: torch.dtype, device: torch.device, by: Communicator, progress: Progress
) -> Any:
    """The model in eval mode on `device`, this rank's shards only. Collective over `by`.

    Raises UsageError (a style of sharding that is not known), HostError (weights missing or unreadable).
    """
    cls = model_class(config)
    options: dict[str, Any] = {"config": config, "dtype": dtype, "attn_implementation": paged.NAME}
    if by.size > 1:
        cls = _on_mesh(cls, by.size)
        options["distributed_config"] = DistributedConfig(tp_size=by.size)
    try:
        with _progress_from_transformers(progress):
            model = cls.from_pretrained(directory, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise HostError(f"the weights in {directory} cannot be loaded: {error}") from error
    if by.size > 1:
        localize(model, model.tp_plan, by)
    return model.to(device).eval().requires_grad_(False)


def _on_mesh(cls: type[Any], size: int) -> type[Any]:
    """The class, with a mesh of the world that we have joined, in host memory (slices move as plain tensors).

    transformers would make one from environment variables, on whatever accelerator it finds first.
    """

    def prepare(
        _cls: type[Any], distributed_config: DistributedConfig, device_map: Any = None
    ) -> tuple[DistributedConfig, Any, TransformersDeviceMesh]:
        dense = init_device_mesh("cpu", (1, 1, 1, size), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
        return distributed_config, device_map, TransformersDeviceMesh(dense, dense)

    # The same name: transformers looks it up in its tables.
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "prepare_distribute_model": classmethod(prepare)})


@contextmanager
def _progress_from_transformers(progress: Progress) -> Iterator[None]:
    """Turn transformers' progress bars into reports, and keep them off the screen."""

    def hook(_factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> _Bar:
        return _Bar(progress, *args, **options)

    before = transformers_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


class _Bar:
    """As much of a tqdm bar as transformers uses."""

    def __init__(self, report: Progress, iterable: Any = None, *_: Any, total: int | None = None, **options: Any):
        self._report = report
        self._iterable = iterable
        self._total = total if total is not None else len(iterable) if hasattr(iterable, "__len__") else 0
        self._detail = str(options.get("desc") or "loading weights").lower()
        self._done = 0

    def __iter__(self) -> Iterator[Any]:
        for element in self._iterable:
            yield element
            self.update()

    def update(self, n: int = 1) -> None:
        self._done += n
        self._report(self._done, self._total, "tensors", self._detail)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def run(model: Any, state: paged.PagedState, step: paged.Step) -> torch.Tensor:
    """One forward pass: logits ``[W, V]`` at the places of the token axis that the step wants."""
    state.step = step
    try:
        # The whole model, not its parts: some scale or cap their logits after the head.
        found = model(
            input_ids=step.token_ids, position_ids=step.positions, use_cache=False, logits_to_keep=step.wanted
        ).logits
    finally:
        state.step = None
    return found[0]


@torch.inference_mode()
def probe(model: Any, device: torch.device) -> paged.PagedState:
    """Check that every layer reaches the paged attention, and see what it keeps. Collective.

    Raises UsageError, naming the architecture, for a model that would run wrong.
    """
    state = paged.install(model)
    step = paged.Step(_one_sequence(list(range(3, 7)), 0, [0], 4), 4, device, [3])
    try:
        run(model, state, step)
    except TypeError as error:
        raise UsageError(f"{type(model).__name__} cannot be driven by this worker: {error}") from error
    layers = int(model.config.get_text_config().num_hidden_layers)
    missing = sorted(set(range(layers)) - set(state.shapes))
    if missing or len(state.shapes) != layers:
        raise UsageError(
            f"{type(model).__name__} reaches the paged attention in {len(state.shapes)} of its {layers} layers only, "
            "so it would run wrong: this architecture is not supported"
        )
    return state


@torch.inference_mode()
def prove(model: Any, state: paged.PagedState, device: torch.device, dtype: torch.dtype) -> float:
    """Compare ours, in two chunks and single tokens, with transformers' own attention. Collective.

    Returns the largest difference of two logits over the largest logit. Raises UsageError when it is not rounding.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = [(37 * i + 11) % min(vocabulary, 251) for i in range(22)]
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        expected = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(paged.NAME)
    size = 4
    blocks = [5, 2, 7, 0, 3, 6]
    before, state.cache = state.cache, paged.PagedCache(state.shapes, 8, size, dtype, device)
    found = []
    try:
        for first, end in ((0, 7), (7, 20), (20, 21), (21, 22)):
            batch = _one_sequence(ids[first:end], first, blocks, size)
            step = paged.Step(batch, size, device, range(end - first), state.kernel)
            found.append(run(model, state, step).float())
    finally:
        state.cache = before
    difference = float((torch.cat(found) - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    limit = 1e-3 if dtype == torch.float32 else 0.1
    if not difference < limit:
        raise UsageError(
            f"{type(model).__name__} gives other logits with the paged attention (by {difference:.2g} of the largest): "
            "this architecture is not supported"
        )
    return difference


def _one_sequence(ids: list[int], start: int, blocks: list[int], size: int) -> Batch:
    end = start + len(ids)
    batch = Batch(ids, list(range(start, end)), [blocks[p // size] * size + p % size for p in range(start, end)])
    chunk = Chunk(0, len(ids), end, blocks[: -(-end // size)])
    (batch.decodes if len(ids) == 1 else batch.prefills).append(chunk)
    return batch
