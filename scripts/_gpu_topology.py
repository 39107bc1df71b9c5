"""What nvidia-smi and a launch's log say, taken apart: no device, no process. For gpu_check --gpus N."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_COLOURS = re.compile(r"\x1b\[[0-9;]*[a-zA-Z]")


class Topology(NamedTuple):
    """`nvidia-smi topo -m`."""

    links: dict[tuple[int, int], str]
    """(card, other card) → ``NV18``, ``SYS``, …"""
    cpus: dict[int, str]
    """As it stands; empty: it does not say."""
    nodes: dict[int, tuple[int, ...]]
    """NUMA nodes; empty: it does not say (``N/A``, -1, or nothing there)."""

    def shown_links(self) -> str:
        """How often each kind, both directions as one."""
        kinds = [kind for (a, b), kind in sorted(self.links.items()) if a < b]
        return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "one card"


def parse_topology(text: str) -> Topology:
    """Raises ValueError when there is no table of GPUs in `text`."""
    lines = [_COLOURS.sub("", line) for line in text.splitlines()]
    header = next((line for line in lines if re.match(r"\s+GPU0\b", line)), None)
    if header is None:
        raise ValueError(f"no table of GPUs in the answer of nvidia-smi topo -m: {text[:200]!r}")
    columns = _cells(header)
    found = Topology({}, {}, {})
    for line in lines:
        named = re.match(r"GPU(\d+)\b(.*)", line)
        if named is None:
            continue
        card = int(named[1])
        said = dict(zip(columns, _cells(named[2]), strict=False))
        for column, value in said.items():
            if (other := re.fullmatch(r"GPU(\d+)", column)) and int(other[1]) != card:
                found.links[card, int(other[1])] = value
        found.cpus[card] = _known(said.get("CPU Affinity", ""))
        found.nodes[card] = number_list(said.get("NUMA Affinity", ""))
    return found


def _cells(line: str) -> list[str]:
    """Tabs part them, and an empty cell is one; some versions write spaces only."""
    if "\t" in line:
        return [cell.strip() for cell in line.lstrip("\t").rstrip().split("\t")]
    return re.split(r"\s{2,}", line.strip()) if re.search(r"\s{2,}", line.strip()) else line.split()


def _known(value: str) -> str:
    return "" if value in ("N/A", "-1") else value


def number_list(text: str) -> tuple[int, ...]:
    """``0-2,5`` → 0, 1, 2, 5; nothing for what is no such list."""
    numbers: list[int] = []
    for piece in filter(None, text.replace(" ", "").split(",")):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        if bounds is None:
            return ()
        numbers += range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1)
    return tuple(numbers)


def disagreements(topology: Topology, ours: Sequence[tuple[int, ...]]) -> list[str]:
    """Cards whose NUMA nodes xserve reads otherwise than nvidia-smi; what one does not know is no difference."""
    return [
        f"GPU{card}: nvidia-smi says {list(theirs)}, xserve {list(ours[card])}"
        for card, theirs in sorted(topology.nodes.items())
        if card < len(ours) and theirs and ours[card] and not set(ours[card]) <= set(theirs)
    ]


class Holder(NamedTuple):
    """A line of ``--query-compute-apps=pid,gpu_uuid,process_name``."""

    pid: int
    card: str
    name: str


def parse_holders(lines: Sequence[str]) -> list[Holder]:
    parts = [[cell.strip() for cell in line.split(",", 2)] for line in lines]
    return [Holder(int(p[0]), p[1], p[2]) for p in parts if len(p) == 3 and p[0].isdigit()]


def one_per_card(holders: Sequence[Holder], pids: Mapping[str, int], cards: Sequence[str]) -> list[str]:
    """What is wrong with the workers on the cards; `pids`: of the tree, by title; `cards`: UUIDs, by index."""
    wrong: list[str] = []
    for rank, card in enumerate(cards):
        title = next((t for t in pids if t.endswith(f"_TP{rank}")), "")
        on_card = [h for h in holders if h.card == card and h.pid in pids.values()]
        if [h.pid for h in on_card] != [pids.get(title, 0)]:
            wrong.append(f"card {rank} is held by {[h.name for h in on_card]}, not by {title or 'a worker'} alone")
        elif f"xserve::{title}" not in on_card[0].name:
            wrong.append(f"card {rank}: nvidia-smi calls {title} {on_card[0].name!r}")
    return wrong


def names_cause(log: str, title: str) -> bool:
    """Whether the last lines of a launch's log say that this process was killed."""
    last = "\n".join([line for line in log.splitlines() if line.strip()][-4:])
    return title in last and "SIGKILL" in last


def too_few(wanted: int, seen: int) -> str:
    """One line; empty: there are enough."""
    if wanted < 2:
        return f"gpu_check --gpus {wanted}: give 2 or more; without --gpus one card is checked"
    if seen >= wanted:
        return ""
    cards = {0: "no card", 1: "one card"}.get(seen, f"{seen} cards")
    return f"gpu_check --gpus {wanted}: nvidia-smi shows {cards} here; nothing was run"


def markdown(table: Mapping[str, Any], title: str) -> list[str]:
    """Rows for the README; lists are for the screen only."""
    rows = [f"| {key} | {value} |" for key, value in table.items() if not isinstance(value, list)]
    return [title, "", "| what | seen |", "|---|---|", *rows]


def reduce_rows(sizes: Sequence[Mapping[str, Any]]) -> list[str]:
    """`sizes`: bytes, µs of each way, the fastest, whether all ranks have the same bits."""
    head = f"{'KiB':>8} {'NCCL':>9} {'one-shot':>9} {'two-shot':>9}  {'fastest':9} bit-equal"
    rows = [
        f"{row['bytes'] / 1024:8g} {row['nccl']:9.1f} {row['one_shot']:9.1f} {row['two_shot']:9.1f}"
        f"  {row['fastest']:9} {'yes' if row['equal'] else 'NO'}"
        for row in sizes
    ]
    return [head, *rows]
