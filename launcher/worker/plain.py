"""Which values may travel to ranks on other machines, where nothing is pickled.

None, bool, int (64 bits), float, str, bytes, arrays, CPU tensors, lists and dicts of these: what msgpack gives back as
it was. A tuple is taken too, and arrives as a list. Subclasses are not: they would arrive as what they derive from.
"""

from __future__ import annotations

from typing import Any

from launcher.errors import UsageError
from launcher.ipc.hooks import hook_for

SCALARS = frozenset((type(None), bool, int, float, str))
_BYTES = frozenset((bytes, bytearray, memoryview))
_DEPTH = 32
"""Lists in lists; a list within itself is found by it."""


def require_plain(value: Any, what: str, depth: int = _DEPTH) -> None:
    """`UsageError` if `value` cannot travel between machines (see the module)."""
    kind = type(value)
    if kind in SCALARS or kind in _BYTES:
        return
    if not depth:
        raise UsageError(f"{what} cannot cross nodes: lists in it are nested more than {_DEPTH} deep")
    if kind is list or kind is tuple:
        for item in value:
            require_plain(item, what, depth - 1)
    elif kind is dict:
        for key, item in value.items():
            if type(key) not in SCALARS:
                raise UsageError(f"{what} cannot cross nodes: a dict in it has a {type(key).__qualname__} for a key")
            require_plain(item, what, depth - 1)
    elif (hook := hook_for(kind)) is None or hook.take(value) is None:
        raise UsageError(
            f"{what} cannot cross nodes: it holds a {kind.__module__}.{kind.__qualname__}; what can are None, bool, "
            "int, float, str, bytes, numpy arrays, CPU tensors, and lists and dicts of these"
        )
