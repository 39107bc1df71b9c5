"""From ``--model`` to a directory: a path as it is, a Hugging Face id by way of the hub's cache.

The hub's library starts threads and takes half a second to import. The process that plans must stay small and have one
thread (it forks), so the library runs in a process of its own, which shows its progress on stderr and writes the
directory, or one line of what went wrong, to stdout.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from launcher import envs
from launcher.errors import HostError, UsageError
from launcher.plan.weights import read_weights

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""No pickled weights, no GGUF; what lies in folders (``original/…``) is not ours to load."""
_UNWANTED = ["*/*"]
_PR_SET_PDEATHSIG = 1
_INTERRUPTED = 130


def resolve_model(value: str) -> Path:
    """The directory of `value`. `UsageError` for one that cannot be, `HostError` when the hub could not be asked."""
    if not value:
        raise UsageError("--model is empty: give a directory or a Hugging Face id, or leave the flag out")
    try:
        path = Path(value).expanduser()
        if path.is_dir():
            return path.absolute()
        is_file, beside = path.exists(), path.parent.is_dir()
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "there is no home directory for ~"
        raise UsageError(f"--model {value} cannot be read: {reason}") from error
    if is_file:
        raise UsageError(f"--model {value} is a file: give the directory that holds config.json and the weights")
    # "models/llama" with a directory models/ here is a mistyped path, not an owner on the hub.
    if not _HUB_ID.fullmatch(value) or beside:
        raise UsageError(f"--model {value}: no such directory (a Hugging Face id would be ORG/NAME)")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise UsageError(
            f"--model {value}: no such directory; to take it from Hugging Face, install xserve[serve] (huggingface_hub)"
        )
    return _ask_hub(value)


def is_local(value: str) -> bool:
    """Whether `resolve_model` can answer without asking anybody: a directory, or a value that it refuses."""
    try:
        path = Path(value).expanduser()
        return path.exists() or path.parent.is_dir() or _HUB_ID.fullmatch(value) is None
    except (OSError, RuntimeError):
        return True


def _ask_hub(hub_id: str) -> Path:
    """Run this module as a program. No deadline of ours: it downloads for as long as it takes, with its own limits."""
    program = "import sys; sys.path[:] = sys.argv[3:]; from launcher.plan.model_source import main; sys.exit(main())"
    path = [entry or str(Path.cwd()) for entry in sys.path]
    command = [sys.executable, "-P", "-c", program, hub_id, str(os.getpid()), *path]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=envs.child_environment(), check=False)
    line = (done.stdout.decode(errors="replace").strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]
    if done.returncode == 0:
        return Path(line)
    if done.returncode == _INTERRUPTED:
        raise KeyboardInterrupt
    if done.returncode == UsageError.exit_code:
        raise UsageError(f"--model {hub_id}: no such directory, and {line}")
    raise HostError(f"--model {hub_id}: no such directory, and Hugging Face could not give it: {line}")


def main() -> int:
    """The program: ORG/NAME and the parent's pid → exit 0 and the directory; 2 (wrong id) or 1 and a line."""
    hub_id, parent = sys.argv[1:3]
    # A download must not go on after the launch that wants it is gone.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return 1
    try:
        print(_snapshot(hub_id))
    except UsageError as error:
        print(error)
        return UsageError.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:
        # Whatever a network, a proxy or a disk may raise: one line is what the person at the screen can use.
        print(_one_line(error))
        return 1
    return 0


def _snapshot(hub_id: str) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    def fetch(offline: bool) -> str:
        return str(
            snapshot_download(hub_id, local_files_only=offline, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
        )

    try:
        cached = fetch(offline=True)
        if envs.hf_hub_offline() or _is_whole(cached):
            return cached
    except HFValidationError as error:
        raise UsageError(f"it is no Hugging Face id: {_one_line(error)}") from error
    except FileNotFoundError:
        if envs.hf_hub_offline():
            raise UsageError("it is not in the cache, and HF_HUB_OFFLINE forbids to ask for it") from None
    try:
        return fetch(offline=False)
    except GatedRepoError as error:
        raise UsageError("it is gated: accept its terms on huggingface.co and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise UsageError("Hugging Face has no model of that name, or HF_TOKEN may not see it") from error


def _is_whole(snapshot: str) -> bool:
    """A download that was broken off leaves a snapshot too: only one with all its weights is taken unasked."""
    try:
        read_weights(Path(snapshot))
    except UsageError:
        return False
    return True


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}" if lines else type(error).__name__
