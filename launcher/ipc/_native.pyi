"""Types of `_native.c`; `native.py` says what the calls do."""

from collections.abc import Callable
from mmap import mmap
from typing import Any

from launcher.ipc.native import SpinFields as SpinFields

LAYOUT: tuple[int, ...]

class Writer:
    turn: int
    slowest: int
    def __init__(self, memory: mmap, capacity: int, readers: int, event: int, longest: int, /) -> None: ...
    def push(self, tag: int, head: bytes | memoryview, /) -> bool: ...

class Reader:
    def __init__(
        self,
        memory: mmap,
        capacity: int,
        readers: int,
        index: int,
        event: int,
        decoders: tuple[Callable[[memoryview], Any] | None, ...],
        empty: object,
        /,
    ) -> None: ...
    def take(self, spin: SpinFields | None, epoll: int, timeout_ms: int, /) -> Any: ...

def wait(
    readers: tuple[Reader, ...], spin: SpinFields, first: Reader | None, epoll: int, timeout_ms: int, /
) -> bool: ...
def ready(readers: tuple[Reader, ...], /) -> list[int]: ...
def copy(to: mmap, at: int, data: memoryview, /) -> None: ...
