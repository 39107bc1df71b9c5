"""The buffer hook for numpy arrays. Imported by `launcher.ipc.hooks` when an array is met."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from launcher.ipc.hooks import Buffer, BufferHook, check_shape

_DTYPE = re.compile(
    r"[<>|=]?(b1|[iu][1248]|f(2|4|8|16)|c(8|16|32)|[SUV][1-9]\d{0,5}|[mM]8(\[\d{0,9}[a-zA-Z]{1,2}\])?)", re.ASCII
)
"""What numpy is asked to understand; never objects, whose bytes would be pointers."""


def take(array: Any) -> tuple[Any, memoryview] | None:
    """Plain arrays of builtin dtypes, any shape and stride; others are left to pickle."""
    if type(array) is not np.ndarray or array.dtype.hasobject or np.dtype(array.dtype.str) != array.dtype:
        return None
    if not array.dtype.itemsize:  # of empty strings: any number of them is no bytes
        return None
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    flat = np.ravel(array, order="F" if fortran else "C")
    facts = (array.dtype.str, array.shape, "F" if fortran else "C")
    return facts, memoryview(flat.view(np.uint8))  # type: ignore[arg-type]  # numpy's stubs


def make(facts: Any, buffer: Buffer) -> np.ndarray[Any, Any]:
    name, shape, order = facts
    if type(name) is not str or _DTYPE.fullmatch(name) is None or order not in ("C", "F"):
        raise ValueError(f"an array of type {name!r} in order {order!r} cannot be made")
    dtype = np.dtype(name)
    shape = check_shape(shape, dtype.itemsize, buffer)
    if not buffer:
        return np.empty(shape, dtype)
    return np.frombuffer(buffer, dtype).reshape(shape, order=order)


HOOK = BufferHook("numpy", take, make)
