"""After each test nothing may be left: no child, no descriptor, no thread, no environment change."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest


def eventually(condition: Callable[[], object], timeout: float = 10.0, what: str = "condition") -> object:
    """Poll `condition` until it is true; its value. Fails the test at the deadline, naming what was awaited."""
    end = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout} s: {what}")
        time.sleep(0.005)


def pytest_configure() -> None:
    """Before anything imports numpy or torch: their pools are threads, and a process with threads is not forked."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    # What tests leave for post-mortems is nobody's.
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="xs-state-")


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ.pop("XDG_STATE_HOME", ""), ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that fork this process go first: libraries that the others use leave threads for the process's life."""

    def place(item: pytest.Item) -> int:
        rooms = item.path.parts
        if "process" in rooms or "fork]" in item.name or "fork-" in item.name:
            return 0
        return 2 if {"models", "parallel", "e2e_model"} & set(rooms) else 1

    items.sort(key=place)


def _descriptors() -> dict[int, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[int(entry.name)] = str(entry.readlink())
        except OSError:
            continue  # the listing's own descriptor
    return found


def _foreign(target: str) -> bool:
    """Descriptors that libraries keep for the process's life, once used."""
    return target.startswith(("/dev/", "anon_inode:[io_uring]", "/proc/")) or ".so" in target


@pytest.fixture(autouse=True)
def leftovers(request: pytest.FixtureRequest) -> Iterator[None]:
    fds, threads, environ = _descriptors(), set(threading.enumerate()), dict(os.environ)
    yield
    me = psutil.Process()

    def children() -> list[psutil.Process]:
        return [c for c in me.children(recursive=True) if "resource_tracker" not in " ".join(_cmdline(c))]

    try:
        eventually(lambda: not children(), 5, "no child left")
    except AssertionError:
        left = [(c.pid, c.status(), _cmdline(c)) for c in children()]
        for child in children():
            child.kill()
        pytest.fail(f"children left: {left}")
    if request.node.get_closest_marker("keeps_descriptors"):
        return

    def new_fds() -> dict[int, str]:
        return {n: t for n, t in _descriptors().items() if fds.get(n) != t and not _foreign(t)}

    try:
        eventually(lambda: len(new_fds()) == 0, 3, "no descriptor left")
    except AssertionError:
        pytest.fail(f"descriptors left: {new_fds()}")
    alive = [t for t in threading.enumerate() if t not in threads and not t.daemon]
    assert not alive, f"threads left: {alive}"
    changed = {k for k in {*environ, *os.environ} if environ.get(k) != os.environ.get(k)} - {"PYTEST_CURRENT_TEST"}
    assert not changed, f"environment changed: {changed}"


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
