"""Memory and descriptors from the kernel: memfd, seals, eventfd, private mappings with a finalizer, holes, headroom.

A memfd has no name: nothing is left in /dev/shm whoever is killed, and /dev/shm's size limit does not apply.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Iterable

from launcher.errors import HostError
from launcher.host import memory_headroom_of
from launcher.ipc.layout import DATA_AT

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_NORESERVE = 0x4000
_PUNCH_HOLE = 0x2 | 0x1  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE

CHECKED_BYTES = 8 << 20
"""Smaller allocations are not checked: reading the limits costs about 0.2 ms."""


def require_headroom(needed: int, what: str) -> None:
    """Raises `HostError` when `needed` more bytes cannot be had.

    Outgrowing a memory cgroup is no error code but SIGKILL, whichever way the page is made: so look first.
    """
    if needed < CHECKED_BYTES:
        return
    found = memory_headroom_of()
    if needed > found.bytes:
        raise HostError(
            f"{what} needs {needed / 2**20:.0f} MiB of memory, but only {found.bytes / 2**20:.0f} MiB can be had "
            f"(limited by {found.origin}): free memory or raise the limit"
        )


def create_ring_memory(name: str, capacity: int) -> int:
    """A memfd for header and data; its size is sealed. Pages come when touched."""
    require_headroom(capacity, f"ring {name!r}")
    fd = os.memfd_create(f"xserve-ring:{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, DATA_AT + capacity)
        # A peer that shrank it would make every other one die of SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def create_arena_memory(name: str) -> int:
    """An empty memfd that the writer grows; it can never shrink."""
    fd = os.memfd_create(f"xserve-arena:{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def create_eventfd() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def map_shared(fd: int, length: int) -> mmap.mmap:
    """Readable and writable, seen by all. (Python's mmap keeps a duplicate of `fd` until it is closed.)"""
    return mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def map_private(fd: int, offset: int, length: int, released: Callable[[], None]) -> memoryview:
    """Map `length` bytes at page-aligned `offset`; writes stay with this process (copy on write).

    It is unmapped when the last memoryview, array or tensor on it dies; then `released` is called. Holds no
    descriptor, however long it lives. (That is why this is not `mmap.mmap`.)
    """
    address = _LIBC.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE, fd, offset)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {length} bytes of an arena: {os.strerror(code)}")
    block = (ctypes.c_ubyte * length).from_address(address)
    finalizer = weakref.finalize(block, _unmap, address, length, released)
    # At exit arrays may still point here; the process's end unmaps it anyway.
    finalizer.atexit = False
    return memoryview(block).cast("B")


def _unmap(address: int, length: int, released: Callable[[], None]) -> None:
    _LIBC.munmap(address, length)
    released()


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Give the pages back; reads see zeros. A kernel that cannot do it keeps them: they are used again later."""
    _LIBC.fallocate(fd, _PUNCH_HOLE, offset, length)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """All of `data`. Twice as fast as a mapping for pages not yet there: they are neither zeroed nor faulted in."""
    while data:
        done = os.pwrite(fd, data[: 1 << 30], offset)
        data = data[done:]
        offset += done


def wake(eventfd: int) -> None:
    """Whoever sleeps on it wakes up. Never blocks: nobody reads the counter, and it cannot fill up."""
    os.eventfd_write(eventfd, 1)


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
