"""Lines, prefixes, secrets, and a supervisor that never waits for whoever reads its output."""

from __future__ import annotations

import fcntl
import logging
import os
import select
from collections.abc import Iterator

import pytest

from launcher import logs
from launcher.clock import Deadline
from launcher.logs import LINE_BYTES, LineWriter, OutputRelay, Redactor


class Lines:
    def __init__(self) -> None:
        self.data = b""

    def __call__(self, data: bytes) -> None:
        assert data.endswith(b"\n")
        self.data += data


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            pass


def relay() -> tuple[OutputRelay, Lines]:
    lines = Lines()
    one = OutputRelay(lines, Redactor(["sk-secret-key"]))
    return one, lines


def test_lines_get_the_prefix_however_they_are_cut() -> None:
    for size in (1, 2, 3, 100):
        one, lines = relay()
        text = "ein Ü\nzwei\r\n\nlast".encode()
        for at in range(0, len(text), size):
            one.feed("Worker", 7, text[at : at + size])
        one.finish("Worker", 7)
        prefix = b"(Worker pid=7) "
        assert lines.data == prefix + "ein Ü\n".encode() + prefix + b"zwei\r\n" + prefix + b"\n" + prefix + b"last\n"


def test_last_lines_survive_the_end() -> None:
    one, lines = relay()
    one.feed("Worker", 7, b"".join(b"line %d\n" % n for n in range(30)) + b"unfinished")
    assert one.tail("Worker") == (*(f"line {n}" for n in range(11, 30)), "unfinished")
    one.finish("Worker", 7)
    one.finish("Worker", 7)
    assert one.tail("Worker")[-2:] == ("line 29", "unfinished")
    assert lines.data.endswith(b"(Worker pid=7) line 29\n(Worker pid=7) unfinished\n")
    assert one.tail("nobody") == ()
    one.finish("nobody", 8)


def test_a_successor_begins_anew() -> None:
    one, _ = relay()
    one.feed("Worker", 7, b"old\nhalf")
    one.feed("Worker", 8, b"new\n")
    assert one.tail("Worker") == ("new",)


def test_a_crash_is_reported_from_its_beginning() -> None:
    one, _ = relay()
    dump = [b"Fatal Python error: Segmentation fault", b"", *(b'  File "x", line %d' % n for n in range(30))]
    one.feed("Worker", 7, b"\n".join([b"before"] * 9 + dump) + b"\n")
    assert one.tail("Worker") == tuple(line.decode() for line in dump[:20])


def test_of_a_progress_bar_the_last_state_is_reported() -> None:
    one, _ = relay()
    one.feed("Worker", 7, b"\r10%\r50%\r100%\n\r10%\r20%")
    assert one.tail("Worker") == ("100%", "20%")


def test_a_line_without_end_is_cut_and_does_not_grow() -> None:
    one, lines = relay()
    for _ in range(10):
        one.feed("Worker", 7, b"x" * LINE_BYTES)
    assert lines.data.count(b"\n") == 10
    one.finish("Worker", 7)
    assert lines.data.count(b"x") == 10 * LINE_BYTES


def test_the_number_of_known_children_is_bounded() -> None:
    one, _ = relay()
    count = 2 * logs.KNOWN_CHILDREN
    for pid in range(count):
        one.feed(f"w{pid}", pid, b"y\n")
    assert sum(bool(one.tail(f"w{pid}")) for pid in range(count)) == logs.KNOWN_CHILDREN


def test_secrets_do_not_pass() -> None:
    one, lines = relay()
    one.feed("Worker", 7, b"key=sk-secre")
    one.feed("Worker", 7, b"t-key!\n")
    assert lines.data == b"(Worker pid=7) key=***!\n"
    assert one.tail("Worker") == ("key=***!",)


def test_short_secrets_are_hidden_where_they_stand_alone() -> None:
    some = Redactor(["abc", "longer-secret", "longer-secret-2", ""])
    assert some.text("abc 'abc' abcd x-abc") == "*** '***' abcd x-abc"
    assert some.text("xlonger-secret-2y longer-secret") == "x***y ***"
    assert some.data(b"abc") == b"***"


def test_a_reader_that_stopped_reading_does_not_block_us(pipe: tuple[int, int]) -> None:
    writer = LineWriter(pipe[1], limit=10_000)
    line = b"z" * 99 + b"\n"
    for _ in range(1000):
        writer.write(line)  # would block for ever after 40 lines
    assert writer.pending
    got = b""
    while writer.pending or select.select([pipe[0]], [], [], 0)[0]:
        got += os.read(pipe[0], 1 << 16)
        for fd in writer.filenos():
            writer.on_event(fd)
    lines = got.split(b"\n")
    whole = lines.count(line[:-1])
    assert lines[-1] == b""
    assert b"%d lines of output were lost" % (1000 - whole) in lines[-2]
    assert len(lines) == whole + 2, "no line is torn"


def test_a_reader_that_went_away_is_no_error(pipe: tuple[int, int]) -> None:
    writer = LineWriter(pipe[1])
    os.close(pipe[0])
    writer.write(b"a\n")
    writer.write(b"b\n")
    assert not writer.pending


def test_drain_has_a_deadline(pipe: tuple[int, int]) -> None:
    writer = LineWriter(pipe[1])
    for _ in range(200):
        writer.write(b"z" * 99 + b"\n")
    writer.drain(Deadline.after(0.05))
    assert writer.pending


def test_setup_prefixes_and_redacts(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    lines = Lines()
    with monkeypatch.context() as patch:
        patch.setattr(logs, "SECRETS", Redactor(["hush-hush-hush"]))
        try:
            logs.setup("info", "Supervisor", sink=lines)
            logging.getLogger("x").debug("too low")
            logging.getLogger("x").info("the key is %s", "hush-hush-hush")
            try:
                raise ValueError("hush-hush-hush")
            except ValueError:
                logging.getLogger("x").exception("100%% sure")
        finally:
            root.handlers[:] = before
            root.setLevel(level)
    text = lines.data.decode()
    assert text.startswith(f"(Supervisor pid={os.getpid()}) ")
    assert "INFO the key is ***\n" in text
    assert "ValueError: ***" in text
    assert "too low" not in text
