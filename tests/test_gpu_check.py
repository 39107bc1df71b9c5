"""gpu_check --gpus N without a card: its arguments, and what it reads out of nvidia-smi and logs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.append(str(SCRIPTS))

from _gpu_topology import (  # noqa: E402
    Holder,
    disagreements,
    markdown,
    names_cause,
    number_list,
    one_per_card,
    parse_holders,
    parse_topology,
    reduce_rows,
    too_few,
)

FOUR = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tNV18\t0-31\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV18\tNV18\t0-31\t0\t\tN/A\n"
    "GPU2\tNV18\tNV18\t X \tNV18\t32-63\t1\t\tN/A\n"
    "GPU3\tNV18\tNV18\tNV18\t X \t32-63\t1\t\tN/A\n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
)
WITH_NIC = (
    "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    "GPU0\t X \tSYS\tPIX\t0-15,32-47\t0-1\t\tN/A\n"
    "GPU1\tSYS\t X \tSYS\t16-31\t2\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \t\t\t\t\n"
)
SPACES = (
    "        GPU0    GPU1    CPU Affinity    NUMA Affinity\n"
    "GPU0     X      PHB     0-3             N/A\n"
    "GPU1    PHB      X      0-3             N/A\n"
)


def untold(node: str) -> str:
    head = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    return f"{head}GPU0\t X \tNV4\t\t{node}\t\tN/A\nGPU1\tNV4\t X \t\t{node}\n"


def test_four_cards() -> None:
    found = parse_topology(FOUR)
    assert found.nodes == {0: (0,), 1: (0,), 2: (1,), 3: (1,)}
    assert found.cpus[2] == "32-63"
    assert len(found.links) == 12
    assert found.shown_links() == "6 x NV18"


def test_network_cards_are_no_gpus() -> None:
    found = parse_topology(WITH_NIC)
    assert found.links == {(0, 1): "SYS", (1, 0): "SYS"}
    assert found.nodes == {0: (0, 1), 1: (2,)}
    assert found.cpus == {0: "0-15,32-47", 1: "16-31"}


def test_parted_by_spaces() -> None:
    found = parse_topology(SPACES)
    assert (found.shown_links(), found.cpus[1], found.nodes) == ("1 x PHB", "0-3", {0: (), 1: ()})


@pytest.mark.parametrize("node", ["N/A", "-1", ""])
def test_nodes_that_are_not_told(node: str) -> None:
    found = parse_topology(untold(node))
    assert found.nodes == {0: (), 1: ()}
    assert found.cpus == {0: "", 1: ""}
    assert disagreements(found, [(0,), (1,)]) == []


def test_one_card_and_none() -> None:
    one = parse_topology("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-15\t0\n")
    assert (one.shown_links(), one.nodes) == ("one card", {0: (0,)})
    with pytest.raises(ValueError, match="no table of GPUs"):
        parse_topology("No devices were found")


def test_disagreements() -> None:
    found = parse_topology(FOUR)
    assert disagreements(found, [(0,), (0,), (1,), (1,)]) == disagreements(found, [(), (), (), ()]) == []
    assert disagreements(found, [(0,), (1,)]) == ["GPU1: nvidia-smi says [0], xserve [1]"]


@pytest.mark.parametrize(
    ("text", "numbers"), [("0-2,5", (0, 1, 2, 5)), ("7", (7,)), ("", ()), ("N/A", ()), ("-1", ()), ("0-", ())]
)
def test_lists(text: str, numbers: tuple[int, ...]) -> None:
    assert number_list(text) == numbers


def test_one_worker_on_each_card() -> None:
    pids = {"APIServer_0": 5, "EngineCore_DP0": 6, "Worker_DP0_PP0_TP0": 7, "Worker_DP0_PP0_TP1": 8}
    lines = ["7, GPU-a, xserve::Worker_DP0_PP0_TP0", "8, GPU-b, xserve::Worker_DP0_PP0_TP1", "99, GPU-b, other, thing"]
    holders = parse_holders([*lines, "[N/A], GPU-a, x", "nothing"])
    assert holders[2] == Holder(99, "GPU-b", "other, thing")
    cards = ["GPU-a", "GPU-b"]
    assert one_per_card(holders, pids, cards) == []
    assert len(one_per_card(holders, pids, cards[::-1])) == 2
    assert one_per_card(holders[:1], pids, cards) == ["card 1 is held by [], not by Worker_DP0_PP0_TP1 alone"]
    core = Holder(6, "GPU-a", "xserve::EngineCore_DP0")
    assert one_per_card([*holders, core], pids, cards)[0].startswith("card 0 is held by ['xserve::Worker")
    nameless = [holders[0]._replace(name="python"), holders[1]]
    assert one_per_card(nameless, pids, cards) == ["card 0: nvidia-smi calls Worker_DP0_PP0_TP0 'python'"]


def test_the_cause_is_in_the_last_lines() -> None:
    log = "\n".join(["up", "rank 1 (Worker_DP0_PP0_TP1), pid 3: died of signal 9 (SIGKILL)", "what to do", ""])
    assert names_cause(log, "Worker_DP0_PP0_TP1")
    assert not names_cause(log, "EngineCore_DP0")
    assert not names_cause(log + "\n".join("abcd"), "Worker_DP0_PP0_TP1")


def test_tables() -> None:
    row = {"bytes": 8192, "nccl": 2.5, "one_shot": 1.25, "two_shot": 3.0, "fastest": "one_shot", "equal": True}
    [head, line] = reduce_rows([row])
    assert head.split() == ["KiB", "NCCL", "one-shot", "two-shot", "fastest", "bit-equal"]
    assert line.split() == ["8", "2.5", "1.2", "3.0", "one_shot", "yes"]
    assert reduce_rows([row | {"equal": False}])[1].endswith("NO")
    assert markdown({"a": 1, "lines": ["x"], "b": "c"}, "Seen:") == [
        "Seen:", "", "| what | seen |", "|---|---|", "| a | 1 |", "| b | c |",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "seen", "words"),
    [
        (4, 4, ""),
        (2, 8, ""),
        (4, 0, "gpu_check --gpus 4: nvidia-smi shows no card here; nothing was run"),
        (4, 1, "gpu_check --gpus 4: nvidia-smi shows one card here; nothing was run"),
        (4, 2, "gpu_check --gpus 4: nvidia-smi shows 2 cards here; nothing was run"),
        (1, 4, "gpu_check --gpus 1: give 2 or more; without --gpus one card is checked"),
    ],
)
def test_too_few_cards(wanted: int, seen: int, words: str) -> None:
    assert too_few(wanted, seen) == words


def run(*arguments: str, path: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "gpu_check"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": path}, timeout=60)


def test_the_command_without_cards(tmp_path: Path) -> None:
    done = run("--gpus", "64", path=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gpu_check --gpus 64: nvidia-smi shows no card here; nothing was run\n"
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho GPU-a\necho GPU-b\n")
    smi.chmod(0o755)
    assert "shows 2 cards here" in run("--gpus", "4", path=f"{tmp_path}:/bin:/usr/bin").stderr


def test_the_command_knows_its_parts(tmp_path: Path) -> None:
    done = run("--gpus", "2", "--only", "kills,speeed", path=str(tmp_path))
    assert done.returncode == 2
    assert "no part 'speeed': there are topology, starts, reduce" in done.stderr
    assert "no part 'reduce': there are starts, kills" in run("--only", "reduce", path=str(tmp_path)).stderr
