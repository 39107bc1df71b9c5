"""What the tree prints: log lines of our processes, output of children, secrets hidden in both.

A child's stdout and stderr are a pipe to the supervisor, which reads it in its poll loop and prints every line with
``(Title pid=N)`` before it. So a child's own log lines carry no prefix; the supervisor's do.

The supervisor never blocks on its own stderr: whoever reads it may be a stopped terminal or a full pipe, and a
supervisor that waits for him watches nobody. `LineWriter` holds back a bounded amount and then counts what it drops.
"""

from __future__ import annotations

import logging
import os
import re
import select
from collections import deque
from collections.abc import Callable, Iterable

from launcher.clock import Deadline

LEVELS = ("debug", "info", "warning", "error", "critical")
REPORTED_LINES = 20
"""Lines of a child's output in its failure report."""
KEPT_LINES = 80
CRASH = b"Fatal Python error"
_THREADS = (b"Thread 0x", b"Current thread 0x")
"""Begins what faulthandler writes. The most telling lines come first there, so the report begins with it."""
LINE_BYTES = 16 << 10
"""Where a line without an end is cut."""
BACKLOG_BYTES = 1 << 20
KNOWN_CHILDREN = 1024
"""Children, living and ended, whose last lines are known: more than a node has processes."""
HIDDEN = "***"
_SHORT_SECRET = 8
"""Secrets shorter than this are hidden only where they stand alone: else they would blot out half of the text."""


class Redactor:
    """Replaces every known secret in a text."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets: set[str] = set()
        self._text: re.Pattern[str] | None = None
        self._data: re.Pattern[bytes] | None = None
        for secret in secrets:
            self.add(secret)

    def add(self, secret: str) -> None:
        if not secret:
            return
        self._secrets.add(secret)
        # The longest first: a secret may be the beginning of another.
        pattern = "|".join(_pattern(s) for s in sorted(self._secrets, key=len, reverse=True))
        self._text = re.compile(pattern)
        self._data = re.compile(pattern.encode())

    def text(self, text: str) -> str:
        return self._text.sub(HIDDEN, text) if self._text else text

    def data(self, data: bytes) -> bytes:
        return self._data.sub(HIDDEN.encode(), data) if self._data else data


def _pattern(secret: str) -> str:
    escaped = re.escape(secret)
    return escaped if len(secret) >= _SHORT_SECRET else rf"(?<![\w-]){escaped}(?![\w-])"


SECRETS = Redactor()
"""This process's secrets: the command line adds API keys as soon as it knows them; all printing goes through it."""


class LineWriter:
    """Whole lines to a descriptor, without ever waiting for its reader (except in `drain`)."""

    def __init__(self, fd: int = 2, *, limit: int = BACKLOG_BYTES) -> None:
        self._fd = fd
        self._limit = limit
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._lost = 0
        self._broken = False
        self.divert: Callable[[bytes], None] | None = None
        """While set, `write` hands its lines to it: whoever has drawn on the terminal prints them around it."""
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def pending(self) -> bool:
        """True: call `flush` again when the descriptor is writable."""
        return bool(self._waiting)

    def filenos(self) -> dict[int, int]:
        """For a poll loop: the descriptor while something waits for it."""
        return {self._fd: select.POLLOUT} if self._waiting else {}

    def on_event(self, fd: int) -> None:  # noqa: ARG002 there is only one
        """The descriptor is writable."""
        self.flush()

    def write(self, lines: bytes) -> None:
        """`lines` ends with a newline."""
        if self.divert is not None:
            self.divert(lines)
        else:
            self.put(lines)

    def put(self, lines: bytes) -> None:
        """Past `divert`. Goes out in pieces of at most PIPE_BUF bytes, which nobody can write between."""
        for piece in _pieces(lines):
            if self._bytes + len(piece) > self._limit:
                self._lost += piece.count(b"\n")
                continue
            self._waiting.append(piece)
            self._bytes += len(piece)
        self.flush()

    def flush(self) -> None:
        """Write what the descriptor takes now."""
        while self._waiting and not self._broken:
            # A pipe that polls writable takes PIPE_BUF bytes without blocking; the flag O_NONBLOCK would be everybody's
            # who shares the terminal with us.
            if not self._poll.poll(0):
                return
            self._write_first()
        if self._broken:
            self._waiting.clear()
            self._bytes = 0
        elif self._lost:
            lost, self._lost = self._lost, 0
            self.put(b"xserve: %d lines of output were lost here: they came faster than they were read\n" % lost)

    def drain(self, deadline: Deadline) -> None:
        """Wait until everything is out, or the deadline."""
        self.flush()
        while self._waiting and not deadline.expired:
            self._poll.poll(deadline.remaining_ms(1.0))
            self.flush()

    def _write_first(self) -> None:
        piece = self._waiting[0]
        try:
            written = os.write(self._fd, piece)
        except BlockingIOError:
            return
        except OSError:
            self._broken = True  # the reader is gone: what is said from now on is for nobody
            return
        self._bytes -= written
        if written < len(piece):
            self._waiting[0] = piece[written:]
        else:
            self._waiting.popleft()


def _pieces(lines: bytes) -> Iterable[bytes]:
    """Cut after line ends, so that each piece is at most PIPE_BUF bytes; a longer line is cut inside."""
    start = 0
    while start < len(lines):
        end = start + select.PIPE_BUF
        if end < len(lines):
            newline = lines.rfind(b"\n", start, end)
            end = newline + 1 if newline >= 0 else end
        yield lines[start:end]
        start = end


class _Child:
    """One child's output: the beginning of a line, and the last whole ones."""

    def __init__(self) -> None:
        self.partial = b""
        self.last: deque[bytes] = deque(maxlen=KEPT_LINES)


def _dump_start(lines: list[bytes]) -> int | None:
    """Where the last stack dump (faulthandler's) begins: the frames that matter stand first in it."""
    start = None
    inside = False
    for at, line in enumerate(lines):
        if line.startswith((CRASH, *_THREADS)):
            if not inside:
                start, inside = at, True
        elif line and not line.startswith(b"  "):
            inside = False
    return start


class OutputRelay:
    """Children's output, line by line with a prefix, to `sink`.

    A title is one child's at a time; its successor (after a restart) comes with another pid and begins anew.
    """

    def __init__(self, sink: Callable[[bytes], None], secrets: Redactor = SECRETS) -> None:
        """`sink` takes whole lines (`LineWriter.write`, or the start screen's `write`)."""
        self._sink = sink
        self._secrets = secrets
        self._children: dict[tuple[str, int], _Child] = {}
        """Those that have printed something; the one that printed first is the oldest."""

    def feed(self, title: str, pid: int, data: bytes) -> None:
        """Bytes as they came out of the child's pipe. Nothing is changed in them but secrets."""
        child = self._child(title, pid)
        *lines, child.partial = (child.partial + data).split(b"\n")
        while len(child.partial) >= LINE_BYTES:
            lines.append(child.partial[:LINE_BYTES])
            child.partial = child.partial[LINE_BYTES:]
        self._emit(title, pid, child, lines)

    def finish(self, title: str, pid: int) -> None:
        """The pipe is at its end. The last lines stay known. Idempotent."""
        child = self._children.get((title, pid))
        if child is not None and child.partial:
            self._emit(title, pid, child, [child.partial])
            child.partial = b""

    def tail(self, title: str) -> tuple[str, ...]:
        """Lines of the newest child of that title: its last `REPORTED_LINES`, or its last stack dump from the start."""
        newest = next((key for key in reversed(self._children) if key[0] == title), None)
        if newest is None:
            return ()
        child = self._children[newest]
        lines = [*child.last, *([self._secrets.data(child.partial)] if child.partial else [])]
        # Of a line that was drawn over and over (a progress bar) the last state counts.
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        dump = _dump_start(shown)
        first, most = max(0, len(shown) - REPORTED_LINES), REPORTED_LINES
        if dump is not None:
            # A dump that was asked for has a watching thread or two before the one that matters.
            first, most = dump, REPORTED_LINES if shown[dump].startswith(CRASH) else 2 * REPORTED_LINES
        return tuple(line.decode(errors="replace") for line in shown[first : first + most])

    def _child(self, title: str, pid: int) -> _Child:
        child = self._children.get((title, pid))
        if child is None:
            while len(self._children) >= KNOWN_CHILDREN:
                del self._children[next(iter(self._children))]
            child = self._children[title, pid] = _Child()
        return child

    def _emit(self, title: str, pid: int, child: _Child, lines: list[bytes]) -> None:
        if not lines:
            return
        clean = [self._secrets.data(line) for line in lines]
        child.last.extend(clean)
        prefix = f"({title} pid={pid}) ".encode()
        self._sink(b"".join(prefix + line + b"\n" for line in clean))


class _Formatter(logging.Formatter):
    """Plain lines, secrets hidden, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        return SECRETS.text(super().format(record))


class _SinkHandler(logging.Handler):
    def __init__(self, sink: Callable[[bytes], None]) -> None:
        super().__init__()
        self._sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            self._sink(text.encode(errors="backslashreplace") + b"\n")
        except Exception:
            self.handleError(record)


def setup(level: str, title: str, *, sink: Callable[[bytes], None] | None = None) -> None:
    """Log to stderr from `level` on. `title` is the prefix; empty for a child, whose supervisor puts it there.

    `sink` (the supervisor's `LineWriter.write` or screen) replaces stderr. Calling it again replaces the set-up before.
    """
    handler: logging.Handler = logging.StreamHandler() if sink is None else _SinkHandler(sink)
    prefix = f"({title} pid={os.getpid()}) ".replace("%", "%%") if title else ""
    handler.setFormatter(_Formatter(f"{prefix}%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
