"""The warm-start helper forks after this import: it must leave one thread and no device context behind."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import os
import launcher.models.preload
import torch
print(len(os.listdir("/proc/self/task")), torch.cuda.is_initialized(), torch.distributed.is_initialized())
fds = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd") if int(n) > 2]
print([os.readlink(path) for path in fds if os.path.lexists(path)])
"""


def test_the_import_leaves_one_thread_and_opens_nothing() -> None:
    environment = {"PATH": "/usr/bin:/bin", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=90, check=True
    )
    first, second = found.stdout.splitlines()
    assert first == "1 False False"
    assert "socket" not in second
    assert "eventfd" not in second
