"""The cluster key's file: one line of 64 hex digits, readable by its owner only. Knows no ZMQ.

::

    # xserve cluster key: the same file on every node
    9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08

Messages name the file and its fault, never what is in it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from launcher import envs
from launcher.errors import HostError, UsageError

KEY_BYTES = 32
_MAX_FILE = 4096
_HEAD = "# xserve cluster key: keep it secret, and the same on every node\n"


def read_key(path: Path) -> bytes:
    """The key's `KEY_BYTES` bytes. `UsageError`: no such file, others may read it, or it holds no key."""
    try:
        # Not blocking: a FIFO at that path must not hold up the start.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UsageError(
            f"--cluster-key-file {path} cannot be read: {error.strerror}; make one with: xserve keygen {path}"
        ) from error
    try:
        # Of the open file: a path can be exchanged between a look and an open.
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise UsageError(f"--cluster-key-file {path} is no regular file; make one with: xserve keygen FILE")
        # systemd lets the unit's user read its credentials by an access list, whose mask shows as the group's mode.
        given_by_systemd = path.absolute().parent == envs.credentials_directory()
        if mode & (0o037 if given_by_systemd else 0o077):
            raise UsageError(
                f"--cluster-key-file {path} may be read by others (mode {stat.S_IMODE(mode):04o}): chmod 600 {path}"
            )
        content = os.read(fd, _MAX_FILE + 1)
    finally:
        os.close(fd)
    return _parse(content, path)


def _parse(content: bytes, path: Path) -> bytes:
    lines = [line.strip() for line in content.split(b"\n")]
    lines = [line for line in lines if line and not line.startswith(b"#")]
    if len(lines) != 1 or len(content) > _MAX_FILE:
        found = "more than one line" if len(lines) > 1 else "no key"
        raise UsageError(f"--cluster-key-file {path} holds {found}; make one with: xserve keygen FILE")
    with contextlib.suppress(ValueError):
        # Not bytes.fromhex alone: it passes over blanks.
        key = bytes.fromhex(lines[0].decode("ascii"))
        if len(lines[0]) == 2 * KEY_BYTES == 2 * len(key):
            return key
    raise UsageError(
        f"--cluster-key-file {path} holds no key of {2 * KEY_BYTES} hex digits ({len(lines[0])} characters); "
        "make one with: xserve keygen FILE"
    )


def write_key(path: Path) -> None:
    """A new random key at `path`, mode 0600, on the disk when this returns.

    `UsageError`: something is there already (a key in use is never overwritten); `HostError`: cannot be written.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError as error:
        raise UsageError(f"{path} exists already: give another name, or remove it if no node uses it") from error
    except OSError as error:
        raise HostError(f"cannot write a key to {path}: {error.strerror}") from error
    try:
        with os.fdopen(fd, "w") as file:
            os.fchmod(fd, 0o600)  # whatever the umask is
            file.write(f"{_HEAD}{secrets.token_hex(KEY_BYTES)}\n")
            file.flush()
            os.fsync(fd)
        _sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(path)  # half a key would be refused later, by a message about something else
        raise HostError(f"cannot write a key to {path}: {error.strerror}") from error


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
