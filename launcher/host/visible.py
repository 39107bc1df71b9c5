"""Variables by which accelerators are hidden and ordered: a table of their dialects, and one reader for all.

CUDA reads its list up to the first entry that is no device and says nothing; the same list is then read wrongly by
everybody who takes it for numbers. Here each mistake has words of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Dialect(NamedTuple):
    """How one variable is written."""

    variable: str
    accelerator: str
    prefixes: tuple[str, ...] = ()
    """Of identifiers that are taken besides numbers; they may be shortened as long as they name one device."""
    sub_devices: bool = False
    """``0.1``: a part of device 0."""
    marker: str = ""
    """A path that is there when the accelerator's driver is."""


CUDA = Dialect("CUDA_VISIBLE_DEVICES", "NVIDIA GPUs", ("GPU-", "MIG-"), marker="dev/nvidiactl")
DIALECTS = (
    CUDA,
    Dialect("HIP_VISIBLE_DEVICES", "AMD GPUs", marker="dev/kfd"),
    Dialect("ROCR_VISIBLE_DEVICES", "AMD GPUs", ("GPU-",), marker="dev/kfd"),
    Dialect("ZE_AFFINITY_MASK", "Intel GPUs", sub_devices=True, marker="sys/module/xe"),
    Dialect("ASCEND_RT_VISIBLE_DEVICES", "Ascend NPUs", marker="dev/davinci_manager"),
)


class Visible(NamedTuple):
    """What a list leaves."""

    entries: tuple[str, ...]
    """As they are to be written for a child: numbers, or identifiers in full where they are known."""
    fault: str = ""
    """One line: what the list hides or spoils; empty: nothing that surprises."""


def read_visible(value: str | None, present: int, uuids: Sequence[str] = (), dialect: Dialect = CUDA) -> Visible:
    """The devices of `present` that `value` leaves. `uuids`: by index, where they are known.

    An entry that no device bears ends the list, one given twice empties it: as the driver has it.
    """
    if value is None or present == 0:
        return Visible(tuple(str(index) for index in range(present)))
    shown = f"{dialect.variable}={value!r}"
    every = f"all {_counted(present, dialect)}" if present > 1 else f"the only {dialect.accelerator[:-1]}"
    entries = [entry.strip() for entry in value.split(",")]
    if not value.strip():
        return Visible((), f"{shown} is set but empty: it hides {every}: unset it to use them")
    if entries[0] == "-1":
        return Visible((), f"{shown} hides {every}: unset it to use them")
    good: list[str] = []
    for entry in entries:
        name, why = _resolve(entry, present, [u for u in uuids if u], dialect)
        if name is None:
            return Visible(tuple(good), f"{shown}: {entry!r} {why}; the driver stops there and sees {len(good)}")
        if name in good or _index_twin(name, uuids) in good:
            return Visible((), f"{shown} names {entry} twice: the driver then sees none; name each one once")
        good.append(name)
    return Visible(tuple(good))


def _resolve(entry: str, present: int, uuids: Sequence[str], dialect: Dialect) -> tuple[str | None, str]:
    """(the entry in full, "") or (None, why not)."""
    what = _counted(present, dialect)
    number = entry.partition(".")[0] if dialect.sub_devices else entry
    if number.isascii() and number.isdigit():
        if int(number) < present:
            return entry, ""
        return None, f"is out of range: there are {what}, 0 to {present - 1}"
    if not entry.startswith(dialect.prefixes or ("\0",)):
        forms = " or ".join(["a number", *(f"{prefix}<uuid>" for prefix in dialect.prefixes)])
        return None, f"is none of the {what} here: give {forms}"
    if entry.startswith("MIG-GPU-"):  # MIG-GPU-<uuid>/<gpu instance>/<compute instance>
        _, why = _resolve(entry[len("MIG-") :].partition("/")[0], present, uuids, dialect)
        return (entry, "") if not why else (None, why)
    if entry.startswith("MIG-") or not uuids:
        return entry, ""  # only the driver knows these
    bearers = [uuid for uuid in uuids if uuid.lower().startswith(entry.lower())]
    if len(bearers) == 1:
        return bearers[0], ""
    if bearers:
        return None, f"is the beginning of {len(bearers)} UUIDs ({', '.join(bearers)}): give more of it"
    return None, f"is none of the {what} here: there are {', '.join(uuids)}"


def _index_twin(name: str, uuids: Sequence[str]) -> str:
    """The other name of the same device: its number for its UUID, and back."""
    if name.isdigit():
        return uuids[int(name)] if int(name) < len(uuids) else ""
    return str(list(uuids).index(name)) if name in uuids else ""


def _counted(present: int, dialect: Dialect) -> str:
    return f"{present} {dialect.accelerator if present != 1 else dialect.accelerator[:-1]}"


def set_dialects(environment: Mapping[str, str]) -> list[tuple[Dialect, str]]:
    """Which of the variables are set, in the order of the table."""
    return [(d, environment[d.variable]) for d in DIALECTS if d.variable in environment]


def accelerator_here(root: Path) -> Dialect | None:
    """The first of the table whose driver is loaded."""
    return next((d for d in DIALECTS if (root / d.marker).exists()), None)


def is_mig(entry: str) -> bool:
    """A slice of a GPU: a process can see only one at a time, so that each worker needs a list of its own."""
    return entry.startswith("MIG-")
