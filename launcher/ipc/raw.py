"""Messages passed on as they are, and a look at them that makes no objects: for who stands between two queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from launcher.ipc.codec import EXT_CODE, Codec, Message
from launcher.ipc.hooks import PACKAGES, Buffer


class RawCodec(Codec):
    """Of a queue whose objects are messages already: (tag, head, buffers).

    A message from another codec's `encode` goes in; what comes out is owned by who took it, or a counted loan.
    """

    def __init__(self) -> None:
        super().__init__({}, trusted=False)

    def encode(self, obj: Any) -> Message:
        tag, head, buffers = obj
        return tag, head, buffers

    def decode(self, tag: int, head: memoryview, buffers: Sequence[Buffer]) -> Message:
        return tag, bytes(head), [memoryview(buffer) for buffer in buffers]


class Check:
    """Tells messages of these structs from others. Arrays in them are not made, and their facts not looked at: whoever
    decodes them does that, and needs the package for it."""

    def __init__(self, structs: Mapping[int, type]) -> None:
        self._decoders: dict[int, msgspec.msgpack.Decoder[Any]] = {
            tag: msgspec.msgpack.Decoder(kind, ext_hook=self._ext) for tag, kind in structs.items()
        }
        self._buffers = 0

    def read(self, tag: int, head: bytes | memoryview, buffers: int) -> Any:
        """The struct, with None for each array; None if it is none of them. `buffers`: how many came with it."""
        decoder = self._decoders.get(tag)
        if decoder is None:
            return None
        self._buffers = buffers
        try:
            return decoder.decode(head)
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError, OverflowError):
            return None

    def _ext(self, code: int, data: memoryview) -> None:
        if code != EXT_CODE:
            raise ValueError("unknown extension")
        package, index, _ = msgspec.msgpack.decode(data)
        if package not in PACKAGES or type(index) is not int or not 0 <= index < self._buffers:
            raise ValueError("no such buffer")
