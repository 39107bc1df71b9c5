"""Which models the Transformers worker can carry: refused in words where it cannot, before anything is started.

`architectures` says what was seen to be right, and what is known to run wrong. A type in neither table that
transformers has as a causal language model is let through: the worker proves it at load. The list of those is taken
from the text of transformers' own table, since importing it costs seconds.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from launcher.errors import UsageError
from launcher.plan.architectures import REFUSED, SINGLE_RANK, TENSOR_PARALLEL
from launcher.plan.checkpoint import Checkpoint

_TABLE = re.compile(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES\b[^\n]*\n(.*?)^\)", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"""^\s*\(\s*["']([\w.-]+)["']""", re.MULTILINE)


def causal_lm_types() -> frozenset[str]:
    """Model types that transformers has as causal language models; empty when they cannot be told."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return frozenset()
    try:
        text = (Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py").read_text()
    except OSError:
        return frozenset()
    table = _TABLE.search(text)
    return frozenset(_ROW.findall(table.group(1))) if table else frozenset()


def check_architecture(model: Checkpoint, tp: int, known: frozenset[str]) -> None:
    """Refuse a type that runs wrong, one that `known` (see `causal_lm_types`) lacks, or one that cannot be sharded."""
    kind, where = model.model_type, model.directory
    if kind in REFUSED:
        raise UsageError(f"--model {where} is a {kind}, which is not supported: {REFUSED[kind]}")
    if kind in SINGLE_RANK and tp > 1:
        raise UsageError(f"--tp {tp}: a {kind} ({where}) has no tensor-parallel plan in transformers: use --tp 1")
    if is_proven(kind) or kind in known or not known:
        return
    raise UsageError(
        f"--model {where} has the unknown architecture {kind!r}: it is no causal language model that transformers has;"
        f" known to work are {', '.join(sorted(TENSOR_PARALLEL | SINGLE_RANK))}"
    )


def is_proven(model_type: str) -> bool:
    """Whether it was seen to run right."""
    return model_type in TENSOR_PARALLEL or model_type in SINGLE_RANK
