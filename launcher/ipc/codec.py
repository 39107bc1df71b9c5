"""Objects to bytes and back: msgspec structs by tag, buffers out of band, and pickle only where it is trusted.

What a message is, by its tag:

=======  =====================================================================================================
0        a pickle; only a trusted codec writes or reads it
1 … 249  the struct registered under that number, as msgpack
250      ``bytes``, as they are (`bytearray` and `memoryview` arrive as bytes)
251      one array or tensor: its facts as msgpack, its content as a buffer
252      None, bool, int, float, str: msgpack
=======  =====================================================================================================

Within a struct an array or tensor (in a field of its own type, or of type Any) becomes a msgpack extension that names
its buffer. Beware that msgpack knows no classes: in a field of type Any a tuple arrives as a list, a
struct as a dict. What must keep its types goes into an unregistered object, and so through pickle.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, get_origin

import msgspec

from launcher.errors import InternalError, UsageError
from launcher.ipc import hooks
from launcher.ipc.hooks import Buffer

PICKLE_TAG = 0
MAX_STRUCT_TAG = 249
BYTES_TAG = 250
BUFFER_TAG = 251
PLAIN_TAG = 252

EXT_CODE = 1
_PLAIN = frozenset((type(None), bool, int, float, str))
_BYTES = (bytes, bytearray, memoryview)
_NOTHING: tuple[memoryview, ...] = ()


Message = tuple[int, bytes | memoryview, Sequence[memoryview]]
"""Tag, head, buffers: one-dimensional, of bytes; they still belong to the object."""


class _Call(threading.local):
    """Buffers of the message that this thread is encoding or decoding."""

    out: list[memoryview] | None = None
    back: Sequence[Buffer] = ()


class Codec:
    """Both sides need the same `structs`; a tag says which class. Threads may share one."""

    def __init__(self, structs: Mapping[int, type], *, trusted: bool) -> None:
        wrong = [tag for tag in structs if not 1 <= tag <= MAX_STRUCT_TAG]
        if wrong or len(set(structs.values())) != len(structs):
            raise InternalError(f"codec tags must be 1 … {MAX_STRUCT_TAG}, one per class; got {dict(structs)}")
        self.trusted = trusted
        self._call = _Call()
        self._tags = {kind: tag for tag, kind in structs.items()}
        self._simple = dict(self._tags)
        """Structs in which nothing has been met so far that msgpack does not know: most of them, for ever."""
        self._encode_simple = msgspec.msgpack.Encoder().encode
        self._encode = msgspec.msgpack.Encoder(enc_hook=self._enc_hook).encode
        self._decoders: dict[int, msgspec.msgpack.Decoder[Any]] = {
            tag: msgspec.msgpack.Decoder(kind, ext_hook=self._ext_hook, dec_hook=_dec_hook)
            for tag, kind in structs.items()
        }
        self._borrowing = frozenset(tag for tag, kind in structs.items() if _borrows(kind))
        self._decode_simple = {
            tag: decoder.decode for tag, decoder in self._decoders.items() if tag not in self._borrowing
        }
        self._plain = msgspec.msgpack.Decoder()

    # --- there -------------------------------------------------------------------------------------------------

    def encode(self, obj: Any) -> Message:
        """Raises `UsageError` for what this codec cannot carry."""
        kind = type(obj)
        tag = self._simple.get(kind)
        if tag is not None:
            try:
                return tag, self._encode_simple(obj), _NOTHING
            except (TypeError, ValueError, OverflowError):
                self._simple.pop(kind, None)  # a buffer within, or an error that the longer way will find again
        tag = self._tags.get(kind)
        if tag is not None:
            message = self._encode_struct(tag, obj)
            if message is not None:
                return message
        elif kind in _PLAIN and not (kind is int and obj.bit_length() > 63):
            return PLAIN_TAG, self._encode(obj), _NOTHING
        elif kind in _BYTES and isinstance(obj, _BYTES):
            return BYTES_TAG, obj if isinstance(obj, bytes) else _flat(memoryview(obj)), _NOTHING
        else:
            message = self._encode_buffer(obj)
            if message is not None:
                return message
        return self._encode_pickle(obj)

    def _encode_struct(self, tag: int, obj: Any) -> Message | None:
        """None: msgspec cannot carry it, but pickle may."""
        call = self._call
        try:
            head = self._encode(obj)
        except (TypeError, ValueError, OverflowError) as error:
            call.out = None
            if self.trusted:
                return None
            raise UsageError(f"a {type(obj).__name__} cannot be sent: {error}") from error
        buffers, call.out = call.out, None
        return tag, head, buffers or _NOTHING

    def _encode_buffer(self, obj: Any) -> Message | None:
        hook = hooks.hook_for(type(obj))
        taken = hook.take(obj) if hook is not None else None
        if hook is None or taken is None:
            return None
        return BUFFER_TAG, self._encode((hook.package, taken[0])), [_flat(taken[1])]

    def _encode_pickle(self, obj: Any) -> Message:
        if not self.trusted:
            known = ", ".join(sorted(kind.__name__ for kind in self._tags)) or "none"
            raise UsageError(
                f"a {type(obj).__module__}.{type(obj).__qualname__} cannot be sent over an untrusted queue "
                f"(structs that can: {known})"
            )
        from launcher.ipc import pickling

        try:
            head, buffers = pickling.dumps(obj)
        except Exception as error:
            raise UsageError(f"a {type(obj).__qualname__} cannot be sent: {type(error).__name__}: {error}") from error
        return PICKLE_TAG, head, [_flat(buffer) for buffer in buffers]

    def _enc_hook(self, obj: Any) -> Any:
        hook = hooks.hook_for(type(obj))
        taken = hook.take(obj) if hook is not None else None
        if hook is None or taken is None:
            raise TypeError(f"msgpack cannot carry a {type(obj).__module__}.{type(obj).__qualname__}")
        if self._call.out is None:
            self._call.out = []
        self._call.out.append(_flat(taken[1]))
        facts = msgspec.msgpack.encode((hook.package, len(self._call.out) - 1, taken[0]))
        return msgspec.msgpack.Ext(EXT_CODE, facts)

    # --- and back ------------------------------------------------------------------------------------------------

    def decode(self, tag: int, head: memoryview, buffers: Sequence[Buffer]) -> Any:
        """`head` is only borrowed for the call; `buffers` (writable) become part of the object."""
        simple = self._decode_simple.get(tag)
        if simple is not None and not buffers:
            return simple(head)
        decoder = self._decoders.get(tag)
        if decoder is not None:
            self._call.back = buffers
            try:
                return decoder.decode(bytes(head) if tag in self._borrowing else head)
            finally:
                self._call.back = ()
        if tag == PLAIN_TAG:
            return self._plain.decode(head)
        if tag == BYTES_TAG:
            return bytes(head)
        if tag == BUFFER_TAG:
            package, facts = self._plain.decode(head)
            if len(buffers) != 1:
                raise InternalError(f"an array came with {len(buffers)} buffers")
            return hooks.make(package, facts, buffers[0])
        if tag == PICKLE_TAG and self.trusted:
            from launcher.ipc import pickling

            return pickling.loads(head, buffers)
        raise InternalError(f"tag {tag} is not for this codec" + ("" if self.trusted else ", which is not trusted"))

    def _ext_hook(self, code: int, data: memoryview) -> Any:
        if code != EXT_CODE:
            raise InternalError(f"unknown msgpack extension {code}")
        package, index, facts = msgspec.msgpack.decode(data)
        if type(index) is not int or not 0 <= index < len(self._call.back):
            raise InternalError(f"a message names buffer {index!r}, and {len(self._call.back)} came with it")
        return hooks.make(package, facts, self._call.back[index])


def _dec_hook(kind: Any, value: Any) -> Any:
    """Fields of foreign types: the extension hook has made the object already."""
    wanted = get_origin(kind) or kind
    if isinstance(value, wanted):
        return value
    raise TypeError(f"expected a {wanted.__name__}, got a {type(value).__name__}")


def _flat(buffer: memoryview) -> memoryview:
    if buffer.ndim == 1 and buffer.format == "B" and buffer.contiguous:
        return buffer
    return buffer.cast("B") if buffer.c_contiguous and buffer.nbytes else memoryview(buffer.tobytes())


def _borrows(kind: type) -> bool:
    """True if decoding leaves references into the input: fields of type memoryview or Raw, at any depth."""
    seen: set[type] = set()

    def walk(node: Any) -> bool:
        if isinstance(node, msgspec.inspect.MemoryViewType | msgspec.inspect.RawType):
            return True
        if isinstance(node, msgspec.inspect.Type):
            struct = getattr(node, "cls", None)
            if struct in seen:
                return False
            if struct is not None:
                seen.add(struct)
            return any(walk(getattr(node, name)) for name in node.__struct_fields__)
        if isinstance(node, msgspec.inspect.Field):
            return walk(node.type)
        return isinstance(node, tuple) and any(walk(item) for item in node)

    return walk(msgspec.inspect.type_info(kind))
