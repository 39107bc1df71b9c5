"""NUMA: which node each local worker belongs to, and which CPUs and memory that gives it. Pure.

    given (--numa-bind-cpus, --numa-bind-nodes)  >  the node that the device is close to  >  spread evenly

Always inside the affinity mask and the memory nodes given from outside: two instances that somebody has pinned apart
must not meet again. A node without usable CPUs is replaced by the nearest one that has some; nothing is ever bound to
no CPU at all. What cannot be had is left unbound, with one line that says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from launcher.config import LaunchConfig
from launcher.errors import UsageError
from launcher.host import HostFacts, NumaNode
from launcher.host.files import shown_list

T = TypeVar("T")


class Placement(NamedTuple):
    """Of one worker. Empty: not bound."""

    cpus: tuple[int, ...] = ()
    memory_nodes: tuple[int, ...] = ()
    node: int | None = None


class Placements(NamedTuple):
    """Of all local workers, in order, and what is to be said about them."""

    workers: tuple[Placement, ...]
    notes: tuple[str, ...] = ()


def place_workers(config: LaunchConfig, facts: HostFacts, devices: Sequence[int | None]) -> Placements:
    """`devices`: for each local worker the index of its GPU; None: it has none.

    Raises UsageError for nodes and CPUs that are not there or not ours to use.
    """
    asked = config.numa_bind or config.numa_bind_nodes or config.numa_bind_cpus
    nothing = tuple(Placement() for _ in devices)
    if not asked:
        return Placements(nothing)
    if "cpus" in facts.numa_denied and "memory" in facts.numa_denied:
        return Placements(nothing, ("NUMA: neither CPUs nor memory may be bound here (seccomp): nothing is bound",))
    notes = []
    if facts.numa_denied:
        kept, lost = ("CPUs", "memory") if "memory" in facts.numa_denied else ("memory", "CPUs")
        notes.append(f"NUMA: {lost} may not be bound here (seccomp, as by default in containers): {kept} only")
    nodes = _usable(facts)
    if not facts.numa_nodes:
        notes.append("NUMA: this kernel shows no nodes: CPUs are bound only where they are given")
    chosen = _chosen_nodes(config, facts, nodes, devices)
    given = _given_cpus(config, facts, len(devices))
    workers = [
        _placement(facts, nodes, node, cpus or ())
        for node, cpus in zip(chosen, given or [()] * len(chosen), strict=True)
    ]
    return Placements(tuple(workers), tuple(notes))


def _usable(facts: HostFacts) -> dict[int, NumaNode]:
    """Nodes with CPUs of our mask, cut down to these."""
    mask = set(facts.cpu_ids)
    cut = {node.id: tuple(cpu for cpu in node.cpus if cpu in mask) for node in facts.numa_nodes}
    return {
        node.id: NumaNode(id=node.id, cpus=cut[node.id], memory=node.memory, distances=node.distances)
        for node in facts.numa_nodes
        if cut[node.id]
    }


def _placement(facts: HostFacts, nodes: dict[int, NumaNode], node: int | None, cpus: tuple[int, ...]) -> Placement:
    if node is None:
        owners = {n.id for n in nodes.values() if set(cpus) & set(n.cpus)}
        memory = tuple(sorted(owners))
    else:
        cpus, memory = cpus or nodes[node].cpus, (node,)
    allowed = facts.numa_memory
    memory = tuple(n for n in memory if nodes[n].memory and (allowed is None or n in allowed))
    return Placement(
        cpus=() if "cpus" in facts.numa_denied else cpus,
        memory_nodes=() if "memory" in facts.numa_denied else memory,
        node=node,
    )


# --- which node --------------------------------------------------------------------------------------------------


def _chosen_nodes(
    config: LaunchConfig, facts: HostFacts, nodes: dict[int, NumaNode], devices: Sequence[int | None]
) -> list[int | None]:
    if config.numa_bind_nodes:
        wanted = _one_for_each("--numa-bind-nodes", config.numa_bind_nodes, len(devices))
        known = {node.id for node in facts.numa_nodes}
        for node in wanted:
            if node not in known:
                raise UsageError(f"--numa-bind-nodes {node}: there is no such node; there are {_list(known)}")
        return [_with_cpus(facts, nodes, node, "--numa-bind-nodes") for node in wanted]
    if config.numa_bind_cpus or not nodes:
        return [None] * len(devices)
    near = [_near(facts, device) for device in devices]
    lonely = [at for at, close in enumerate(near) if not close]
    chosen: list[int | None] = [None] * len(devices)
    load = dict.fromkeys(nodes, 0)
    for at, close in enumerate(near):
        if close:
            chosen[at] = node = _least_loaded(load, _nearest(facts, nodes, close))
            load[node] += 1
    # Nothing is known of the rest: neighbouring ranks, which talk most, share a node, and no node gets more than its
    # part.
    order = sorted(nodes)
    for place, at in enumerate(lonely):
        chosen[at] = order[place * len(order) // len(lonely)]
    return chosen


def _near(facts: HostFacts, device: int | None) -> tuple[int, ...]:
    """Nodes that the bus calls close to this GPU; empty: it cannot be told."""
    if device is None or device >= len(facts.gpu_devices):
        return ()
    return facts.gpu_devices[device].nodes


def _nearest(facts: HostFacts, nodes: dict[int, NumaNode], close: Sequence[int]) -> list[int]:
    """The nodes of `close` that have CPUs for us; else all those at the shortest distance from them."""
    if own := [node for node in close if node in nodes]:
        return own
    by_id = {node.id: node for node in facts.numa_nodes}
    far = 1 << 16
    distances = {
        node: min((by_id[c].distances.get(node, far) for c in close if c in by_id), default=far) for node in nodes
    }
    shortest = min(distances.values())
    return [node for node, distance in distances.items() if distance == shortest]


def _least_loaded(load: dict[int, int], candidates: Sequence[int]) -> int:
    return min(candidates, key=lambda node: (load[node], node))


def _with_cpus(facts: HostFacts, nodes: dict[int, NumaNode], node: int, flag: str) -> int:
    if not nodes:
        raise UsageError(f"{flag} {node}: none of the CPUs that this process may use ({_list(facts.cpu_ids)}) is in it")
    if node not in nodes and next(n for n in facts.numa_nodes if n.id == node).cpus:
        raise UsageError(
            f"{flag} {node}: none of its CPUs is in the affinity mask given from outside ({_list(facts.cpu_ids)});"
            f" nodes with usable CPUs are {_list(nodes)}"
        )
    return node if node in nodes else _nearest(facts, nodes, [node])[0]


# --- given CPUs --------------------------------------------------------------------------------------------------


def _given_cpus(config: LaunchConfig, facts: HostFacts, workers: int) -> list[tuple[int, ...]] | None:
    if not config.numa_bind_cpus:
        return None
    for cpus in config.numa_bind_cpus:
        if outside := set(cpus) - set(facts.cpu_ids):
            raise UsageError(
                f"--numa-bind-cpus {_list(cpus)}: CPU {_list(outside)} is not in the affinity mask given from outside"
                f" ({_list(facts.cpu_ids)})"
            )
    return _one_for_each("--numa-bind-cpus", config.numa_bind_cpus, workers)


def _one_for_each(flag: str, values: Sequence[T], workers: int) -> list[T]:
    if len(values) not in (1, workers):
        raise UsageError(
            f"{flag} has {len(values)} entries for {workers} local workers: give one for each, or one for all"
        )
    return list(values) * (workers if len(values) == 1 else 1)


def _list(numbers: Iterable[int]) -> str:
    return shown_list(numbers) or "none"
