"""The buffer hook for numpy arrays. Imported by `launcher.ipc.hooks` when an array is met."""

from __future__ import annotations

from typing import Any

import numpy as np

from launcher.ipc.hooks import Buffer, BufferHook


def take(array: Any) -> tuple[Any, memoryview] | None:
    """Plain arrays of builtin dtypes, any shape and stride; others are left to pickle."""
    if type(array) is not np.ndarray or array.dtype.hasobject or np.dtype(array.dtype.str) != array.dtype:
        return None
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    flat = np.ravel(array, order="F" if fortran else "C")
    facts = (array.dtype.str, array.shape, "F" if fortran else "C")
    return facts, memoryview(flat.view(np.uint8))  # type: ignore[arg-type]  # numpy's stubs


def make(facts: Any, buffer: Buffer) -> np.ndarray[Any, Any]:
    dtype, shape, order = facts
    if not buffer:
        return np.empty(shape, dtype)
    return np.frombuffer(buffer, dtype).reshape(shape, order=order)


HOOK = BufferHook("numpy", take, make)
