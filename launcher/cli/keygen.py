"""`xserve keygen`: the key that the nodes of a cluster share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from launcher.cli.flags import KEY_FILE
from launcher.errors import UsageError


def keygen(given: dict[str, Any]) -> int:
    """Write a key to a file that is not there yet: 0. `UsageError` when there is no file to write."""
    name = given["file"]  # never from the environment: it is for this one command
    if not name:
        raise UsageError(f"keygen needs the file to write: xserve keygen {KEY_FILE.example}")
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise UsageError(f"{name}: there is no home directory for ~: give a whole path") from None
    from launcher.nodes.key_file import write_key

    write_key(path)
    sys.stdout.write(f"wrote {path}: copy it to every node (mode 0600), and give it as --cluster-key-file {path}\n")
    return 0
