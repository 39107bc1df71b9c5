"""Reading the kernel's small text files. What is not there, or cannot be read, is empty; nothing raises."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

ROOT = Path("/")
_LONGEST_RANGE = 1 << 16


def read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """A file with one number; None for ``max``, a missing file and anything else."""
    found = read_text(path)
    return int(found) if found.isascii() and found.isdigit() else None


def read_fields(path: Path) -> dict[str, int]:
    """``name number`` lines."""
    pairs = (line.split() for line in read_text(path).splitlines())
    return {p[0]: int(p[1]) for p in pairs if len(p) == 2 and p[1].isdigit()}


def list_entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def read_list(path: Path) -> tuple[int, ...]:
    """Numbers as the kernel lists them, ``0-3,8``; empty for anything that is no such list."""
    return parse_list(read_text(path)) or ()


def parse_list(text: str) -> tuple[int, ...] | None:
    """``0-3,8`` → (0, 1, 2, 3, 8), sorted, each once. None: it is no such list. The empty text is the empty list."""
    found: set[int] = set()
    for part in text.split(",") if text.strip() else []:
        first, dash, last = part.strip().partition("-")
        if not (first.isascii() and first.isdigit()) or (dash and not (last.isascii() and last.isdigit())):
            return None
        if int(last or first) - int(first) > _LONGEST_RANGE:
            return None
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def shown_list(numbers: Iterable[int]) -> str:
    """The shortest way to write it: (0, 1, 2, 3, 8) → ``0-3,8``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
