"""Calls and answers on the data link between machines, as frames. No I/O, no clock.

A message (tag, head, buffers: what a `Codec` makes of an object) becomes one *body*: its head; or, if arrays travel
beside it, a table of sizes, the head and the arrays, each 64-aligned, as in a ring (`launcher.ipc.layout`). The body is
cut into chunks, each a frame: a head and the chunk. Small ones travel as one part, others as two::

    0   4s   MAGIC
    4   u8   kind: 1 call, 2 answer, 3 answers of several ranks
    5   u8   1: the body has a table and arrays
    6   u8   tag of the message
    8   i32  rank that answers; -1 in the other kinds
    12  u32  0
    16  u64  number of the frame in its direction, 0, 1, 2 …: a repeat or a gap ends the link
    24  u64  bytes of the whole body
    32  u64  where in it the chunk begins
    ── the chunk

Chunks of one message follow each other. Small answers of several ranks may share one frame: a u32 count, for each rank
in rising order (i32 rank, u32 tag, u32 bytes), then the bytes of each. Nothing here trusts its input: what does not
fit is a `WireError`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from launcher.errors import UsageError
from launcher.ipc.codec import Message
from launcher.ipc.layout import PART_ALIGN, body_plan, round_up
from launcher.nodes.messages import WireError

MAGIC = b"XSD\x01"
HEAD = struct.Struct("<4sBBBxiIQQQ")
CALL, ANSWER, ANSWERS = 1, 2, 3
NO_RANK = -1

CHUNK = 2 << 20
"""Bytes of a chunk that we send. What the sockets hold back is counted in frames, so this bounds it. A message of one
chunk is passed on from where it was received; one of several is put together in fresh memory, which costs four times as
much as the way: a plan of 1 MiB and its head are to fit."""
MAX_CHUNK = 8 << 20
"""Bytes of a chunk that we take."""
MAX_BODY = (1 << 30) + (64 << 10)
"""Bytes of the largest message."""
MAX_BUFFERS = 4096
MAX_ANSWERS = 4096
"""Ranks whose answers share a frame."""
JOINED = 64 << 10
"""Bytes of the largest chunk that travels in one part with its head: a copy is cheaper than one more part."""
_COUNT, _ENTRY = struct.Struct("<I"), struct.Struct("<iII")
_SMALL = 64 << 10
"""Parts of fewer bytes are copied together into one chunk; larger ones are sent from where they lie."""

Frame = tuple[bytes, bytes | memoryview]
"""Head and chunk."""


class Head(NamedTuple):
    kind: int
    has_buffers: bool
    tag: int
    rank: int
    number: int
    total: int
    offset: int

    def of_same_message(self, other: Head) -> bool:
        return self[:4] == other[:4] and self.total == other.total


class Whole(NamedTuple):
    """A message that has arrived."""

    kind: int
    rank: int
    tag: int
    head: memoryview
    buffers: list[memoryview]
    """Writable; theirs is memory that nobody else has."""

    @property
    def message(self) -> Message:
        return self.tag, self.head, self.buffers


class Lost(NamedTuple):
    """In a message's place: the link is over, and why."""

    why: str


def cut(kind: int, rank: int, message: Message, number: int) -> list[Frame]:
    """The frames of a message; the first one has `number`. They refer to the message's memory.

    `UsageError` if it is larger than what may cross.
    """
    tag, head, buffers = message
    if not buffers and len(head) <= CHUNK:
        return [(HEAD.pack(MAGIC, kind, 0, tag, rank, 0, number, len(head), 0), head)]
    parts: list[bytes | memoryview] = [head]
    total = len(head)
    if buffers:
        table, offsets, total = body_plan(len(head), [buffer.nbytes for buffer in buffers])
        parts = []
        at = 0
        for offset, part in zip([0, *offsets], [table, head, *buffers], strict=True):
            parts += [bytes(offset - at), part]
            at = offset + len(part)
    if total > MAX_BODY or len(buffers) > MAX_BUFFERS:
        raise UsageError(
            f"a message of {total / 2**20:.0f} MiB with {len(buffers)} arrays cannot cross nodes: at most "
            f"{MAX_BODY >> 20} MiB and {MAX_BUFFERS} arrays; send it in parts, or as a file"
        )
    frames: list[Frame] = []
    at = 0
    for chunk in _chunks(parts):
        packed = HEAD.pack(MAGIC, kind, bool(buffers), tag, rank, 0, number + len(frames), total, at)
        frames.append((packed, chunk))
        at += len(chunk)
    return frames


def cut_answers(answers: Iterable[tuple[int, Message]], number: int) -> Frame:
    """One frame for answers of several ranks, which have no arrays and are small."""
    found = sorted(answers, key=lambda answer: answer[0])
    table = [_ENTRY.pack(rank, tag, len(head)) for rank, (tag, head, _) in found]
    body = b"".join((_COUNT.pack(len(found)), *table, *(head for _, (_, head, _) in found)))
    return HEAD.pack(MAGIC, ANSWERS, 0, 0, NO_RANK, 0, number, len(body), 0), body


def parts_of(frame: Frame) -> tuple[bytes | memoryview, ...]:
    """What is sent of it."""
    return (b"".join(frame),) if len(frame[1]) <= JOINED else frame


def is_frame(first: memoryview) -> bool:
    """Whether this first part begins a frame. (No word of `launcher.nodes.messages` begins so.)"""
    return first[: len(MAGIC) - 1] == MAGIC[:-1]


def open_parts(first: memoryview, rest: Sequence[memoryview]) -> tuple[Head, memoryview]:
    """Head and chunk of what was received. `WireError` unless it is a frame."""
    if rest:
        if len(rest) > 1:
            raise WireError(f"a message of {1 + len(rest)} parts")
        return parse_head(first), rest[0]
    return parse_head(first[: HEAD.size]), first[HEAD.size :]


def _chunks(parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    small = bytearray()
    for part in parts:
        if len(part) < _SMALL:
            small += part
            if len(small) >= CHUNK - _SMALL:
                yield bytes(small)
                small.clear()
            continue
        if small:
            yield bytes(small)
            small.clear()
        view = memoryview(part)
        for at in range(0, len(view), CHUNK):
            yield view[at : at + CHUNK]
    if small:
        yield bytes(small)


def parse_head(data: bytes | memoryview) -> Head:
    """`WireError` unless it is one that `cut` could have made."""
    if len(data) != HEAD.size:
        raise WireError(f"a head of {len(data)} bytes")
    magic, kind, flags, tag, rank, zero, number, total, offset = HEAD.unpack(data)
    if magic != MAGIC:
        raise WireError("another version" if magic[:3] == MAGIC[:3] else "not ours")
    if kind not in (CALL, ANSWER, ANSWERS) or flags > 1 or zero or (rank < 0) != (kind != ANSWER) or rank < NO_RANK:
        raise WireError("an unknown kind of frame")
    if total > MAX_BODY or offset > total:
        raise WireError(f"a body of {total} bytes at {offset}")
    if kind == ANSWERS and (flags or tag or offset):
        raise WireError("answers of several ranks that are not one frame")
    return Head(kind, bool(flags), tag, rank, number, total, offset)


class Assembler:
    """Puts the frames of one direction together again."""

    def __init__(self, kind: int) -> None:
        self._kind = kind
        self._next = 0
        self._first: Head | None = None
        self._body = bytearray()
        self._at = 0

    @property
    def missing(self) -> int:
        """Bytes that the message under way still lacks."""
        return len(self._body) - self._at if self._first is not None else 0

    def add(self, head: Head, chunk: memoryview) -> Whole | None:
        """The message, when it is whole. After a `WireError` nothing that comes can be right."""
        self._count(head)
        if head.kind != self._kind:
            raise WireError("an answer where calls come" if self._kind == CALL else "a call where answers come")
        size = len(chunk)
        if size > MAX_CHUNK or head.offset + size > head.total or (not size and head.total):
            raise WireError(f"a chunk of {size} bytes at {head.offset} of {head.total}")
        if self._first is None:
            if head.offset:
                raise WireError(f"a message that begins at {head.offset}")
            if size == head.total and not head.has_buffers:
                return Whole(head.kind, head.rank, head.tag, chunk, [])
            self._first, self._body, self._at = head, bytearray(head.total), 0
        elif not head.of_same_message(self._first) or head.offset != self._at:
            raise WireError(f"a chunk at {head.offset} where {self._at} was to come")
        self._body[self._at : self._at + size] = chunk
        self._at += size
        if self._at < head.total:
            return None
        self._first, body = None, memoryview(self._body)
        self._body = bytearray()
        main, buffers = split(body) if head.has_buffers else (body, [])
        return Whole(head.kind, head.rank, head.tag, main, buffers)

    def add_all(self, head: Head, chunk: memoryview) -> list[Whole]:
        """As `add`; also the answers that share a frame."""
        if head.kind != ANSWERS:
            whole = self.add(head, chunk)
            return [] if whole is None else [whole]
        self._count(head)
        if self._kind != ANSWER:
            raise WireError("answers where calls come")
        if self._first is not None:
            raise WireError(f"answers of several ranks where a chunk at {self._at} was to come")
        if len(chunk) != head.total:
            raise WireError(f"a chunk of {len(chunk)} bytes at 0 of {head.total}")
        return split_answers(chunk)

    def _count(self, head: Head) -> None:
        if head.number != self._next:
            what = "came again" if head.number < self._next else f"came, {self._next} is missing"
            raise WireError(f"frame {head.number} {what}")
        self._next += 1


def split_answers(body: memoryview) -> list[Whole]:
    """What `cut_answers` has put together. `WireError` if the table does not fit the body exactly."""
    count = int.from_bytes(body[: _COUNT.size], "little")
    at = _COUNT.size + count * _ENTRY.size
    if not 0 < count <= MAX_ANSWERS or at > len(body):
        raise WireError(f"a table of {count} answers in {len(body)} bytes")
    found: list[Whole] = []
    last = NO_RANK
    for rank, tag, length in _ENTRY.iter_unpack(body[_COUNT.size : at]):
        if rank <= last or tag > 255 or at + length > len(body):
            raise WireError(f"an answer of rank {rank} behind {last}, tag {tag}, {length} bytes at {at} of {len(body)}")
        found.append(Whole(ANSWER, rank, tag, body[at : at + length], []))
        last, at = rank, at + length
    if at != len(body):
        raise WireError(f"{len(body) - at} bytes behind the last answer")
    return found


def split(body: memoryview) -> tuple[memoryview, list[memoryview]]:
    """Head and arrays of a body with a table. `WireError` if the table does not fit the body exactly."""
    size = len(body)
    count = int.from_bytes(body[:8], "little")
    if size < 16 or not 0 < count <= MAX_BUFFERS or 8 * (count + 2) > size:
        raise WireError(f"a table of {count} arrays in {size} bytes")
    parts: list[memoryview] = []
    at = 8 * (count + 2)
    for length in struct.unpack_from(f"<{count + 1}Q", body, 8):
        at = round_up(at, PART_ALIGN)
        if at + length > size:
            raise WireError(f"an array of {length} bytes at {at} of {size}")
        parts.append(body[at : at + length])
        at += length
    if at != size:
        raise WireError(f"{size - at} bytes behind the last array")
    return parts[0], parts[1:]
