"""GPUs of this machine, from its files: no device is touched, and the driver's library is asked only for what they do
not say (`nvml`)."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import msgspec

from launcher.host.files import ROOT, list_entries, read_list, read_number, read_text
from launcher.host.numa import NumaNode
from launcher.host.nvml import nodes_of_gpus

_NODES_DIRECTORY = "sys/bus/pci/devices"


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One NVIDIA GPU; its place in a list is its index. Empty where the driver does not tell."""

    uuid: str = ""
    """``GPU-…``"""
    address: str = ""
    """On the PCI bus: ``0000:3b:00.0``."""
    nodes: tuple[int, ...] = ()
    """NUMA nodes that it is close to; empty: it cannot be told (usual in virtual machines)."""


def gpus_present(root: Path = ROOT) -> int:
    """NVIDIA GPUs of this machine, or of this container: those that have a device node.

    The driver's own list in /proc is the whole machine's, also in a container that was given none; so it counts only
    where the nodes are yet to be made (a machine freshly booted), which takes the setuid program named here.
    """
    minors = _device_minors(root)
    if minors or not (root / "usr/bin/nvidia-modprobe").exists():
        return len(minors)
    return len(list_entries(root / "proc/driver/nvidia/gpus"))


def read_gpus(root: Path = ROOT, nodes: tuple[NumaNode, ...] = ()) -> tuple[Gpu, ...]:
    """As many as `gpus_present` says, in the order of the bus, which is CUDA's own where all are of one kind."""
    minors, found = _device_minors(root), []
    for directory in sorted(list_entries(root / "proc/driver/nvidia/gpus")):
        said = dict(re.findall(r"^([^:\n]+):[ \t]*(.*)$", read_text(directory / "information"), re.MULTILINE))
        minor = said.get("Device Minor", "").strip()
        if minors and minor.isdigit() and int(minor) not in minors:
            continue  # another container's
        uuid = said.get("GPU UUID", "").strip()
        address = directory.name.lower()
        known = uuid if uuid.startswith("GPU-") and "?" not in uuid else ""
        found.append(Gpu(uuid=known, address=address, nodes=_close_nodes(root, address, nodes)))
    present = gpus_present(root)
    if len(found) != present:
        return tuple(Gpu() for _ in range(present))
    return _ask_driver(found, nodes) if root == ROOT else tuple(found)


def _ask_driver(gpus: list[Gpu], nodes: tuple[NumaNode, ...], library: Any = None) -> tuple[Gpu, ...]:
    """Fill in the nodes of cards that the bus says nothing of. With one node there is no question."""
    unknown = [gpu.uuid for gpu in gpus if gpu.uuid and not gpu.nodes]
    if len(nodes) < 2 or not unknown:
        return tuple(gpus)
    known = {node.id for node in nodes}
    told = {uuid: found for uuid, found in nodes_of_gpus(unknown, library).items() if known.issuperset(found)}
    return tuple(msgspec.structs.replace(gpu, nodes=gpu.nodes or told.get(gpu.uuid, ())) for gpu in gpus)


def _close_nodes(root: Path, address: str, nodes: tuple[NumaNode, ...]) -> tuple[int, ...]:
    """The node that the bus names; else those whose CPUs it calls local, unless these are all of them."""
    device = root / _NODES_DIRECTORY / address
    named = read_number(device / "numa_node")  # -1 where the firmware does not say
    if named is not None:
        return (named,)
    local = set(read_list(device / "local_cpulist"))
    close = [node.id for node in nodes if node.cpus and local.issuperset(node.cpus)]
    with_cpus = [node.id for node in nodes if node.cpus]
    return tuple(close) if close != with_cpus or len(close) == 1 else ()


def _device_minors(root: Path) -> set[int]:
    names = [p.name for p in list_entries(root / "dev") if p.name.startswith("nvidia")]
    return {int(name[6:]) for name in names if name[6:].isdigit()}


def torch_cuda() -> str | None:
    """From the text of torch's version file: importing it would cost a second and more than this process may hold."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = read_text(Path(spec.origin).with_name("version.py"))
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)", version, re.MULTILINE)
    return found.group(1) if found else None
