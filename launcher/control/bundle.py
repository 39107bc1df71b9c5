"""Crash bundles: what was known when a process of the tree failed, kept for whoever asks the day after.

Two files a failure in the state directory, ``<name>/<time>-<title>.txt`` for reading and ``….json`` for programs; the
newest `KEPT` failures of an instance are kept. Secrets are hidden. A bundle that cannot be written is a line in the
log, never a second failure.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from launcher import __version__
from launcher.control.places import directory_name
from launcher.errors import Failure
from launcher.logs import SECRETS

KEPT = 10
_PACKAGES = ("torch", "transformers", "pyzmq", "msgspec", "uvicorn")


def write_bundle(
    base: Path,
    name: str,
    cause: Failure,
    follow_ons: Sequence[Failure],
    *,
    story: str,
    outputs: Mapping[str, Sequence[str]],
    facts: Mapping[str, Any],
) -> Path:
    """The path of the text file. `outputs`: title → its last lines, stacks included; `facts`: plan, state, notes.

    Raises OSError.
    """
    directory = base / directory_name(name, base)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    now = datetime.datetime.now(tz=datetime.UTC)
    stem = f"{now:%Y%m%dT%H%M%S.%f}-{cause.title}"
    content = {
        "time": now.isoformat(),
        "name": name,
        "versions": versions(),
        "cause": msgspec.to_builtins(cause),
        "follow_ons": [msgspec.to_builtins(one) for one in follow_ons],
        "last_output": {title: list(lines) for title, lines in outputs.items()},
        **facts,
    }
    encoded = msgspec.json.format(msgspec.json.encode(content), indent=1).decode()
    _write(directory / f"{stem}.json", encoded)
    text = directory / f"{stem}.txt"
    _write(text, _text(now, name, story, outputs, facts))
    _prune(directory)
    return text


def versions() -> dict[str, str]:
    """Ours, Python's, the kernel's and those of the packages that matter; nothing is imported for it."""
    found = {"xserve": __version__, "python": sys.version.split()[0], "kernel": os.uname().release}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _text(
    now: datetime.datetime, name: str, story: str, outputs: Mapping[str, Sequence[str]], facts: Mapping[str, Any]
) -> str:
    parts = [f"{name}, {now.isoformat()}", "", story, ""]
    parts += [f"note: {note}" for note in facts.get("notes", ())]
    for title, lines in outputs.items():
        if lines:
            parts += ["", f"--- last output of {title}", *lines]
    parts += ["", "--- versions", *(f"{package} {version}" for package, version in versions().items())]
    return "\n".join(parts) + "\n"


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(SECRETS.text(text))


def _prune(directory: Path) -> None:
    """Names begin with the time, so the oldest come first."""
    stems = sorted({path.stem for path in directory.glob("*.json")})
    for stem in stems[:-KEPT]:
        for suffix in (".json", ".txt"):
            (directory / f"{stem}{suffix}").unlink(missing_ok=True)
