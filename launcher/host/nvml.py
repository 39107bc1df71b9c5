"""Where GPUs are, by the driver's own library (NVML): for machines whose files do not say. Optional (`xserve[gpu]`).

It makes no device context and leaves nothing loaded behind but the library's code.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

_WORD_BITS = 64
_MOST_NODES = 1024


def nodes_of_gpus(uuids: Iterable[str], library: Any = None) -> dict[str, tuple[int, ...]]:
    """UUID (``GPU-…``) → the NUMA nodes whose memory is close to the card. Cards it knows nothing of are left out.

    `library`: in the place of pynvml. Empty without the library, a driver, or an answer.
    """
    if library is None:
        try:
            library = importlib.import_module("pynvml")
        except ImportError:
            return {}
    found: dict[str, tuple[int, ...]] = {}
    try:
        library.nvmlInit()
    except library.NVMLError:
        return found
    try:
        for uuid in uuids:
            nodes = _nodes(library, uuid)
            if nodes:
                found[uuid] = nodes
    finally:
        library.nvmlShutdown()
    return found


def _nodes(library: Any, uuid: str) -> tuple[int, ...]:
    try:
        card = library.nvmlDeviceGetHandleByUUID(uuid)
        words = library.nvmlDeviceGetMemoryAffinity(card, _MOST_NODES // _WORD_BITS, library.NVML_AFFINITY_SCOPE_NODE)
    except (library.NVMLError, AttributeError):
        return ()  # a virtual machine without the fact, or a driver from before the question
    return tuple(
        place * _WORD_BITS + bit for place, word in enumerate(words) for bit in range(_WORD_BITS) if word >> bit & 1
    )
