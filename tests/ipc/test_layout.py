from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from launcher.ipc import layout


@given(st.integers(0, (1 << 32) - 1), st.integers(0, 255), st.integers(0, 255))
def test_word_round_trip(length: int, tag: int, flags: int) -> None:
    word = layout.pack_word(length, tag, flags)
    assert layout.unpack_word(word) == (length, tag, flags)
    assert word != layout.SKIP


@given(st.integers(0, 1 << 20))
def test_record_size(length: int) -> None:
    size = layout.record_size(length)
    assert size % layout.ALIGN == 0
    assert 0 <= size - layout.RECORD_HEADER - length < layout.ALIGN


@given(st.integers(0, 5000), st.lists(st.integers(0, 5000), max_size=8))
def test_body_parts_are_where_the_plan_put_them(head: int, buffers: list[int]) -> None:
    table, offsets, length = layout.body_plan(head, buffers)
    body = bytearray(max(length, 1))
    body[: len(table)] = table
    parts = layout.body_parts(memoryview(body))
    assert parts == list(zip(offsets, [head, *buffers], strict=True))
    end = len(table)
    for offset, size in parts:
        assert offset % layout.PART_ALIGN == 0
        assert offset >= end
        end = offset + size
    assert end == length


def test_the_picture() -> None:
    """The offsets of the docstring; no two writers share a cache line, but for the asleep bytes."""
    assert (layout.CURSOR_WORD, layout.WANTED_WORD, layout.CLOSED_WORD) == (64 // 8, 128 // 8, 192 // 8)
    assert layout.ASLEEP_AT + layout.MAX_READERS <= layout.READERS_AT
    assert layout.READERS_AT + layout.MAX_READERS * layout.LINE <= layout.SLOTS_AT
    assert layout.slot_at(layout.SLOTS) == layout.DATA_AT == 24576
    assert layout.reader_word(1) - layout.reader_word(0) == layout.LINE // 8
    assert struct.calcsize("<QQQ") == layout.ARENA_PLACE.size
    assert layout.VIEW_RESERVE < layout.SLOTS
