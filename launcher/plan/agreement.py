"""What must be the same on every node, as text: node 0 compares it before anything is loaded. Pure but for `read_*`.

Not in it: what each node has for itself (addresses, names, keys, devices, NUMA, log level), and the version of xserve,
which is compared before all else.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

from launcher.config import REFERENCE_WORKER, LaunchConfig
from launcher.plan.devices import through_host
from launcher.plan.resolved import Files, Resolved
from launcher.plan.settings import SECRET_ENDINGS

_DIGEST = 12
"""Hexadecimal digits: for an eye, against mistakes and not against forgers."""
_PLAIN = ("tp", "nnodes", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory")
_ALSO_PLAIN = ("gpu_memory_utilization", "seed")


def agreement(config: LaunchConfig, files: Files, made: Resolved) -> dict[str, str]:
    """Option → value."""
    rows = {_flag(field): _text(getattr(config, field)) for field in (*_PLAIN, *_ALSO_PLAIN)}
    rows |= {
        "--model": files.model_digest or "none",
        "--worker": made.worker.value,
        "--worker-extension": _text(config.worker_extension),
        "--worker-config": _pairs(config.worker_config),
        "--dtype": made.dtype.value,
        "--device": made.device.value,
        # Groups meet in host memory then (with slices of cards, too), on all ranks or on none.
        "--device-ids": "several workers on one" if through_host(made.devices) else "one worker on each",
        "--restart": "on-failure or always" if made.restarts else "never",
    }
    if files.torch_version:
        rows["torch"] = files.torch_version
    return rows


def read_model_digest(directory: Path) -> str:
    """Of config.json and of the weight files' names and sizes: the same model lies elsewhere on another node."""
    hasher = hashlib.sha256()
    try:
        hasher.update((directory / "config.json").read_bytes())
    except OSError:
        hasher.update(b"no config.json")  # a worker of its own may do without
    for path in sorted(directory.glob("*.safetensors"), key=lambda p: p.name):
        hasher.update(f"\0{path.name}\0{path.stat().st_size}".encode())
    return hasher.hexdigest()[:_DIGEST]


def read_torch_version(worker: str) -> str:
    """``2.9``, from the package's metadata; empty where no torch is wanted, or none is installed."""
    if worker == REFERENCE_WORKER:
        return ""
    try:
        return ".".join(importlib.metadata.version("torch").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return ""


def _pairs(values: dict[str, str]) -> str:
    """Sorted; a value whose name sounds like a secret travels as a digest."""

    def shown(name: str, value: str) -> str:
        if not name.lower().endswith(SECRET_ENDINGS):
            return value
        return f"digest {hashlib.sha256(value.encode()).hexdigest()[:_DIGEST]}"

    return ",".join(f"{name}={shown(name, value)}" for name, value in sorted(values.items())) or "none"


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _text(value: Any) -> str:
    if value is None:
        return "not given"
    return f"{value:g}" if isinstance(value, float) else str(value)
