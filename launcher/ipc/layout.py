"""The byte layout of a ring: the picture, who writes which byte, and in which order. No I/O here.

One memfd holds the header and the data; a second one, the *arena*, holds messages that are too large for the ring::

    ring memfd
    0        ┌────────────────────────────────────────────────────────────┐
             │ magic u64 │ capacity u64 │ readers u64                     │  owner, once, before anyone attaches
    64       │ write cursor u64 │ records written u64 │ lap cursor u64    │  writer
    128      │ wanted position u64 (0: the writer does not wait)          │  writer
    192      │ closed u64 (0, then 1 for ever)                            │  anyone
    256      │ asleep u8 x 64, one per reader                             │  reader: 1, 0; writer: 0 (claims a wake-up)
    4096     ├────────────────────────────────────────────────────────────┤
             │ 64 x 64 bytes: read cursor u64 │ records read u64          │  that reader alone
    8192     ├────────────────────────────────────────────────────────────┤
             │ 256 x 64 bytes: arena slot, one state u8 per reader        │  writer: HELD/RELEASED before it publishes;
             │                                                            │  then that reader: LEAVING, RELEASED
    24576    ├────────────────────────────────────────────────────────────┤
             │ data: `capacity` bytes, used as a circle                   │  writer, between the slowest read cursor
             │                                                            │  + capacity and the write cursor
             └────────────────────────────────────────────────────────────┘

    record (starts at a multiple of 16)
    0        │ word u64: length u32 │ tag u8 │ flags u8 │ 0 u16 │ sequence u64 │
    16       │ body: `length` bytes, padded to 16                         │
    A word of all ones (SKIP) means: the next record is at the start of the data; this one did not fit behind.

    lap cursor: a reader whose cursor is before it goes on from there (a multiple of the capacity: the start of data).
    The writer moves it when it has filled `hot_bytes` and every reader has read everything: so in ordinary traffic a
    ring of 16 MiB touches only its first 256 KiB, or 4 MiB when the records are large. It may then reuse all before it,
    for nobody has anything to read there (a SKIP left there might be overwritten before it is read).

    body with F_BUFFERS: count u64, (count + 1) sizes u64, then the head, then each buffer; each part 64-aligned
    body with F_ARENA:   slot u64, offset u64, length u64 of the real body in the arena

    arena memfd (grows, never shrinks; pages beyond WARM_BYTES are given back when the last reader leaves)
    0        │ warm zone: pages stay once touched, the writer keeps it mapped   │
    WARM     │ cold zone: holes are punched                                     │

Cursors count bytes since the ring was made and never wrap; a cursor modulo `capacity` is a place in the data. A read
cursor of LEFT means: this reader closed its end, do not wait for it.

Order of the writer's stores: arena slot states, arena bytes, body, record header, lap cursor | write cursor | then it
loads the asleep bytes. Order of the reader's: it loads the write cursor | lap cursor and record; it stores the slot
state | read cursor | then it loads the wanted position. Each ``|`` is a fence (`launcher.ipc.fences`).
"""

from __future__ import annotations

import struct

MAGIC = 0x3130474E49525358  # "XSRING01"
MAX_READERS = 64
LINE = 64
"""Bytes of a cache line: what different processes write never shares one, except where they park."""

# Indexes into the header as u64 words.
MAGIC_WORD = 0
CAPACITY_WORD = 1
READERS_WORD = 2
CURSOR_WORD = 64 // 8
WRITTEN_WORD = CURSOR_WORD + 1
LAP_WORD = CURSOR_WORD + 2
WANTED_WORD = 128 // 8
CLOSED_WORD = 192 // 8
CLOSED_AT = CLOSED_WORD * 8

# Byte offsets.
ASLEEP_AT = 256
READERS_AT = 4096
SLOTS_AT = 8192
SLOTS = 256
DATA_AT = SLOTS_AT + SLOTS * LINE

RECORD_HEADER = 16
ALIGN = 16
PART_ALIGN = 64
LENGTH_MASK = (1 << 32) - 1
TAG_SHIFT = 32
FLAGS_SHIFT = 40
SKIP = (1 << 64) - 1
LEFT = (1 << 64) - 1

# Record flags.
F_BUFFERS = 1
"""The body holds a head and out-of-band buffers."""
F_ARENA = 2
"""The body lies in the arena; the ring holds its place."""
F_VIEW = 4
"""With F_ARENA: the reader may keep the region mapped; else it must copy and release before it moves on."""

# Arena slot states.
RELEASED = 0
HELD = 1
LEAVING = 2

PAGE = 4096
HOT_BYTES = 256 << 10
HOT_RECORDS = 64
HOT_MAX_BYTES = 4 << 20
MIN_CAPACITY = PAGE
WARM_BYTES = 64 << 20
IN_FLIGHT_BYTES = 256 << 20
"""Arena bytes that may be sent and not yet received before the writer waits; one larger message is always let in."""
VIEW_BYTES = 1 << 20
"""Messages with out-of-band buffers of this size go to the arena even if they would fit: readers take them as views."""
VIEW_RESERVE = 64
"""Slots that are never lent as views, so that views kept for ever cannot stop the queue."""

ARENA_PLACE = struct.Struct("<QQQ")


def reader_word(index: int) -> int:
    """Index, as a u64 word, of reader `index`'s cursor; its count of records read follows."""
    return (READERS_AT + LINE * index) // 8


def slot_at(slot: int) -> int:
    return SLOTS_AT + LINE * slot


def record_size(length: int) -> int:
    """Bytes in the ring of a record whose body has `length` bytes."""
    return (RECORD_HEADER + length + ALIGN - 1) & ~(ALIGN - 1)


def hot_bytes(size: int) -> int:
    """How far to write before going back to the start of the data, for records of `size` bytes.

    Not so far that caches and page tables are used up for nothing; but further than a core's own cache when records are
    large. Lines that a reader's core still holds must be fetched from there before they can be written: 1 MiB into them
    takes 75 µs, into lines that have moved on to the shared cache 25 µs.
    """
    return min(max(HOT_BYTES, HOT_RECORDS * size), HOT_MAX_BYTES)


def pack_word(length: int, tag: int, flags: int) -> int:
    return length | tag << TAG_SHIFT | flags << FLAGS_SHIFT


def unpack_word(word: int) -> tuple[int, int, int]:
    """Length, tag, flags."""
    return word & LENGTH_MASK, word >> TAG_SHIFT & 0xFF, word >> FLAGS_SHIFT & 0xFF


def round_up(value: int, step: int) -> int:
    return (value + step - 1) // step * step


def body_plan(head: int, buffers: list[int]) -> tuple[bytes, list[int], int]:
    """For an F_BUFFERS body: its table, the offset of the head and of each buffer, and its whole length."""
    sizes = [head, *buffers]
    table = struct.pack(f"<{len(sizes) + 1}Q", len(buffers), *sizes)
    offsets = []
    at = len(table)
    for size in sizes:
        at = round_up(at, PART_ALIGN)
        offsets.append(at)
        at += size
    return table, offsets, at


def body_parts(body: memoryview) -> list[tuple[int, int]]:
    """(offset, size) of the head and of each buffer of an F_BUFFERS body."""
    (count,) = struct.unpack_from("<Q", body)
    sizes = struct.unpack_from(f"<{count + 1}Q", body, 8)
    parts = []
    at = 8 * (count + 2)
    for size in sizes:
        at = round_up(at, PART_ALIGN)
        parts.append((at, size))
        at += size
    return parts
