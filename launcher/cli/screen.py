"""The start on the screen: one live line per process on a terminal, one plain line per step elsewhere.

It is called from the supervisor's loop, so it must not block and starts no thread: rich draws into a buffer, only when
told to (`auto_refresh=False`), and the bytes go out through the `LineWriter` that everybody prints by. While the live
lines stand, the writer's lines are diverted here and printed above them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from launcher import clock, envs
from launcher.logs import SECRETS, LineWriter
from launcher.process.reports import Step, StepReport

if TYPE_CHECKING:
    from rich.live import Live

DRAW_SECONDS = 0.1
"""Between two drawings of progress; a new step is drawn at once."""
QUIET_STEPS = frozenset({Step.SPAWNED, Step.FDS_CLOSED, Step.WATCHING, Step.SERVING})
"""Over in a millisecond, or (serving) the same as the one before: not worth a plain line each."""


class _Row:
    def __init__(self, title: str, pid: int) -> None:
        self.title = title
        self.pid = pid
        self.step = ""
        self.progress = ""
        self.since = clock.now()


class _Buffer:
    """The file that rich writes to: hands everything on at `flush`."""

    encoding = "utf-8"

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer
        self._text: list[str] = []

    def write(self, text: str) -> int:
        self._text.append(text)
        return len(text)

    def flush(self) -> None:
        if self._text:
            self._writer.put("".join(self._text).encode(errors="replace"))
            self._text.clear()

    def isatty(self) -> bool:
        return True


class StartScreen:
    """`close` it when the start is over, well or not."""

    def __init__(self, writer: LineWriter, fd: int = 2, *, live: bool | None = None) -> None:
        """`live` None: only on a terminal that can, and without NO_COLOR."""
        self._writer = writer
        self._fd = fd
        self._rows: dict[int, _Row] = {}
        self._began = clock.now()
        self._drawn = 0.0
        self._live: Live | None = None
        if live if live is not None else _is_capable(fd):
            self._live = self._open_live()
            writer.divert = self._print_above

    def on_step(self, title: str, pid: int, report: StepReport) -> None:
        """A process has entered a step, or made progress in it."""
        row = self._row(title, pid)
        if report.step is Step.SERVING and row.step == Step.READY:
            return  # the same to a user; when it became ready is what he wants to see
        entered = row.step != report.step
        if entered:
            row.step, row.since = str(report.step), clock.now()
        row.progress = progress_text(report)
        if self._live is not None:
            self._draw(now=entered)
        elif entered and report.step not in QUIET_STEPS:
            self.note(f"{title} (pid {pid}): {row.step}{row.progress}")

    def on_ready(self, title: str, pid: int) -> None:
        self.on_step(title, pid, StepReport(Step.READY))

    def note(self, line: str) -> None:
        """A line of our own, now; also after `close`."""
        text = f"xserve: {clock.now() - self._began:6.2f} s  {SECRETS.text(line)}\n"
        self._writer.write(text.encode(errors="replace"))

    def _print_above(self, lines: bytes) -> None:
        from rich.text import Text

        assert self._live is not None
        text = lines.decode(errors="replace").rstrip("\n")
        self._live.console.print(Text.from_ansi(text), soft_wrap=True, highlight=False)

    def close(self) -> None:
        """Leave the live lines as they are; from now on lines are plain. Idempotent."""
        if self._live is None:
            return
        live, self._live = self._live, None
        live.update(self._table(), refresh=True)
        live.stop()
        live.console.file.flush()
        self._writer.divert = None

    def _row(self, title: str, pid: int) -> _Row:
        row = self._rows.get(pid)
        if row is None:
            for old in [p for p, r in self._rows.items() if r.title == title]:
                del self._rows[old]  # its predecessor
            row = self._rows[pid] = _Row(title, pid)
        row.title = title
        return row

    def _open_live(self) -> Live:
        # Imported here: half of all launches have no terminal, and `xserve --help` never needs it.
        from rich.console import Console
        from rich.live import Live

        size = _terminal_size(self._fd)
        buffer: Any = _Buffer(self._writer)
        console = Console(file=buffer, force_terminal=True, width=size.columns, height=size.lines, legacy_windows=False)
        live = Live(
            console=console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="ellipsis",
        )
        live.start()
        return live

    def _draw(self, *, now: bool) -> None:
        assert self._live is not None
        if now or clock.now() - self._drawn >= DRAW_SECONDS:
            self._drawn = clock.now()
            self._live.update(self._table(), refresh=True)

    def _table(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for row in self._rows.values():
            style = "green" if row.step == Step.READY else "default"
            took = f"{row.since - self._began:.1f} s" if row.step == Step.READY else ""
            state = Text(f"{row.step}{row.progress}", style=style, no_wrap=True, overflow="ellipsis")
            table.add_row(
                Text(row.title, no_wrap=True), Text(str(row.pid), style="dim"), state, Text(took, style="dim")
            )
        return table


def progress_text(report: StepReport) -> str:
    """`` 12/30 layers, detail``, or nothing."""
    parts = []
    if report.total:
        parts.append(f"{report.done:g}/{report.total:g} {report.unit}".rstrip())
    elif report.done:
        parts.append(f"{report.done:g} {report.unit}".rstrip())
    if report.detail:
        parts.append(report.detail)
    return f" {', '.join(parts)}" if parts else ""


def _is_capable(fd: int) -> bool:
    return os.isatty(fd) and not envs.no_color() and envs.terminal() not in ("dumb", "")


def _terminal_size(fd: int) -> os.terminal_size:
    """Of the terminal, or a guess: some (in containers, under test) say 0 x 0."""
    try:
        columns, lines = os.get_terminal_size(fd)
    except OSError:
        columns = lines = 0
    return os.terminal_size((columns or 100, lines or 30))
