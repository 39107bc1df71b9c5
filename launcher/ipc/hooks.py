"""Objects that travel as raw buffers beside the message: who knows how to take them apart and put them together.

A hook is found by the name of the package its types come from, and its module is imported only when such an object is
met (so the package is there already) or arrives. So this room imports neither torch nor numpy.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from launcher.errors import InternalError

Buffer = memoryview | bytearray


class BufferHook(NamedTuple):
    package: str
    """First part of ``type(obj).__module__``; also its name on the wire."""
    take: Callable[[Any], tuple[Any, memoryview] | None]
    """Plain msgpack-able facts and the bytes, contiguous; None: not an object for this hook."""
    make: Callable[[Any, Buffer], Any]
    """The object, on top of the buffer (which is writable, and now belongs to it)."""


_MODULES = {"torch": "launcher.ipc.tensors", "numpy": "launcher.ipc.arrays"}
PACKAGES = frozenset(_MODULES)
"""Of the built-in hooks. What they make from facts that came over a network is checked: wrong ones are an error."""
_hooks: dict[str, BufferHook] = {}
_by_type: dict[type, BufferHook | None] = {}


def register(hook: BufferHook) -> None:
    """For everyone in this process. A later hook for the same package replaces the earlier one."""
    _hooks[hook.package] = hook
    _by_type.clear()


def hook_for(kind: type) -> BufferHook | None:
    try:
        return _by_type[kind]
    except KeyError:
        package = kind.__module__.partition(".")[0]
        found = _hook(package)
        if len(_by_type) < 1000:  # types made at run time must not pile up
            _by_type[kind] = found
        return found


def make(package: str, facts: Any, buffer: Buffer) -> Any:
    """Put together what `package`'s hook took apart. Raises whatever does not fit: the facts may be a stranger's."""
    hook = _hook(package) if type(package) is str else None
    if hook is None:
        raise InternalError(f"a message holds an object of {package!r}, for which there is no buffer hook")
    return hook.make(facts, buffer)


def check_shape(shape: Any, item_bytes: int, buffer: Buffer) -> tuple[int, ...]:
    """The shape, if it is one and its items fill the buffer; ValueError if not."""
    if type(shape) not in (list, tuple) or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"an array has the shape {shape!r}")
    if math.prod(shape) * item_bytes != len(buffer):
        raise ValueError(f"an array of shape {shape} with items of {item_bytes} bytes came with {len(buffer)} bytes")
    return tuple(shape)


def _hook(package: str) -> BufferHook | None:
    if package not in _hooks and package in _MODULES:
        register(importlib.import_module(_MODULES[package]).HOOK)
    return _hooks.get(package)
