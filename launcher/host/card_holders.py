"""Who holds memory on a GPU, by the driver's own library. It is optional, and loaded only when somebody asks: a process
that never has trouble with a card never loads it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

from launcher.host.files import ROOT

_SHOWN = 60
"""Characters of a command line."""


class Holder(NamedTuple):
    """One process with memory on a card."""

    pid: int
    title: str
    """Its command line, cut; empty where /proc does not show it (another container's)."""
    size: int | None
    """Bytes; None where the driver does not tell."""


def card_holders(uuid: str, library: Any = None, root: Path = ROOT) -> list[Holder] | str:
    """Everybody with memory on the card `uuid` (``GPU-…``), the greatest first; or one line about why it is not known.

    `library`: in the place of pynvml.
    """
    if library is None:
        try:
            library = importlib.import_module("pynvml")
        except ImportError:
            return "who else holds memory there is not known: pip install 'xserve[gpu]' to see it"
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        return f"who else holds memory there is not known: {error}"
    try:
        card = library.nvmlDeviceGetHandleByUUID(uuid)
        found = library.nvmlDeviceGetComputeRunningProcesses(card)
    except library.NVMLError as error:
        return f"who else holds memory there is not known: {error}"
    finally:
        library.nvmlShutdown()
    holders = [Holder(process.pid, _title(process.pid, root), process.usedGpuMemory) for process in found]
    return sorted(holders, key=lambda holder: -(holder.size or 0))


def _title(pid: int, root: Path) -> str:
    try:
        words = (root / f"proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return words.replace(b"\0", b" ").decode(errors="replace").strip()[:_SHOWN]
