"""Frames of the data link: what is cut is put together again, and nothing else is taken."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import UsageError
from launcher.executor import frames
from launcher.executor.frames import (
    ANSWER,
    ANSWERS,
    CALL,
    CHUNK,
    HEAD,
    JOINED,
    MAGIC,
    MAX_BODY,
    MAX_CHUNK,
    NO_RANK,
    Assembler,
    Head,
    Whole,
    cut,
    cut_answers,
    is_frame,
    open_parts,
    parse_head,
    parts_of,
    split,
    split_answers,
)
from launcher.ipc.raw import Check
from launcher.nodes.messages import WireError
from launcher.worker.rpc import CALLS, REPLIES, NameCall, PlainCall, make_codec

SIZES = st.sampled_from([0, 1, 63, 64, 70_000, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])


def put_together(assembler: Assembler, made: list[frames.Frame]) -> Whole | None:
    whole = None
    for head, chunk in made:
        assert whole is None
        first, *rest = map(memoryview, parts_of((head, chunk)))
        assert is_frame(first)
        assert bool(rest) == (len(chunk) > JOINED)
        whole = assembler.add(*open_parts(first, rest))
    return whole


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(SIZES, st.lists(SIZES, max_size=3)), min_size=1, max_size=3), st.integers(1, 249))
def test_there_and_back(messages: list[tuple[int, list[int]]], tag: int) -> None:
    assembler, number = Assembler(ANSWER), 0
    for size, sizes in messages:
        head, buffers = b"h" * size, [memoryview(bytes([i + 1]) * n) for i, n in enumerate(sizes)]
        made = cut(ANSWER, 7, (tag, head, buffers), number)
        number += len(made)
        assert all(len(chunk) <= CHUNK for _, chunk in made)
        whole = put_together(assembler, made)
        assert whole is not None
        assert (whole.kind, whole.rank, whole.tag, bytes(whole.head)) == (ANSWER, 7, tag, head)
        assert [bytes(buffer) for buffer in whole.buffers] == [bytes(buffer) for buffer in buffers]
        assert not any(buffer.readonly for buffer in whole.buffers)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_as_a_head(data: bytes) -> None:
    try:
        head = parse_head(data)
    except WireError:
        return
    assert HEAD.pack(MAGIC, head.kind, head.has_buffers, head.tag, head.rank, 0, *head[4:]) == data


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.builds(
                Head,
                st.sampled_from([CALL, ANSWER, ANSWERS]),
                st.booleans(),
                st.integers(0, 255),
                st.integers(-1, 3),
                st.integers(0, 4),
                st.integers(0, 200),
                st.integers(0, 200),
            ),
            st.binary(max_size=200),
        ),
        max_size=6,
    )
)
def test_any_frames_to_the_assembler(sent: list[tuple[Head, bytes]]) -> None:
    """Whatever comes it is a message, none yet, or a `WireError`; memory is bounded by what the heads say."""
    for kind in (CALL, ANSWER):
        assembler = Assembler(kind)
        try:
            for head, chunk in sent:
                assert all(len(whole.head) <= 200 for whole in assembler.add_all(head, memoryview(chunk)))
        except WireError:
            continue


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.lists(st.integers(0, 2**64 - 1), max_size=5))
def test_any_body_with_a_table(tail: bytes, numbers: list[int]) -> None:
    body = b"".join(number.to_bytes(8, "little") for number in numbers) + tail
    try:
        head, buffers = split(memoryview(bytearray(body)))
    except WireError:
        return
    assert len(head) + sum(map(len, buffers)) <= len(body)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.integers(0, 2**31 - 1), st.tuples(st.integers(0, 255), st.binary(max_size=100)), min_size=1))
def test_answers_of_several_ranks_there_and_back(answers: dict[int, tuple[int, bytes]]) -> None:
    head, body = cut_answers([(rank, (tag, data, [])) for rank, (tag, data) in answers.items()], 0)
    found = Assembler(ANSWER).add_all(parse_head(head), memoryview(body))
    assert [whole.rank for whole in found] == sorted(answers)
    assert {whole.rank: (whole.tag, bytes(whole.head)) for whole in found} == answers
    assert all((whole.kind, whole.buffers) == (ANSWER, []) for whole in found)


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 4), st.lists(st.tuples(st.integers(-2, 4), st.integers(0, 300), st.integers(0, 20))), st.binary())
def test_any_bytes_as_answers_of_several_ranks(count: int, table: list[tuple[int, int, int]], tail: bytes) -> None:
    body = count.to_bytes(4, "little") + b"".join(frames._ENTRY.pack(*entry) for entry in table) + tail
    try:
        found = split_answers(memoryview(body))
    except WireError:
        return
    ranks = [whole.rank for whole in found]
    assert ranks == sorted(set(ranks))
    assert ranks[0] >= 0
    assert 4 + 12 * len(found) + sum(len(whole.head) for whole in found) == len(body)
    assert cut_answers([(whole.rank, whole.message) for whole in found], 0)[1] == body


WRONG_ANSWERS = [
    (0, [], b"", "a table of 0 answers"),
    (2, [(0, 4, 0)], b"", "a table of 2 answers in 16 bytes"),
    (2**32 - 1, [], b"", "a table of 4294967295 answers"),
    (2, [(1, 4, 1), (1, 4, 1)], b"ab", "an answer of rank 1 behind 1"),
    (2, [(1, 4, 1), (0, 4, 1)], b"ab", "an answer of rank 0 behind 1"),
    (1, [(-1, 4, 1)], b"a", "an answer of rank -1"),
    (1, [(0, 256, 1)], b"a", "tag 256"),
    (1, [(0, 4, 2)], b"a", "2 bytes at 16 of 17"),
    (1, [(0, 4, 1)], b"ab", "1 bytes behind the last answer"),
]


@pytest.mark.parametrize(("count", "table", "tail", "why"), WRONG_ANSWERS)
def test_wrong_answers_of_several_ranks(count: int, table: list[tuple[int, int, int]], tail: bytes, why: str) -> None:
    body = count.to_bytes(4, "little") + b"".join(frames._ENTRY.pack(*entry) for entry in table) + tail
    with pytest.raises(WireError, match=why):
        split_answers(memoryview(body))


def test_answers_of_several_ranks_in_a_wrong_place() -> None:
    head, body = cut_answers([(1, (4, b"a", [])), (2, (4, b"b", []))], 0)
    parsed = parse_head(head)
    with pytest.raises(WireError, match="answers where calls come"):
        Assembler(CALL).add_all(parsed, memoryview(body))
    with pytest.raises(WireError, match="a chunk of"):
        Assembler(ANSWER).add_all(parsed, memoryview(body)[:-1])
    assembler = Assembler(ANSWER)
    first = cut(ANSWER, 1, (4, bytes(CHUNK + 1), []), 0)[0]
    assembler.add(parse_head(first[0]), memoryview(first[1]))
    with pytest.raises(WireError, match=f"where a chunk at {CHUNK} was to come"):
        assembler.add_all(parsed._replace(number=1), memoryview(body))
    for wrong in ((ANSWERS, 1, 0, NO_RANK, 0, 0, 4, 0), (ANSWERS, 0, 4, NO_RANK, 0, 0, 4, 0)):
        with pytest.raises(WireError, match="not one frame"):
            parse_head(HEAD.pack(MAGIC, *wrong))


WRONG = [
    (Head(CALL, False, 1, NO_RANK, 1, 4, 0), b"abcd", "frame 1 came, 0 is missing"),
    (Head(ANSWER, False, 1, 0, 0, 4, 0), b"abcd", "an answer where calls come"),
    (Head(CALL, False, 1, NO_RANK, 0, 4, 2), b"ab", "begins at 2"),
    (Head(CALL, False, 1, NO_RANK, 0, 4, 0), b"abcde", "a chunk of 5 bytes at 0 of 4"),
    (Head(CALL, False, 1, NO_RANK, 0, 4, 0), b"", "a chunk of 0 bytes"),
    (Head(CALL, False, 1, NO_RANK, 0, MAX_BODY, 0), bytes(MAX_CHUNK + 1), "a chunk of"),
    (Head(CALL, True, 1, NO_RANK, 0, 4, 0), b"abcd", "a table"),
]


@pytest.mark.parametrize(("head", "chunk", "why"), WRONG)
def test_what_is_wrong(head: Head, chunk: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        Assembler(CALL).add(head, memoryview(chunk))


def test_a_frame_that_comes_twice_or_is_missing_in_a_message() -> None:
    made = cut(CALL, NO_RANK, (9, bytes(3 * CHUNK), []), 0)
    for order, why in (((0, 0), "frame 0 came again"), ((0, 2), "frame 2 came, 1 is missing")):
        assembler = Assembler(CALL)
        with pytest.raises(WireError, match=why):
            put_together(assembler, [made[i] for i in order])
    other = cut(CALL, NO_RANK, (8, b"x", []), 1)
    with pytest.raises(WireError, match=f"a chunk at 0 where {CHUNK} was to come"):
        put_together(Assembler(CALL), [made[0], other[0]])


def test_what_is_too_large_is_refused_where_it_is_sent() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return MAX_BODY + 1

    with pytest.raises(UsageError, match="a message of 1024 MiB with 0 arrays cannot cross nodes"):
        cut(CALL, NO_RANK, (9, Huge(), []), 0)
    with pytest.raises(UsageError, match="with 5000 arrays cannot"):
        cut(CALL, NO_RANK, (9, b"", [memoryview(b"")] * 5000), 0)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 255), st.binary(max_size=80), st.integers(0, 3))
def test_any_bytes_as_a_call(tag: int, data: bytes, buffers: int) -> None:
    for kinds in (CALLS, REPLIES):
        call = Check(kinds).read(tag, data, buffers)
        assert call is None or type(call) is kinds[tag]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_call_with_bytes_changed(data: st.DataObject) -> None:
    """The worker's codec, which makes the objects: an error or a call, never more memory than what came."""
    numpy = pytest.importorskip("numpy")
    codec = make_codec(trusted=False)
    call = PlainCall(1, -1, "total", (numpy.arange(5), [1, "x"]), {"k": numpy.ones((2, 3), "f4")})
    tag, head, buffers = codec.encode(call)
    changed = bytearray(head)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    given_buffers = [bytearray(buffer) for buffer in buffers]
    try:
        made = codec.decode(tag, memoryview(bytes(changed)), given_buffers)
    except Exception:
        return
    assert type(made) is PlainCall


def test_a_check_makes_no_arrays() -> None:
    numpy = pytest.importorskip("numpy")
    tag, head, buffers = make_codec(trusted=False).encode(PlainCall(3, -1, "total", (numpy.arange(5),)))
    check = Check(CALLS)
    assert check.read(tag, head, len(buffers)) == PlainCall(3, -1, "total", (None,))
    assert check.read(tag, head, 0) is None  # names a buffer that did not come
    tag, head, buffers = make_codec().encode(NameCall(4, -1, "who"))
    assert check.read(tag, head, 0) == NameCall(4, -1, "who")
    assert check.read(0, b"\x80\x05.", 0) is None  # a pickle
