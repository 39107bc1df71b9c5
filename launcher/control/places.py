"""Where run directories may stand: candidates in order, and what makes a directory one that we can trust.

    RUNTIME_DIRECTORY          the instance's own directory, made by systemd (`whole`)
    XDG_RUNTIME_DIR/xserve     a base: one directory per instance in it
    /run/user/<uid>/xserve     a base
    <TMPDIR>/xserve-<uid>      a base, private: anybody may write beside it
    /tmp/xserve-<uid>          a base, private
    /run/xserve                looked into only: systemd units of this machine

A Unix socket's path holds 107 bytes. A candidate too long for that is passed over, and a name that would make it too
long is cut and given a hash, so that neither TMPDIR nor a name can break a start.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launcher import envs
from launcher.errors import HostError, UsageError

SOCKET_PATH_BYTES = 107
"""sun_path less its closing NUL."""
FILE_NAME_BYTES = 24
"""Room kept for a file name in the run directory (``control.sock``, ``core0.sock`` …)."""
DIRECTORY_BYTES = SOCKET_PATH_BYTES - 1 - FILE_NAME_BYTES
SHORTEST_NAME = 18
"""Bytes that a base must leave for an instance's directory: nine of the name, a dash and eight of the hash."""
UNITS = Path("/run/xserve")


def check_name(name: str) -> str:
    """The name, if it can be a directory's; `UsageError` with what is wrong otherwise."""
    bad = [c for c in name if c in "/\0" or not c.isprintable()]
    if not name or bad or name.startswith((".", "-")) or len(os.fsencode(name)) > 255:
        raise UsageError(
            f"--name {name!r} cannot name an instance: give 1 to 255 bytes without '/' or control characters, "
            "not starting with '.' or '-'"
        )
    return name


def directory_name(name: str, base: Path) -> str:
    """`name`, or a cut of it with a hash when ``base/name`` would be too long for a socket's path."""
    room = DIRECTORY_BYTES - len(os.fsencode(base)) - 1
    if len(os.fsencode(name)) <= room:
        return name
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:8]
    # Cut on bytes, dropping a character cut in half; the full name stands in instance.json.
    cut = os.fsencode(name)[: room - 9].decode("utf-8", "ignore")
    return f"{cut}-{digest}"


def whole_directory() -> Path | None:
    """The directory that systemd made for this instance, if there is one that we can use."""
    given = envs.runtime_directory()
    if given is None or len(os.fsencode(given)) > DIRECTORY_BYTES:
        return None
    return given if _is_ours(given) else None


def base_for_new() -> Path:
    """The first base that is fit for new run directories, made if need be. `HostError` when none is."""
    for parent in (envs.xdg_runtime_dir(), Path("/run/user") / str(os.getuid())):
        base = parent / "xserve" if parent is not None else None
        if base is None or not _is_short(base) or parent is None or not _is_ours(parent):
            continue
        try:
            make_private(base)
        except OSError:
            continue  # read-only, full, or gone since: the next candidate will do
        return base
    base = next(b for b in _temporary_bases() if _is_short(b))
    try:
        make_private(base)
    except OSError as error:
        raise HostError(f"cannot make the run directory {base}: {error.strerror}; set XDG_RUNTIME_DIR") from error
    return base


def bases_to_search() -> Iterator[Path]:
    """Every base in which an instance of this user, or a unit of this machine, may be found."""
    seen: set[Path] = set()
    parents = (envs.xdg_runtime_dir(), Path("/run/user") / str(os.getuid()))
    for base in (*(p / "xserve" for p in parents if p is not None), *_temporary_bases(), UNITS):
        if base in seen:
            continue
        seen.add(base)
        try:
            # A stranger may have made /tmp/xserve-<uid> before us: what he put there is not looked at.
            if base == UNITS or _fault_of(base) is None:
                yield base
        except OSError:
            continue  # not there, or (XDG_RUNTIME_DIR kept by sudo) in a directory that we may not enter


def directories() -> Iterator[Path]:
    """Every directory that may be an instance's."""
    whole = whole_directory()
    if whole is not None:
        yield whole
    for base in bases_to_search():
        try:
            yield from sorted(base.iterdir())
        except OSError:
            continue  # not ours to read, or removed since


def make_private(path: Path) -> None:
    """Make `path` with mode 0700, or accept it if it is a directory of ours that nobody else can enter.

    `HostError` for a symbolic link, another owner or a wider mode; `OSError` when it cannot be made.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass  # looked at below, like a fresh one: between the two anybody may have replaced it
    fault = _fault_of(path)
    if fault is not None:
        raise HostError(f"{path} {fault}: remove it, or set XDG_RUNTIME_DIR to a directory of your own")


def _fault_of(path: Path) -> str | None:
    """Why `path` is not a private directory of this user; None when it is."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link, not a directory"
    if not stat.S_ISDIR(status.st_mode):
        return "is not a directory"
    if status.st_uid != os.getuid():
        return f"belongs to uid {status.st_uid}, not to uid {os.getuid()}"
    if stat.S_IMODE(status.st_mode) & 0o077:
        return f"has mode {stat.S_IMODE(status.st_mode):o}, not 700"
    return None


def _temporary_bases() -> list[Path]:
    name = f"xserve-{os.getuid()}"
    try:
        first = [Path(tempfile.gettempdir()) / name]
    except OSError:
        first = []  # no usable temporary directory at all: /tmp will say so
    return [*first, Path("/tmp") / name]  # noqa: S108 owner, mode and type are checked before use


def _is_short(base: Path) -> bool:
    return len(os.fsencode(base)) + 1 + SHORTEST_NAME <= DIRECTORY_BYTES


def _is_ours(path: Path) -> bool:
    """A directory of this user's that others cannot write to. Links are followed: systemd makes some."""
    try:
        status = path.stat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
