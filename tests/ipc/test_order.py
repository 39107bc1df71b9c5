"""The order of loads and stores is the protocol: check it with a recording buffer in place of the shared memory.

That is the Python code's order. The C code's is the compiler's business, told by C11's memory orders; `test_processes`
and `test_crash` run it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from launcher.ipc import layout
from launcher.ipc.fences import Fences
from tests.ipc.conftest import Note, Queues, flood


class Recorder:
    """Wraps a memoryview of bytes or words; logs (load or store, what it touches)."""

    def __init__(self, inner: memoryview, scale: int, log: list[str]) -> None:
        self._inner, self._scale, self._log = inner, scale, log

    def _name(self, key: int | slice) -> str:
        at = (key.start if isinstance(key, slice) else key) * self._scale
        names = {
            layout.CURSOR_WORD * 8: "write cursor",
            layout.WRITTEN_WORD * 8: "written",
            layout.LAP_WORD * 8: "lap",
            layout.WANTED_WORD * 8: "wanted",
            layout.CLOSED_WORD * 8: "closed",
        }
        if at in names:
            return names[at]
        if at >= layout.DATA_AT:
            return "record"
        if at >= layout.SLOTS_AT:
            return "slot"
        if at >= layout.READERS_AT:
            return "read cursor" if at % 64 == 0 else "read count"
        return "asleep"

    def __getitem__(self, key: int | slice) -> Any:
        self._log.append(f"load {self._name(key)}")
        return self._inner[key]

    def __setitem__(self, key: int | slice, value: Any) -> None:
        self._log.append(f"store {self._name(key)}")
        self._inner[key] = value

    def release(self) -> None:
        self._inner.release()


class RecordedFences(Fences):
    def __init__(self, log: list[str]) -> None:
        super().__init__(strong=False)
        self.full: Callable[[], None] = lambda: log.append("full")
        self.publish: Callable[[], None] = lambda: log.append("publish")
        self.consume: Callable[[], None] = lambda: log.append("consume")


def record(end: Any, log: list[str]) -> None:
    end._words = Recorder(end._words, 8, log)
    end._bytes = Recorder(end._bytes, 1, log)
    end._fences = RecordedFences(log)


def no_log() -> list[str]:
    return []


def only(log: list[str], *wanted: str) -> list[str]:
    """Those entries, repetitions in a row dropped."""
    kept = [entry for entry in log if entry in wanted]
    return [entry for i, entry in enumerate(kept) if i == 0 or kept[i - 1] != entry]


def test_writer_publishes_the_whole_record_then_looks_for_sleepers(queues: Queues) -> None:
    queue, log = queues(), no_log()
    record(queue.writer, log)
    queue.send(Note(1))
    order = ["store record", "publish", "store write cursor", "full", "load asleep"]
    assert only(log, *order) == order


def test_writer_moves_the_lap_before_it_publishes(queues: Queues) -> None:
    queue, log = queues(), no_log()
    while queue.readers[0]._words[layout.CURSOR_WORD] < layout.HOT_BYTES - 1000:
        queue.send(bytes(900))
        queue.receive()
    record(queue.writer, log)
    queue.send(bytes(1000))
    order = ["store record", "store lap", "publish", "store write cursor"]
    assert only(log, *order) == order
    assert queue.receive() == bytes(1000)


def test_writer_lends_the_region_before_it_publishes_its_place(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, log = queues(), no_log()
    arena: Any = queue.writer._arena
    arena._header = Recorder(arena._header, 1, log)
    fill = arena.fill

    def logged_fill(*args: Any) -> None:
        log.append("fill")
        fill(*args)

    monkeypatch.setattr(arena, "fill", logged_fill)
    queue.writer._fences = RecordedFences(log)
    writer: Any = queue.writer
    writer._words = Recorder(writer._words, 8, log)
    queue.send(np.ones(1 << 20))
    order = ["store slot", "fill", "publish", "store write cursor"]
    assert only(log, *order) == order
    assert queue.receive().sum() == 1 << 20


def test_reader_takes_the_record_after_the_cursor_and_gives_it_back_last(queues: Queues) -> None:
    queue, log = queues(), no_log()
    queue.send(Note(1))
    record(queue.readers[0], log)
    assert queue.receive() == Note(1)
    order = [
        "load write cursor",
        "consume",
        "load lap",
        "load record",
        "publish",
        "store read cursor",
        "full",
        "load wanted",
    ]
    assert only(log, *order) == order


def test_reader_says_that_it_sleeps_then_looks_once_more(queues: Queues) -> None:
    queue, log = queues(), no_log()
    reader = queue.readers[0]
    record(reader, log)
    with pytest.raises(TimeoutError):
        queue.receive(seconds=0.01)
    asleep = log.index("store asleep")
    assert log[asleep + 1 : asleep + 3] == ["full", "load write cursor"]


def test_writer_says_what_it_wants_then_looks_once_more(queues: Queues) -> None:
    queue, log = queues(capacity=4096), no_log()
    record(queue.writer, log)
    with pytest.raises(TimeoutError):
        flood(lambda: queue.send(bytes(1000), seconds=0.01))
    wanted = log.index("store wanted")
    assert log[wanted + 1 : wanted + 3] == ["full", "load read cursor"]


def test_last_reader_punches_before_it_releases(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, log = queues(), no_log()
    queue.send(np.ones(layout.WARM_BYTES // 8 + 1))
    arena: Any = queue.readers[0]._arena
    arena._header = Recorder(arena._header, 1, log)
    monkeypatch.setattr("launcher.ipc.segment.punch_hole", lambda *args: log.append("punch"))
    array = queue.receive()
    assert log == []
    del array
    assert only(log, "store slot", "load slot", "punch") == ["store slot", "load slot", "punch", "store slot"]


def test_fences() -> None:
    strong, weak = Fences(strong=True), Fences(strong=False)
    assert strong.full is not strong.publish
    assert weak.publish is weak.consume is weak.full
    for fences in (strong, weak):
        fences.full()
        fences.publish()
        fences.consume()
        assert fences._lock.locked(), "held between fences: release comes first"
