"""NUMA nodes of this machine, from sysfs. A machine that shows none is one node without a number."""

from __future__ import annotations

from pathlib import Path

import msgspec

from launcher.host.files import ROOT, parse_list, read_list, read_text

_MEMORY_FIELD = "MemTotal:"


class NumaNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node."""

    id: int
    cpus: tuple[int, ...] = ()
    """Online CPUs; empty: a node that has memory only (CXL, a GPU's own memory)."""
    memory: int = 0
    """Bytes; 0: a node without memory, nothing can be bound to it."""
    distances: dict[int, int] = {}
    """To each node, itself included: 10 is local, larger is further."""


def numa_nodes(root: Path = ROOT) -> tuple[NumaNode, ...]:
    """Every online node, in order; empty where the kernel shows none."""
    base = root / "sys/devices/system/node"
    online = read_list(base / "online")
    return tuple(_read_node(base / f"node{number}", number, online) for number in online)


def _read_node(directory: Path, number: int, online: tuple[int, ...]) -> NumaNode:
    distances = read_text(directory / "distance").split()
    # The kernel writes one distance for each online node, in their order; numbers of nodes may have gaps.
    known = dict(zip(online, map(int, distances), strict=False)) if all(d.isdigit() for d in distances) else {}
    return NumaNode(
        id=number, cpus=read_list(directory / "cpulist"), memory=_memory(directory / "meminfo"), distances=known
    )


def _memory(path: Path) -> int:
    for line in read_text(path).splitlines():
        words = line.split()  # Node 0 MemTotal: 131072 kB
        if len(words) == 5 and words[2] == _MEMORY_FIELD and words[3].isdigit():
            return int(words[3]) * 1024
    return 0


def memory_nodes_allowed(root: Path = ROOT) -> tuple[int, ...] | None:
    """Nodes whose memory this process may use (cpuset); None: it is not told."""
    for line in read_text(root / "proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name == "Mems_allowed_list":
            return parse_list(value.strip())
    return None
