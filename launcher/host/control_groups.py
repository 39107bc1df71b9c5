"""The control groups above this process, versions 1 and 2, in containers too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from launcher.host.files import read_text


class Group(NamedTuple):
    """One control group directory that holds this process, with the name that its version gives to things."""

    path: Path
    version: int
    shown: str


def groups(root: Path, controller: str) -> Iterator[Group]:
    """Every control group above this process that `controller` may limit, innermost first, versions 1 and 2."""
    paths = dict(_memberships(root))
    for mount_root, mount_point, kind, options in _cgroup_mounts(root):
        if kind == "cgroup2":
            inside, version = paths.get(""), 2
        elif controller in options:
            inside, version = paths.get(controller), 1
        else:
            continue
        if inside is None:
            continue
        # Without a cgroup namespace of its own, a container sees its group's path from the machine's root, while
        # only that group is mounted: then the mount's root is what the path starts with.
        if mount_root != "/" and (inside + "/").startswith(mount_root + "/"):
            inside = inside[len(mount_root) :]
        # "/../x": this group lies outside our namespace's root; only the mount itself can be read.
        parts = [] if ".." in inside.split("/") else [part for part in inside.split("/") if part]
        base = root / mount_point.lstrip("/")
        for depth in range(len(parts), -1, -1):
            yield Group(base.joinpath(*parts[:depth]), version, "/" + "/".join(parts[:depth]))


def _memberships(root: Path) -> Iterator[tuple[str, str]]:
    """(controller, path): one for each version 1 controller; ``""`` for version 2."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            yield controller, path


def _cgroup_mounts(root: Path) -> Iterator[tuple[str, str, str, list[str]]]:
    """(root within the hierarchy, mount point, file system, superblock options)."""
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, types = before.split(" "), after.split(" ")
        if len(fields) >= 5 and len(types) >= 3 and types[0] in ("cgroup", "cgroup2"):
            yield _unescape(fields[3]), _unescape(fields[4]), types[0], types[2].split(",")


def _unescape(text: str) -> str:
    """mountinfo writes blanks as octal escapes."""
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
