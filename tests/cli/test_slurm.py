"""scripts/slurm_example, with stand-ins for Slurm's commands: a rank for each node, one command line."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from launcher.cli.argv import normalise
from launcher.cli.flags import LAUNCH
from launcher.cli.launch_config import launch_config
from launcher.cli.main import _given
from launcher.config import LaunchConfig
from launcher.nodes.key_file import write_key

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/slurm_example"
SRUN = r"""
while [ "${1#--}" != "$1" ]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@"; done
"""


def stand_in(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """Each `xserve` writes its words, one a line, into a file of its rank."""
    stand_in(tmp_path / "srun", SRUN)
    stand_in(tmp_path / "scontrol", "printf 'gpu-a17\\ngpu-b02\\n'")
    stand_in(
        tmp_path / "xserve",
        f"""if [ "$1" = keygen ]; then echo made > "$2"; exit; fi
        printf '%s\\n' "$@" > {tmp_path}/words.$SLURM_NODEID""",
    )
    return tmp_path


def submit(folder: Path, *words: str, **environment: str) -> list[LaunchConfig]:
    env = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "HOME": str(folder),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "gpu-[a17,b02]",
        "SLURM_GPUS_ON_NODE": "4",
        **environment,
    }
    subprocess.run([SCRIPT, *words], env=env, check=True, timeout=30)
    made = []
    for node in (0, 1):
        given = normalise((folder / f"words.{node}").read_text().splitlines())
        assert given[0] == "launch"
        made.append(launch_config(_given(LAUNCH, given[1:])))
    return made


def test_it_is_a_script() -> None:
    assert os.access(SCRIPT, os.X_OK)
    assert "#SBATCH --ntasks-per-node=1" in SCRIPT.read_text()


def test_every_node_gets_its_rank(commands: Path) -> None:
    zero, one = submit(commands, "--model", "/m/with blank", "--host", "0.0.0.0")
    assert (zero.node_rank, one.node_rank) == (0, 1)
    for config in (zero, one):
        assert (config.tp, config.nnodes, config.master_addr) == (8, 2, "gpu-a17")
        assert (config.model, config.host, config.iface) == ("/m/with blank", "0.0.0.0", None)
        assert config.cluster_key_file == str(commands / ".config/xserve/cluster.key")
        assert config.shutdown_timeout < 30, "Slurm's KillWait"
    assert (commands / ".config/xserve/cluster.key").read_text() == "made\n"
    assert (commands / ".config/xserve").stat().st_mode & 0o077 == 0


def test_what_can_be_set(commands: Path) -> None:
    key = commands / "key"
    write_key(key)
    before = key.read_text()
    (zero, _) = submit(commands, RANKS_PER_NODE="2", IFACE="ib0", KEY=str(key))
    assert (zero.tp, zero.iface, zero.cluster_key_file) == (4, "ib0", str(key))
    assert key.read_text() == before


def test_outside_of_a_job(commands: Path) -> None:
    env = {"PATH": f"{commands}:{os.environ['PATH']}", "HOME": str(commands)}
    done = subprocess.run([SCRIPT], env=env, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode != 0
    assert "start this with sbatch" in done.stderr
