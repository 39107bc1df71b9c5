"""Which device each local worker gets, and the variable that shows it to the worker. Pure.

    --device-ids  >  CUDA_VISIBLE_DEVICES (or the accelerator's own, `launcher.host.visible`)  >  all, in order

Ids are what the variable takes: numbers, UUIDs, UUIDs cut short, MIG slices. They must lie within what the variable
leaves: whoever has set it (a batch system, a container) has given us these and no others. Unlike the variable, the flag
may name a device several times: that many workers then share it, to rehearse a larger launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from launcher.config import LaunchConfig
from launcher.errors import UsageError
from launcher.host import HostFacts
from launcher.host.visible import CUDA, Dialect, is_mig, read_visible

_UNKNOWN = 1 << 10
"""Devices of an accelerator whose number we do not read."""


class Device(NamedTuple):
    """Of one local worker."""

    number: int = 0
    """As the worker counts: among the devices that it sees."""
    name: str = ""
    """As the variable names it; empty: no device."""
    gpu: int | None = None
    """Its place in `HostFacts.gpu_devices`; None: it has none, or only the driver knows."""
    env: dict[str, str] = {}  # noqa: RUF012 a tuple's default, never changed
    """For this worker alone."""
    workers: int = 1
    """Of ours on it, this one included."""


def place_devices(config: LaunchConfig, facts: HostFacts, device: str, workers: int) -> tuple[Device, ...]:
    """One for each of `workers`; of `device` ``cpu`` all are empty. Raises UsageError for ids that cannot be."""
    if device == "cpu":
        env = _foreign(config, facts)
        return (Device(env=env),) * workers
    names = check_ids(config, facts) or list(facts.gpu_entries) or [str(n) for n in range(facts.gpus)]
    if len(names) < workers:
        over = f" over --nnodes {config.nnodes}" if config.nnodes > 1 else ""
        raise UsageError(
            f"--device-ids {','.join(config.device_ids)} names {len(names)} devices, but --tp {config.tp}{over} needs"
            f" {workers}: name one for each worker"
        )
    names = names[:workers]
    if any(is_mig(name) for name in names):
        return tuple(Device(0, name, _gpu_of(name, facts), {CUDA.variable: name}, names.count(name)) for name in names)
    each = list(dict.fromkeys(names))  # the driver sees none at all in a list that names one twice
    env = {CUDA.variable: ",".join(each)} if config.device_ids else {}
    return tuple(Device(each.index(name), name, _gpu_of(name, facts), env, names.count(name)) for name in names)


def through_host(devices: Sequence[Device]) -> bool:
    """Whether the ranks' sums go by way of host memory: NCCL takes each card once, and slices reach no other card."""
    return any(device.workers > 1 or is_mig(device.name) for device in devices)


def check_ids(config: LaunchConfig, facts: HostFacts) -> list[str]:
    """--device-ids in full; empty: not given."""
    if not config.device_ids:
        return []
    text = ",".join(config.device_ids)
    entries: list[str] = []
    for name in config.device_ids:
        found, fault = read_visible(name, facts.gpus_present, [gpu.uuid for gpu in facts.gpu_devices])
        if fault or not found:
            words = fault.removeprefix(f"{CUDA.variable}={name!r}").lstrip(": ").partition("; the driver")[0]
            raise UsageError(f"--device-ids {text}: {words}")
        entries.append(_same(found[0], entries, facts))
    allowed = {_identity(entry, facts) for entry in facts.gpu_entries}
    if outside := [entry for entry in entries if _identity(entry, facts) not in allowed]:
        raise UsageError(
            f"--device-ids {text}: {outside[0]} is not among what {CUDA.variable} leaves"
            f" ({','.join(facts.gpu_entries) or 'nothing'}): change one of the two"
        )
    return entries


def _same(name: str, before: list[str], facts: HostFacts) -> str:
    """By the name that it had before, if it is there by its other one."""
    return next((known for known in before if _identity(known, facts) == _identity(name, facts)), name)


def _foreign(config: LaunchConfig, facts: HostFacts) -> dict[str, str]:
    """For a worker class that drives another accelerator by itself: the variable of the one that is here."""
    dialect = facts.accelerator
    if not config.device_ids:
        return {}
    text = ",".join(config.device_ids)
    if dialect is None or dialect is CUDA:
        raise UsageError(f"--device-ids {text}: this launch runs on the CPU; leave it out, or see --device")
    return {dialect.variable: ",".join(_checked(text, dialect))}


def _checked(text: str, dialect: Dialect) -> tuple[str, ...]:
    entries, fault = read_visible(text, _UNKNOWN, (), dialect)
    if fault:
        raise UsageError(f"--device-ids {text}: not what {dialect.variable} takes, or named twice")
    return entries


def _gpu_of(name: str, facts: HostFacts) -> int | None:
    if name.isdigit():
        return int(name)
    uuid = name.removeprefix("MIG-").partition("/")[0] if name.startswith("MIG-GPU-") else name
    return next((index for index, gpu in enumerate(facts.gpu_devices) if gpu.uuid == uuid), None)


def _identity(name: str, facts: HostFacts) -> int | str:
    """The same for both names of a GPU; a slice is itself alone."""
    gpu = None if is_mig(name) else _gpu_of(name, facts)
    return name if gpu is None else gpu
