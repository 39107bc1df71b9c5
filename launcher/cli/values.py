"""From a flag's text to its value. Each function raises `UsageError` with the end of the sentence that begins with
the flag and the text: "--tp 0" + "is not a positive whole number: give 1 or more"."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from launcher.errors import UsageError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 1 << 10,
    "m": 1 << 20,
    "g": 1 << 30,
    "t": 1 << 40,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_SOCKET_PATH_BYTES = 107


def text(value: str) -> str:
    if not value or not value.isprintable():
        raise UsageError("is empty or has control characters: give some text")
    return value


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number within bounds, both included."""
    bounds = f"{least} or more" if most is None else f"{least} to {most}"

    def parse(value: str) -> int:
        # int() would also take blanks, underscores and other scripts' digits.
        if re.fullmatch(r"[+-]?[0-9]{1,18}", value) is None:
            raise UsageError(f"is not a whole number: give {bounds}")
        if int(value) < least or (most is not None and int(value) > most):
            raise UsageError(f"is out of range: give {bounds}")
        return int(value)

    return parse


def seconds(least: float) -> Callable[[str], float]:
    """A finite duration, `least` included."""

    def parse(value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < least:
            raise UsageError(f"is not a number of seconds: give {least:g} or more")
        return number

    return parse


def share(value: str) -> float:
    """A part of one: above 0, at most 1."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number <= 1:
        raise UsageError("is not a share: give a number above 0, at most 1")
    return number


def size(value: str) -> int:
    """``1000000``, ``512MB`` (10^6), ``2GiB`` or ``2G`` (2^30): bytes."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)", value)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise UsageError("is not a size: give bytes, or a number with a unit, as 2GiB or 512MB")
    count = math.floor(float(match[1]) * unit)
    if count < 1:
        raise UsageError("is less than one byte: give a size such as 2GiB or 512MB")
    return count


def choice(values: Mapping[str, str]) -> Callable[[str], str]:
    """One of the keys; its value. Several keys may stand for one value."""

    def parse(value: str) -> str:
        if value.lower() not in values:
            raise UsageError(f"is no choice here: give {_either(list(values))}")
        return values[value.lower()]

    return parse


def one_of(*names: str) -> Callable[[str], str]:
    return choice({name: name for name in names})


def name_or_class(*names: str) -> Callable[[str], str]:
    """One of `names`, or ``module:Class``; whether that exists is seen when it is imported."""

    def parse(value: str) -> str:
        if value not in names and _DOTTED.fullmatch(value) is None:
            raise UsageError(f"is no choice here: give {_either([*names, 'module:Class'])}")
        return value

    return parse


def switch(value: str) -> bool:
    if value.lower() in ("1", "true", "yes", "on"):
        return True
    if value.lower() in ("", "0", "false", "no", "off"):
        return False
    raise UsageError("is neither on nor off: give true or false")


def numbers(value: str) -> tuple[int, ...]:
    """``0,0,1``: in the order given."""
    parts = [part.strip() for part in value.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,6}", part) for part in parts):
        raise UsageError("is no list of numbers: give for example 0,1")
    return tuple(int(part) for part in parts)


def cpu_lists(value: str) -> tuple[tuple[int, ...], ...]:
    """``0-3,8/4-7``: one list for each worker, as the kernel writes them."""
    from launcher.host.files import parse_list

    found = [parse_list(part.strip()) for part in value.split("/")]
    if not all(found):
        raise UsageError("is no list of CPUs for each worker: give for example 0-3/4-7")
    return tuple(part for part in found if part)


def device_ids(value: str) -> tuple[str, ...]:
    """Whether they are there is seen when the host is known."""
    parts = tuple(part.strip() for part in value.split(","))
    if not all(re.fullmatch(r"[\w./-]+", part) for part in parts):
        raise UsageError("is no list of devices: give for example 0,1 or GPU-<uuid>")
    return parts


def pair(value: str) -> tuple[str, str]:
    key, equals, rest = value.partition("=")
    if not equals or not key.isidentifier():
        raise UsageError("is not of the form key=value: give for example step_ms=5")
    return key, rest


def host(value: str) -> str:
    """A name or an address, without the brackets that IPv6 may have."""
    from launcher.nodes.addresses import check_host

    return check_host(value)


def host_port(value: str) -> tuple[str, int]:
    """``10.0.0.1:29501``, ``[fd00::1]:29501``."""
    from launcher.nodes.addresses import split_host_port

    return split_host_port(value)


def interface(value: str) -> str:
    """Whether it is there is seen when the host is known."""
    if re.fullmatch(r"[^\s/:%]{1,15}", value) is None:
        raise UsageError("is no interface's name: give for example eth0 (ip link lists them)")
    return value


def secret(value: str) -> str:
    """An API key. The caller must not repeat the value in its message."""
    if not value or not all("!" <= c <= "~" for c in value):
        raise UsageError("cannot be sent in an HTTP header: use printable ASCII without blanks")
    return value


def key_file(value: str) -> str:
    """A readable file with at least one API key; its absolute path."""
    read_keys(value)
    return str(Path(value).expanduser().absolute())


def read_keys(path: str) -> tuple[str, ...]:
    """One key a line; empty lines and those that begin with ``#`` are skipped."""
    try:
        lines = [line.strip() for line in Path(path).expanduser().read_text(encoding="utf-8").splitlines()]
    except (UnicodeDecodeError, RuntimeError):
        raise UsageError("is no text file: give a file with one key a line") from None
    except OSError as error:
        raise UsageError(f"cannot be read ({error.strerror}): give a file with one key a line") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise UsageError("holds no key: write one key a line into it")
    for key in keys:
        try:
            secret(key)
        except UsageError as error:
            raise UsageError(f"holds a key that {error}") from None
    return keys


def readable_file(value: str) -> str:
    """An existing file that we may read; its absolute path (children run elsewhere)."""
    try:
        with Path(value).open("rb"):
            pass
    except OSError as error:
        raise UsageError(f"cannot be read ({error.strerror}): give a PEM file") from None
    return str(Path(value).absolute())


def socket_path(value: str) -> str:
    """Where a Unix socket can be made: short enough, in a directory that exists."""
    path = Path(value).absolute()
    if len(os.fsencode(path)) > _SOCKET_PATH_BYTES:
        raise UsageError(f"is longer than the {_SOCKET_PATH_BYTES} bytes of a socket's path: give a shorter one")
    if not path.parent.is_dir():
        raise UsageError(f"cannot be made: there is no directory {path.parent}; create it first")
    if path.is_dir():
        raise UsageError("is a directory: give the path of a socket in it")
    return str(path)


def instance_name(value: str) -> str:
    from launcher.control.places import check_name  # the control room is not needed for --help

    try:
        return check_name(value)
    except UsageError as error:  # names the flag and the value itself, as its other callers need it to
        raise UsageError(str(error).partition(f"--name {value!r} ")[2] or str(error)) from None


def _either(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
