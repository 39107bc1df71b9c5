"""Arbitrary objects, between a parent and its own children only: cloudpickle (protocol 5), buffers out of band.

Imported by a codec that is trusted, when it meets an object that msgspec cannot carry.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle

from launcher.ipc import hooks
from launcher.ipc.hooks import Buffer


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # untyped
    """Functions and classes of ``__main__`` by value, tensors and arrays by buffer."""

    def __init__(self, file: io.BytesIO, buffers: list[memoryview]) -> None:
        super().__init__(file, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw()))

    def reducer_override(self, obj: Any) -> Any:
        hook = hooks.hook_for(type(obj))
        if hook is not None:
            taken = hook.take(obj)
            if taken is not None:
                facts, buffer = taken
                return hooks.make, (hook.package, facts, pickle.PickleBuffer(buffer))
        return super().reducer_override(obj)


def dumps(obj: Any) -> tuple[memoryview, list[memoryview]]:
    """The pickle, and the buffers that go beside it (which still belong to `obj`)."""
    file = io.BytesIO()
    buffers: list[memoryview] = []
    _Pickler(file, buffers).dump(obj)
    return file.getbuffer(), buffers


def loads(head: memoryview, buffers: Sequence[Buffer]) -> Any:
    return pickle.loads(head, buffers=buffers)  # noqa: S301  # only a trusted codec calls this
