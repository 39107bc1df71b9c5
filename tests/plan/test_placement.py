"""Which worker is bound where, on machines of 1, 2, 4 and 8 nodes: fake sysfs trees, read by the real reader."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.config import LaunchConfig
from launcher.errors import UsageError
from launcher.host import Gpu, HostFacts
from launcher.host.files import parse_list, shown_list
from launcher.host.gpus import read_gpus
from launcher.host.numa import memory_nodes_allowed, numa_nodes
from launcher.plan.budget import thread_budget
from launcher.plan.placement import Placements, place_workers
from tests.plan.made_facts import machine

BIND = LaunchConfig(numa_bind=True)


def write_nodes(root: Path, cpus: Sequence[str], distances: Sequence[Sequence[int]] | None = None) -> None:
    """`cpus`: the CPU list of each node; by default all other nodes are at distance 20."""
    base = root / "sys/devices/system/node"
    count = len(cpus)
    distances = distances or [[10 if a == b else 20 for b in range(count)] for a in range(count)]
    for node, (own, row) in enumerate(zip(cpus, distances, strict=True)):
        (base / f"node{node}").mkdir(parents=True)
        (base / f"node{node}/cpulist").write_text(own + "\n")
        (base / f"node{node}/distance").write_text(" ".join(map(str, row)) + "\n")
        (base / f"node{node}/meminfo").write_text(f"Node {node} MemTotal:       1024 kB\nNode {node} MemFree: 1 kB\n")
    (base / "online").write_text(f"0-{count - 1}\n" if count > 1 else "0\n")


def write_gpus(root: Path, nodes: Sequence[int], local_cpus: Sequence[str] = ()) -> None:
    """A GPU for each of `nodes` (-1: the firmware does not say); `local_cpus`: what the bus calls close to it."""
    (root / "dev").mkdir()
    for index, node in enumerate(nodes):
        address = f"0000:{index:02x}:00.0"
        (root / f"dev/nvidia{index}").touch()
        information = root / f"proc/driver/nvidia/gpus/{address}/information"
        information.parent.mkdir(parents=True)
        information.write_text(f"Model: \t\t X\nGPU UUID:  \t GPU-{index}{index}-uuid\nDevice Minor: \t {index}\n")
        device = root / f"sys/bus/pci/devices/{address}"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        if local_cpus:
            (device / "local_cpulist").write_text(local_cpus[index] + "\n")


def facts_of(root: Path, mask: str, **changes: Any) -> HostFacts:
    nodes = numa_nodes(root)
    cpu_ids = parse_list(mask) or ()
    return machine(cpus=len(cpu_ids), cpu_ids=cpu_ids, numa_nodes=nodes, gpu_devices=read_gpus(root, nodes), **changes)


def chosen(facts: HostFacts, devices: Sequence[int | None], config: LaunchConfig = BIND) -> list[int | None]:
    return [worker.node for worker in place_workers(config, facts, devices).workers]


def shown(placements: Placements) -> list[tuple[str, str]]:
    return [(shown_list(w.cpus), shown_list(w.memory_nodes)) for w in placements.workers]


# --- where the bus says it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_each_gpu_near_its_node(tmp_path: Path, count: int) -> None:
    write_nodes(tmp_path, [f"{4 * n}-{4 * n + 3}" for n in range(count)])
    near = [gpu * count // 8 for gpu in range(8)]
    write_gpus(tmp_path, near)
    facts = facts_of(tmp_path, f"0-{4 * count - 1}")
    assert chosen(facts, range(8)) == near
    made = place_workers(BIND, facts, range(8))
    assert [w.memory_nodes for w in made.workers] == [(node,) for node in near]
    assert shown(made)[7][0] == f"{4 * count - 4}-{4 * count - 1}"
    assert made.notes == ()


def test_not_asked_is_not_bound(tmp_path: Path) -> None:
    write_nodes(tmp_path, ["0-3", "4-7"])
    assert shown(place_workers(LaunchConfig(), facts_of(tmp_path, "0-7"), [None, None])) == [("", ""), ("", "")]


def test_gpus_out_of_order(tmp_path: Path) -> None:
    write_nodes(tmp_path, ["0-3", "4-7"])
    write_gpus(tmp_path, [1, 0, 1, 0])
    facts = facts_of(tmp_path, "0-7")
    assert chosen(facts, [0, 1, 2, 3]) == [1, 0, 1, 0]
    assert chosen(facts, [3, 2]) == [0, 1], "the devices that were chosen, not the first ones"


def test_eight_gpus_that_each_list_all_nodes_are_spread(tmp_path: Path) -> None:
    """As in many virtual machines: the bus has no node, and calls every CPU local."""
    write_nodes(tmp_path, ["0-3", "4-7"])
    write_gpus(tmp_path, [-1] * 8, ["0-7"] * 8)
    facts = facts_of(tmp_path, "0-7")
    assert chosen(facts, range(8)) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert chosen(facts, range(2)) == [0, 1]


def test_the_bus_knows_cpus_but_no_node(tmp_path: Path) -> None:
    write_nodes(tmp_path, ["0-3", "4-7", "8-11"])
    write_gpus(tmp_path, [-1, -1, -1, -1], ["4-7", "0-3", "4-11", "4-11"])
    facts = facts_of(tmp_path, "0-11")
    assert chosen(facts, range(4)) == [1, 0, 2, 1], "of two that are equally close the one with less to do"


def test_ties_spread_evenly_over_unequal_numbers(tmp_path: Path) -> None:
    write_nodes(tmp_path, ["0-1", "2-3", "4-5"])
    found = chosen(facts_of(tmp_path, "0-5"), [None] * 8)
    counts = [found.count(node) for node in range(3)]
    assert sorted(counts) == [2, 3, 3]
    assert found == sorted(found, key=lambda node: node or 0), "neighbours share a node"


# --- nodes that have no CPUs for us --------------------------------------------------------------------------------


def test_a_gpu_on_a_node_without_cpus_gets_the_nearest(tmp_path: Path) -> None:
    """Memory too: such a node may be the GPU's own memory."""
    distances = [[10, 20, 40, 25], [20, 10, 25, 40], [40, 25, 10, 60], [25, 40, 60, 10]]
    write_nodes(tmp_path, ["0-3", "4-7", "", ""], distances)
    write_gpus(tmp_path, [2, 3])
    made = place_workers(BIND, facts_of(tmp_path, "0-7"), [0, 1])
    assert shown(made) == [("4-7", "1"), ("0-3", "0")]


def test_equally_near_nodes_take_turns(tmp_path: Path) -> None:
    distances = [[10, 20, 30], [20, 10, 30], [30, 30, 10]]
    write_nodes(tmp_path, ["0-3", "4-7", ""], distances)
    write_gpus(tmp_path, [2, 2, 2, 2])
    assert chosen(facts_of(tmp_path, "0-7"), range(4)) == [0, 1, 0, 1]


def test_inside_the_mask_given_from_outside(tmp_path: Path) -> None:
    write_nodes(tmp_path, ["0-7", "8-15"])
    write_gpus(tmp_path, [0, 1])
    made = place_workers(BIND, facts_of(tmp_path, "8-15"), [0, 1])
    assert shown(made) == [("8-15", "1"), ("8-15", "1")], "node 0 has no CPU for us: the nearest that has"
    made = place_workers(BIND, facts_of(tmp_path, "6-9"), [0, 1])
    assert shown(made) == [("6-7", "0"), ("8-9", "1")]


def test_memory_nodes_of_the_cpuset(tmp_path: Path) -> None:
    write_nodes(tmp_path, ["0-3", "4-7"])
    facts = facts_of(tmp_path, "0-7", numa_memory=(0,))
    assert shown(place_workers(BIND, facts, [None, None])) == [("0-3", "0"), ("4-7", "")]


def test_a_node_without_memory(tmp_path: Path) -> None:
    write_nodes(tmp_path, ["0-3", "4-7"])
    (tmp_path / "sys/devices/system/node/node1/meminfo").write_text("Node 1 MemTotal: 0 kB\n")
    assert shown(place_workers(BIND, facts_of(tmp_path, "0-7"), [None, None])) == [("0-3", "0"), ("4-7", "")]


def test_a_kernel_that_shows_no_nodes(tmp_path: Path) -> None:
    made = place_workers(BIND, facts_of(tmp_path, "0-7"), [None])
    assert shown(made) == [("", "")]
    assert "shows no nodes" in made.notes[0]


# --- denied --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("denied", "expected", "words"),
    [
        (("memory",), [("0-3", ""), ("4-7", "")], "memory may not be bound here (seccomp"),
        (("cpus",), [("", "0"), ("", "1")], "CPUs may not be bound here (seccomp"),
        (("cpus", "memory"), [("", ""), ("", "")], "neither CPUs nor memory may be bound here"),
    ],
)
def test_denied(tmp_path: Path, denied: tuple[str, ...], expected: list[tuple[str, str]], words: str) -> None:
    write_nodes(tmp_path, ["0-3", "4-7"])
    made = place_workers(BIND, facts_of(tmp_path, "0-7", numa_denied=denied), [None, None])
    assert shown(made) == expected
    assert len(made.notes) == 1
    assert words in made.notes[0]


# --- given by hand -------------------------------------------------------------------------------------------------


def test_given_nodes(tmp_path: Path) -> None:
    write_nodes(tmp_path, ["0-3", "4-7"])
    write_gpus(tmp_path, [0, 0])
    facts = facts_of(tmp_path, "0-7")
    assert chosen(facts, [0, 1], LaunchConfig(numa_bind_nodes=(1, 0))) == [1, 0]
    assert chosen(facts, [0, 1], LaunchConfig(numa_bind_nodes=(1,))) == [1, 1]


def test_given_cpus(tmp_path: Path) -> None:
    write_nodes(tmp_path, ["0-3", "4-7"])
    facts = facts_of(tmp_path, "0-7")
    made = place_workers(LaunchConfig(numa_bind_cpus=((0, 1), (3, 4))), facts, [None, None])
    assert shown(made) == [("0-1", "0"), ("3-4", "0-1")], "memory of the nodes that the CPUs are of"
    both = LaunchConfig(numa_bind_cpus=((2, 3),), numa_bind_nodes=(1,))
    assert shown(place_workers(both, facts, [None])) == [("2-3", "1")]


@pytest.mark.parametrize(
    ("changes", "mask", "words"),
    [
        ({"numa_bind_nodes": (2,)}, "0-7", "--numa-bind-nodes 2: there is no such node; there are 0-1"),
        ({"numa_bind_nodes": (0, 1, 0)}, "0-7", "has 3 entries for 2 local workers"),
        ({"numa_bind_nodes": (0,)}, "4-7", "none of its CPUs is in the affinity mask given from outside (4-7)"),
        ({"numa_bind_cpus": ((0, 9),)}, "0-7", "CPU 9 is not in the affinity mask given from outside (0-7)"),
        ({"numa_bind_cpus": ((0,), (1,), (2,))}, "0-7", "has 3 entries for 2 local workers"),
    ],
)
def test_refused(tmp_path: Path, changes: dict[str, Any], mask: str, words: str) -> None:
    write_nodes(tmp_path, ["0-3", "4-7"])
    with pytest.raises(UsageError) as caught:
        place_workers(LaunchConfig(**changes), facts_of(tmp_path, mask), [None, None])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


# --- readers -------------------------------------------------------------------------------------------------------


def test_gpus_of_a_container(tmp_path: Path) -> None:
    """The driver lists the whole machine's; ours are those with a device node."""
    write_gpus(tmp_path, [0, 0, 1, 1])
    for gone in (0, 2):
        (tmp_path / f"dev/nvidia{gone}").unlink()
    assert [(gpu.uuid, gpu.nodes) for gpu in read_gpus(tmp_path)] == [("GPU-11-uuid", (0,)), ("GPU-33-uuid", (1,))]


def test_gpus_of_which_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for index in range(2):
        (tmp_path / f"dev/nvidia{index}").touch()
    assert read_gpus(tmp_path) == (Gpu(), Gpu())


@pytest.mark.parametrize(("line", "expected"), [("Mems_allowed_list:\t0-1,3\n", (0, 1, 3)), ("Name:\tx\n", None)])
def test_memory_nodes_allowed(tmp_path: Path, line: str, expected: object) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text(line)
    assert memory_nodes_allowed(tmp_path) == expected


@pytest.mark.parametrize(
    ("text", "numbers", "again"),
    [("0-3,8", (0, 1, 2, 3, 8), "0-3,8"), ("5", (5,), "5"), ("", (), ""), ("2,1,1", (1, 2), "1-2")],
)
def test_lists(text: str, numbers: tuple[int, ...], again: str) -> None:
    assert parse_list(text) == numbers
    assert shown_list(numbers) == again


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1-x", "1,,2", "0-99999999"])
def test_no_lists(text: str) -> None:
    assert parse_list(text) is None


# --- threads -------------------------------------------------------------------------------------------------------


def test_threads_stay_within_what_is_bound() -> None:
    facts = machine(cpus=16)
    assert thread_budget(facts, 2, [(), ()]).number == 8
    assert thread_budget(facts, 2, [(0, 1), (2, 3)]).number == 2
    assert "bound to" in thread_budget(facts, 2, [(0, 1), (2, 3)]).origin
    shared = tuple(range(8))
    assert thread_budget(facts, 4, [shared] * 4).number == 2, "four on the same eight"
    assert thread_budget(machine(omp_num_threads=5), 2, [(0,), (1,)]).number == 5
