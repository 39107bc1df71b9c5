"""The run directory of an instance: claimed by a lock for the owner's life, found by others, reclaimed after a death.

Files in it::

    lock            flock'ed by the supervisor from `claim` to its end; the kernel lets go of it however it dies
    instance.json   who it is (`Instance`); written whole by the owner, read by `status` and `stop`
    control.sock    the control socket
    …               sockets and rendezvous files of the tree

"Live" means exactly: somebody holds the lock. The pid in instance.json is for people and for pidfds. Whoever gets the
lock owns all files of the directory and may remove them; nobody removes a file without holding the lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from launcher.clock import Deadline
from launcher.control import places
from launcher.errors import CannotTellError, HostError, InternalError, NotRunningError, UsageError
from launcher.process.procfs import read_stat, start_time

LOCK = "lock"
RECORD = "instance.json"
CONTROL_SOCKET = "control.sock"
DEFAULT_NAME = "default"
CLAIM_SECONDS = 3.0
"""How long a claim waits for a holder that is no running owner: a reclaim under way, an owner not yet recorded, or the
guard of a dead supervisor, which has 2 s to clean up."""


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """A launch, as others see it."""

    name: str
    pid: int
    start_time: int
    """Field 22 of /proc/<pid>/stat: with the pid it names the process for ever."""
    launch_id: str = ""
    url: str = ""
    since: float = 0.0
    """Unix seconds at which it was claimed."""
    path: str = ""
    """Its run directory."""

    @property
    def control_socket(self) -> Path:
        return Path(self.path) / CONTROL_SOCKET


class RunDirectory:
    """The owner's side. Keep it until `remove`; `lock_fd` is closed with it, and must not be handed to a child."""

    def __init__(self, path: Path, name: str, lock_fd: int, *, whole: bool) -> None:
        self.path = path
        self.name = name
        self.lock_fd = lock_fd
        self._whole = whole
        """The directory is systemd's: it is emptied, not removed."""
        self._owner = os.getpid()
        self.instance = Instance(
            name=name,
            pid=self._owner,
            start_time=start_time(self._owner),
            since=time.time(),
            path=str(path),
        )

    def socket_path(self, file_name: str) -> Path:
        """A path for a socket of this instance, sure to fit."""
        if len(os.fsencode(file_name)) > places.FILE_NAME_BYTES:
            raise InternalError(f"socket name {file_name!r} is longer than {places.FILE_NAME_BYTES} bytes")
        return self.path / file_name

    @property
    def control_socket(self) -> Path:
        return self.socket_path(CONTROL_SOCKET)

    def record(self, *, launch_id: str | None = None, url: str | None = None) -> None:
        """Write instance.json, with what is known by now."""
        known = {"launch_id": launch_id, "url": url}
        self.instance = msgspec.structs.replace(self.instance, **{k: v for k, v in known.items() if v is not None})
        fresh = self.path / f"{RECORD}.new"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(self.instance))
        fresh.replace(self.path / RECORD)  # a reader sees the old one or the new one, never half of one

    def forget(self) -> None:
        """Be no instance that others can find: only a locked directory, swept like any other if its owner dies."""
        (self.path / RECORD).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove everything and let go of the lock. Idempotent; in a forked child it only closes the descriptor."""
        if self.lock_fd < 0:
            return
        if os.getpid() == self._owner:
            _clear(self.path, whole=self._whole)
        os.close(self.lock_fd)
        self.lock_fd = -1


def claim(name: str | None) -> RunDirectory:
    """Take the run directory for `name`; without one the first free of ``default``, ``default-2``, …

    `UsageError` when a live instance has that name; `HostError` when no directory can be made.
    """
    live = {instance.name: instance for instance in list_instances()}
    if name is not None and places.check_name(name) in live:
        raise _taken(live[name])
    whole = places.whole_directory()
    if whole is not None:
        taken = _take(whole, name or whole.name, whole=True)
        if taken is not None:
            return taken
    base = places.base_for_new()
    _sweep(base)
    for candidate in [name] if name is not None else _free_names(live):
        taken = _take(base / places.directory_name(candidate, base), candidate, whole=False)
        if taken is not None:
            return taken
    holder = next((i for i in list_instances() if i.name == name), None)
    raise _taken(holder) if holder else HostError(f"the run directory of {name!r} in {base} is busy: try again")


def list_instances() -> list[Instance]:
    """Live instances that this user can see, by name. One that is starting this very moment may be missing."""
    found: dict[str, Instance] = {}
    for path in places.directories():
        instance = _read(path)
        if instance is not None and is_live(path) and is_running(instance):
            found.setdefault(instance.name, instance)
    return [found[name] for name in sorted(found)]


def find(name: str | None) -> Instance:
    """The live instance called `name`, or the only one there is.

    `NotRunningError` when there is none, `UsageError` when there are several and no name, `CannotTellError` when it is
    another user's.
    """
    instances = list_instances()
    if name is None:
        # An engine inside somebody's script has a run directory too, but nobody in it who answers.
        instances = [i for i in instances if i.control_socket.exists()] or instances
        if len(instances) > 1:
            names = ", ".join(i.name for i in instances)
            raise UsageError(f"{len(instances)} instances are running ({names}): say which one with --name")
        if not instances:
            raise NotRunningError("no instance is running")
        return instances[0]
    for instance in instances:
        if instance.name == name:
            return instance
    _refuse_foreign(name)
    others = f"; running: {', '.join(i.name for i in instances)}" if instances else ""
    raise NotRunningError(f"no instance {name!r} is running{others}")


def is_live(path: Path) -> bool:
    """Whether somebody holds the lock of the run directory `path`."""
    try:
        descriptor = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        # Shared, so that two who ask don't see each other; an owner asking for the whole lock tries again (`_take`).
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def reclaim(path: Path) -> bool:
    """Remove what a dead owner left at `path`. False: it is live, or there is nothing."""
    if not path.is_dir() or not (path / LOCK).exists():
        return False
    taken = _take(path, path.name, whole=False, create=False)
    if taken is None:
        return False
    taken.remove()
    return True


REMOVE_LEFT = f"{__name__}:remove_left"
"""For a guard's settings: it imports the function by this name before it is needed."""


def remove_left(path: str) -> None:
    """Remove the directory of a dead supervisor. Only for its guard, which holds a copy of the lock's descriptor."""
    directory = Path(path)
    if directory.is_dir():
        _clear(directory, whole=directory == places.whole_directory())


def is_running(instance: Instance) -> bool:
    """Whether its supervisor is a living process: a zombie, which nobody reaps in some containers, is none."""
    found = read_stat(instance.pid)
    return found is not None and found.start_time == instance.start_time and found.state not in "ZX"


def _free_names(live: dict[str, Instance]) -> Iterator[str]:
    number = 1
    while True:
        name = DEFAULT_NAME if number == 1 else f"{DEFAULT_NAME}-{number}"
        if name not in live:
            yield name
        number += 1


def _take(path: Path, name: str, *, whole: bool, create: bool = True) -> RunDirectory | None:
    """The directory, emptied and locked, or None when a running owner has it."""
    deadline = Deadline.after(CLAIM_SECONDS)
    while True:
        descriptor = _lock(path, create=create, whole=whole)
        if descriptor is not None:
            _clear(path, whole=whole, keep_lock=True)
            taken = RunDirectory(path, name, descriptor, whole=whole)
            taken.record()
            return taken
        holder = _read(path)
        if deadline.expired or (holder is not None and is_running(holder) and is_live(path)):
            return None
        time.sleep(0.005)  # a flock with a deadline does not exist; the holder is another's `is_live` or `reclaim`


def _lock(path: Path, *, create: bool, whole: bool) -> int | None:
    """A descriptor that holds the lock *of the file that is there now*; None: held, or lost a race."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    if create and not whole:
        places.make_private(path)
    try:
        descriptor = os.open(path / LOCK, flags, 0o600)
    except FileNotFoundError:
        return None  # a reclaim removed the directory between the two calls
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The file may have been unlinked while we opened it: a lock on it would guard nothing.
        if os.path.samestat(os.fstat(descriptor), (path / LOCK).stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def _clear(path: Path, *, whole: bool, keep_lock: bool = False) -> None:
    """Remove the directory's contents; the lock last, since its name is what newcomers lock. Links are not followed."""
    for entry in path.iterdir():
        if entry.name == LOCK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    if keep_lock:
        return
    (path / LOCK).unlink(missing_ok=True)
    if not whole:
        try:
            path.rmdir()
        except OSError:
            pass  # a newcomer has made his lock in it already: it is his now


def _sweep(base: Path) -> None:
    """Remove what dead owners left in `base`, whatever their names were."""
    for path in base.iterdir():
        if path.is_dir() and not path.is_symlink() and (path / LOCK).exists() and not is_live(path):
            reclaim(path)


def _read(path: Path) -> Instance | None:
    try:
        record = msgspec.json.decode((path / RECORD).read_bytes(), type=Instance)
    except (OSError, msgspec.DecodeError):
        return None
    return msgspec.structs.replace(record, path=str(path))


def _taken(instance: Instance) -> UsageError:
    return UsageError(
        f"--name {instance.name}: an instance of that name is running with pid {instance.pid}; "
        f"stop it (xserve stop --name {instance.name}) or give another name"
    )


def _refuse_foreign(name: str) -> None:
    path = places.UNITS / name
    try:
        owner = path.stat().st_uid
    except OSError:
        return
    if not os.access(path / LOCK, os.R_OK) and owner != os.getuid():
        raise CannotTellError(f"{path} belongs to uid {owner}: ask as that user or as root")
