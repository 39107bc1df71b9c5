"""The C half by itself: what is not usual is left to Python untouched, whatever the shared memory says."""

from __future__ import annotations

import mmap
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from launcher.ipc import EMPTY, layout, native
from launcher.ipc.waiting import Spin
from tests.conftest import eventually
from tests.ipc.conftest import Note, Queue, Queues, soon

ASLEEP = layout.ASLEEP_AT


@pytest.fixture
def queue(queues: Queues) -> Queue:
    return queues(1, 4096)


@pytest.fixture
def code() -> Any:
    assert native.MODULE is not None
    return native.MODULE


def take(queue: Queue) -> Any:
    half = queue.readers[0].native
    assert half is not None
    return half.take(None, -1, 0)


def header(queue: Queue) -> memoryview:
    return queue.writer._words


def test_the_usual_case_is_done_in_c(queue: Queue) -> None:
    queue.send(0)  # the first goes through Python, which says how far C may go
    assert take(queue) == 0
    half = queue.writer._native
    assert half is not None
    assert half.push(*queue.writer._codec.encode(Note(1))[:2])
    assert take(queue) == Note(1)
    assert take(queue) is EMPTY
    assert (header(queue)[layout.WRITTEN_WORD], queue.readers[0].sequence) == (2, 2)


def test_what_is_not_usual_is_left(queue: Queue) -> None:
    half = queue.writer._native
    assert half is not None
    assert not half.push(1, b"before Python said how far"), "no room is known"
    queue.send([1])  # a pickle
    assert take(queue) is NotImplemented
    assert queue.receive() == [1]
    assert not half.push(1, bytes(2000)), "large"
    assert not half.push(256, b""), "no tag"
    queue.writer.shutdown()
    assert not half.push(1, b"")
    assert take(queue) is NotImplemented, "Python says that it is closed"


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (layout.DATA_AT // 8, (1 << 32) - 1 | 250 << layout.TAG_SHIFT),  # longer than the ring
        (layout.DATA_AT // 8, 8 | 0xFFFF << layout.TAG_SHIFT),
        (layout.DATA_AT // 8, layout.SKIP),
        (layout.DATA_AT // 8 + 1, 77),  # another number
        (layout.LAP_WORD, 4001),  # no record begins there
        (layout.LAP_WORD, (1 << 64) - 16),
        (layout.reader_word(0), layout.LEFT),
        (layout.reader_word(0), 4096 - 16),
        (layout.reader_word(0) + 1, 5),
    ],
)
def test_a_broken_header_is_left_to_python(queue: Queue, word: int, value: int) -> None:
    queue.send(b"message")
    before = header(queue)[word]
    header(queue)[word] = value
    assert take(queue) is NotImplemented
    header(queue)[word] = before
    assert queue.receive() == b"message", "and nothing was taken"


@pytest.mark.parametrize("cursor", [8, 4096 * 5 + 1, (1 << 64) - 16, 1 << 40])
def test_a_broken_cursor_writes_nowhere(queue: Queue, cursor: int) -> None:
    queue.send(b"first")
    half, words = queue.writer._native, header(queue)
    assert half is not None
    words[layout.CURSOR_WORD] = cursor
    assert not half.push(250, bytes(64))
    assert words[layout.CURSOR_WORD] == cursor


def test_it_wants_a_mapping_that_fits(code: Any) -> None:
    memory = mmap.mmap(-1, layout.DATA_AT + 4096)
    for capacity, readers in ((8192, 1), (4095, 1), (0, 1), (1 << 63, 1), (4096, 0), (4096, 65)):
        with pytest.raises(ValueError, match="does not fit"):
            code.Writer(memory, capacity, readers, -1, 1024)
    with pytest.raises(ValueError, match="decoders"):
        code.Reader(memory, 4096, 1, 1, -1, (None,) * 256, EMPTY)
    with pytest.raises(TypeError):
        code.wait((1,), Spin(), None, -1, 0)
    with pytest.raises(TypeError):
        code.ready((EMPTY,) * 65)
    memory.close()  # nothing holds it


def test_another_layout_is_not_used(code: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native._load() is code
    monkeypatch.setattr(code, "LAYOUT", (*code.LAYOUT[:-1], 1))
    assert native._load() is None


@pytest.fixture
def alarm() -> Iterator[None]:
    def strike(number: int, frame: object) -> None:
        raise InterruptedError("alarm")

    before = signal.signal(signal.SIGALRM, strike)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_signal_ends_a_sleep(queue: Queue, alarm: None) -> None:
    queue.readers[0]._park()  # or the first sleep is Python's
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)  # again, should it come before the sleep
    with pytest.raises(InterruptedError, match="alarm"):
        queue.receive()
    assert queue.readers[0]._bytes[ASLEEP] == 0
    signal.setitimer(signal.ITIMER_REAL, 0)
    queue.send("still works")
    assert queue.receive() == "still works"


def test_who_sleeps_does_not_hold_the_interpreter(queue: Queue) -> None:
    reader = queue.readers[0]
    reader._park()

    def send() -> None:
        eventually(lambda: reader._bytes[ASLEEP] == 1, 10, "asleep")
        queue.send("from another thread")

    thread = threading.Thread(target=send)
    thread.start()
    assert reader.dequeue(deadline=soon()) == "from another thread"
    thread.join()


def test_copy(code: Any) -> None:
    size = 9 << 20
    memory = mmap.mmap(-1, size + 4096)
    data = bytes(range(256)) * (size // 256) + b"the end"
    for at in (0, 16, 64, 1, 4000):
        for length in (0, 1, 63, 64, (8 << 20) - 1, 8 << 20, (8 << 20) + 65, size):
            memory[at + length : at + length + 1] = b"\xee"
            code.copy(memory, at, memoryview(data)[:length])
            assert memory[at : at + length] == data[:length]
            assert memory[at + length] == 0xEE
    for at, length in ((size + 4096, 1), (1 << 63, 1), (1, size + 4096)):
        with pytest.raises(ValueError, match="beyond the end"):
            code.copy(memory, at, bytes(length))
    memory.close()
