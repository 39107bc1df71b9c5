"""The hot calls in C (`_native.c`), when they were built for this layout; without them everything runs in Python.

What the C objects do, in the words of the Python that does the same:

`Writer.push(tag, head)`       the body of `QueueWriter.enqueue` when there is room ahead; False: nothing was done.
`Reader.take(spin, …)`         yield, sleep, then `QueueReader._take`, for records that are a struct, a plain value or
                               bytes; NotImplemented: none came, or it is not one of these, and nothing was done.
                               Without a spin it does not wait, and returns `EMPTY`.
`wait(readers, spin, first …)`  `WaitSet.wait`: True when one is ready.
`ready(readers)`               `WaitSet.ready`.
`copy(to, at, data)`           ``to[at : at + len(data)] = data``, past the caches when it is large.

They sleep only when given an epoll descriptor (-1: do not sleep), for so many milliseconds (-1: for ever).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from mmap import mmap
from typing import TYPE_CHECKING, Any

from launcher.ipc import layout
from launcher.ipc.codec import BYTES_TAG, PLAIN_TAG, Codec
from launcher.ipc.handle import RingHandle

if TYPE_CHECKING:
    from types import ModuleType

    from launcher.ipc._native import Reader as NativeReader
    from launcher.ipc._native import Writer as NativeWriter

log = logging.getLogger(__name__)

_LAYOUT = (
    layout.CURSOR_WORD * 8,
    layout.WRITTEN_WORD * 8,
    layout.LAP_WORD * 8,
    layout.WANTED_WORD * 8,
    layout.CLOSED_AT,
    layout.ASLEEP_AT,
    layout.READERS_AT,
    layout.LINE,
    layout.DATA_AT,
    layout.RECORD_HEADER,
    layout.TAG_SHIFT,
    layout.MAX_READERS,
)


def _load() -> ModuleType | None:
    try:
        import launcher.ipc._native as _native  # `from` would blame a circular import
    except ImportError as error:
        log.debug("queues run in Python alone: %s", error)
        return None
    if _native.LAYOUT != _LAYOUT:
        log.debug("queues run in Python alone: _native was built for the layout %s", _native.LAYOUT)
        return None
    return _native


MODULE = _load()
"""None: there is none. Looked at when an end is attached; tests take it away."""


class SpinFields:
    """What `waiting.Spin` keeps: in C where C has to know it."""

    __slots__ = ("budget", "longest", "shy")
    longest: int
    budget: int
    shy: int


if not TYPE_CHECKING and MODULE is not None:
    SpinFields = MODULE.SpinFields


def make_writer(memory: mmap | None, handle: RingHandle, readers_event: int, longest: int) -> NativeWriter | None:
    """`longest`: bytes of a body that goes into the ring."""
    if MODULE is None or memory is None:
        return None
    made: NativeWriter = MODULE.Writer(memory, handle.capacity, handle.readers, readers_event, longest)
    return made


def make_reader(
    memory: mmap | None, handle: RingHandle, writer_event: int, codec: Codec, empty: object
) -> NativeReader | None:
    if MODULE is None or memory is None:
        return None
    decoders = simple_decoders(codec)
    made: NativeReader = MODULE.Reader(
        memory, handle.capacity, handle.readers, handle.index, writer_event, decoders, empty
    )
    return made


def simple_decoders(codec: Codec) -> tuple[Callable[[memoryview], Any] | None, ...]:
    """By tag, what makes an object of a body without buffers and keeps nothing of it; None: that is not so simple."""
    found: dict[int, Callable[[memoryview], Any]] = {}
    if type(codec).decode is Codec.decode:
        found = {**codec._decode_simple, PLAIN_TAG: codec._plain.decode, BYTES_TAG: bytes}
    return tuple(found.get(tag) for tag in range(256))
