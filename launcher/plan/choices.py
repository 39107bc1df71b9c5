"""Each decision of a plan by itself: the command line and the facts in, one value and its reason out. No I/O."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, Literal, NamedTuple, TypeVar

from launcher.config import REFERENCE_WORKER, TRANSFORMERS_WORKER, DType, LaunchConfig
from launcher.errors import HostError, UsageError
from launcher.host import HostFacts
from launcher.plan.checkpoint import Checkpoint
from launcher.process.spec import ChildMethod

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_LATER = {"ray": "Ray", "external_launcher": "torchrun and Slurm"}


T = TypeVar("T")


class Choice(NamedTuple, Generic[T]):
    """A value, and where it came from."""

    value: T
    reason: str


def check_numbers(config: LaunchConfig) -> None:
    """Refuse sizes, times, ports and names that cannot be. Field names are the flags' names."""
    for field in ("tp", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_cache_memory", "ring_bytes"):
        value = getattr(config, field)
        if value is not None and value < 1:
            raise UsageError(f"{_flag(field)} {value}: must be 1 or more")
    if not 0 < config.gpu_memory_utilization <= 1:
        raise UsageError(f"--gpu-memory-utilization {config.gpu_memory_utilization}: must be above 0, at most 1")
    for field in ("ready_timeout", "shutdown_timeout"):
        seconds = getattr(config, field)
        if not (math.isfinite(seconds) and seconds >= 0):
            raise UsageError(f"{_flag(field)} {seconds}: must be a number of seconds, 0 or more")
    check_nodes(config)
    if not 0 <= config.port <= 65535:
        raise UsageError(f"--port {config.port}: must be within 0 … 65535 (0: any free one)")
    if config.worker_extension is not None:
        check_dotted("--worker-extension", config.worker_extension, "module:Class")


def check_nodes(config: LaunchConfig) -> None:
    """Refuse numbers of nodes that cannot be."""
    nnodes, rank = config.nnodes, config.node_rank
    if nnodes < 1:
        raise UsageError(f"--nnodes {nnodes}: must be 1 or more")
    if not 0 <= rank < nnodes:
        ranks = {1: "rank 0 only", 2: "ranks 0 and 1"}.get(nnodes, f"ranks 0 to {nnodes - 1}")
        raise UsageError(f"--node-rank {rank}: --nnodes {nnodes} has {ranks}")
    if config.tp % nnodes:
        fits = [size for size in range(max(1, config.tp - nnodes), config.tp + nnodes + 1) if size % nnodes == 0]
        raise UsageError(
            f"--tp {config.tp} cannot be spread over --nnodes {nnodes}, as many ranks on each: use --tp {_either(fits)}"
        )
    if not 0 < config.master_port <= 65535:
        raise UsageError(f"--master-port {config.master_port}: must be within 1 … 65535")
    if not (math.isfinite(config.join_timeout) and config.join_timeout > 0):
        raise UsageError(f"--join-timeout {config.join_timeout}: must be a number of seconds above 0")


def choose_worker(config: LaunchConfig) -> Choice[str]:
    """The worker class as ``module:Class``."""
    asked = config.worker
    if asked is None:
        if config.model is None:
            return Choice(REFERENCE_WORKER, "neither --model nor --worker given")
        return Choice(_transformers(), "--model given")
    if asked == "reference":
        return Choice(REFERENCE_WORKER, "--worker")
    if asked == "transformers":
        if config.model is None:
            raise UsageError("--worker transformers needs a model: give --model DIR or a Hugging Face id")
        return Choice(_transformers(), "--worker")
    check_dotted("--worker", asked, "reference, transformers or module:Class")
    return Choice(asked, "--worker")


def choose_backend(config: LaunchConfig) -> Choice[str]:
    """``uni``, ``mp``, ``mp-nodes`` (mp over several nodes) or ``module:Class``."""
    asked = config.backend
    if config.nnodes > 1 and asked not in (None, "mp"):
        raise UsageError(f"--backend {asked} runs on one machine, not on --nnodes {config.nnodes}: use --backend mp")
    if config.nnodes > 1:
        return Choice("mp-nodes", f"--nnodes {config.nnodes}: a process each, on every node")
    if asked is None:
        return Choice("uni" if config.tp == 1 else "mp", f"default for world size {config.tp}")
    if asked == "uni" and config.tp > 1:
        raise UsageError(f"--backend uni runs one rank, inside the engine core, not --tp {config.tp}: use --backend mp")
    if asked in _LATER:
        raise UsageError(f"--backend {asked} ({_LATER[asked]}) is not in this version: use mp, uni or module:Class")
    if asked not in ("uni", "mp"):
        check_dotted("--backend", asked, "uni, mp or module:Class")
    return Choice(asked, "--backend")


def choose_device(config: LaunchConfig, facts: HostFacts, worker: str) -> Choice[Literal["cpu", "cuda"]]:
    """``cpu`` or ``cuda``; refuses what this host does not have."""
    if worker == REFERENCE_WORKER:
        return Choice("cpu", "the reference worker computes nothing")
    if config.device == "cpu":
        return Choice("cpu", "--device")
    lack = _no_cuda(facts)
    if lack and config.device == "cuda":
        raise UsageError(f"--device cuda: {lack}; or use --device cpu")
    if facts.gpus_present and not facts.gpus and config.device == "auto" and facts.torch_cuda is not None:
        # Somebody has set it, by mistake or not: a model of many GPUs shall not come up on the CPU without a word.
        raise UsageError(f"{lack}; or say --device cpu")
    if lack:
        return Choice("cpu", lack)
    if config.tp // config.nnodes > max(facts.gpus, len(config.device_ids)):
        raise UsageError(_too_few_gpus(config, facts))
    return Choice("cuda", "--device" if config.device == "cuda" else f"{facts.gpus} GPUs visible")


def _too_few_gpus(config: LaunchConfig, facts: HostFacts) -> str:
    hidden = f" ({facts.gpu_note})" if facts.gpu_note else ""
    first = facts.gpu_entries[0] if facts.gpu_entries else "0"
    here = config.tp // config.nnodes
    ranks = f"world size {config.tp} (--tp {config.tp})"
    if config.nnodes > 1:
        ranks = f"{here} ranks a node (--tp {config.tp} over --nnodes {config.nnodes})"
        ranks += " are more" if here > 1 else " is more"
    else:
        ranks += " is larger"
    return (
        f"{ranks} than the {facts.gpus} visible GPUs{hidden}:"
        f" use --tp {facts.gpus * config.nnodes} or less, or --device cpu, or rehearse with several ranks on one GPU"
        f" (--device-ids {first},{first}), or spread them over machines (--nnodes)"
    )


def choose_dtype(config: LaunchConfig, device: str, model: Checkpoint | None) -> Choice[DType]:
    """The checkpoint's on CUDA, float32 on CPU; ``auto`` stays where no model of ours is loaded."""
    if config.dtype != "auto":
        return Choice(config.dtype, "--dtype")
    if model is None:
        return Choice("auto", "the worker decides")
    if device == "cpu":
        return Choice("float32", "default on CPU")
    known: dict[str, DType] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
    if model.dtype not in known:
        return Choice("auto", f"the checkpoint's {model.dtype}: the worker decides")
    return Choice(known[model.dtype], "the checkpoint's")


def choose_start(config: LaunchConfig, facts: HostFacts, at_exec: Sequence[str] = ()) -> Choice[ChildMethod]:
    """How engine cores and their workers come to be.

    `at_exec`: variables for the workers that only an exec can give them (LD_PRELOAD, the allocators'). The helper is
    executed, so forkserver has them; a fork of this process has not.
    """
    if not (facts.pidfd and facts.memfd):
        missing = "pidfd_open (Linux 5.3)" if not facts.pidfd else "memfd_create (Linux 3.17)"
        raise HostError(f"this kernel, or the sandbox around it, lacks {missing}, which xserve is built on")
    if config.start_method == "spawn":
        return Choice("spawn", "--start-method")
    unsafe = list(facts.unsafe_to_fork)
    if config.start_method == "fork" and (at_exec or unsafe):
        reasons = [*unsafe, *(f"{name} takes effect at an exec only" for name in at_exec)]
        raise UsageError(f"--start-method fork is not safe here: {'; '.join(reasons)}: use forkserver or spawn")
    if config.start_method == "auto" and unsafe:
        return Choice("spawn", f"forced: {'; '.join(unsafe)}")
    if config.start_method == "fork":
        return Choice("fork", "--start-method; workers are forked from their engine core before it has a thread")
    asked = "--start-method" if config.start_method == "forkserver" else "default"
    return Choice("forkserver", f"{asked}; imports are done once, in a clean process that all are forked from")


def check_dotted(flag: str, value: str, forms: str) -> None:
    """Refuse what is not ``module:Class``, or whose module's top package is not there. Imports nothing."""
    if not _DOTTED.fullmatch(value):
        raise UsageError(f"{flag} {value!r} is not {forms} (for example my_package.my_module:MyClass)")
    top = value.partition(":")[0].partition(".")[0]
    if top in sys.modules or top in sys.builtin_module_names:
        return
    if importlib.machinery.PathFinder.find_spec(top) is None and importlib.util.find_spec(top) is None:
        raise UsageError(
            f"{flag} {value}: there is no module {top!r} on the Python path:"
            " install it, or put its directory on PYTHONPATH"
        )


def _transformers() -> str:
    if importlib.util.find_spec("transformers") is None:
        raise HostError("serving a model needs transformers, which is not installed: pip install 'xserve[serve]'")
    return TRANSFORMERS_WORKER


def _no_cuda(facts: HostFacts) -> str:
    """Why there is no CUDA here; empty when there is."""
    if facts.gpus_present == 0:
        return "no NVIDIA GPU on this machine"
    if facts.gpus == 0:
        return facts.gpu_note or "no GPU is visible"
    if facts.torch_cuda is None:
        return f"{facts.gpus} GPUs are here, but the installed torch is built without CUDA: install a CUDA build"
    return ""


def _either(sizes: Sequence[int]) -> str:
    return " or ".join(str(size) for size in sizes)


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def served_name(config: LaunchConfig, worker: str, model: Path | None) -> Choice[str]:
    """What clients call the model: as told, else the hub id as typed, the directory's name, or the worker's."""
    if config.served_model_name:
        return Choice(config.served_model_name, "--served-model-name")
    if config.model is not None and model is not None:
        # A directory of the hub's cache is called by a hash; what was typed is its name.
        typed = Path(config.model).name == model.name or model.parent.name != "snapshots"
        return Choice(model.name if typed else config.model, "--model")
    return Choice("reference" if worker == REFERENCE_WORKER else worker.partition(":")[2], "the worker's name")
