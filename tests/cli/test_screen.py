"""The start on a terminal (a real pseudo-terminal) and elsewhere."""

from __future__ import annotations

import os
import pty
import re
import threading
from collections.abc import Iterator

import pytest

from launcher.cli.screen import StartScreen, progress_text
from launcher.logs import LineWriter
from launcher.process.reports import Step, StepReport


class Reader:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def text(self) -> str:
        os.set_blocking(self._fd, False)
        data = b""
        while True:
            try:
                more = os.read(self._fd, 1 << 16)
            except OSError:
                more = b""
            if not more:
                return data.decode()
            data += more


@pytest.fixture
def pipe() -> Iterator[tuple[Reader, int]]:
    read_end, write_end = os.pipe()
    yield Reader(read_end), write_end
    os.close(read_end)
    os.close(write_end)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Reader, int]]:
    controller, side = pty.openpty()
    with monkeypatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        patch.delenv("NO_COLOR", raising=False)
        yield Reader(controller), side
    os.close(controller)
    os.close(side)


def start(screen: StartScreen) -> None:
    screen.on_step("Worker", 11, StepReport(Step.SPAWNED))
    screen.on_step("Worker", 11, StepReport(Step.IMPORT))
    screen.on_step("Worker_TP0", 11, StepReport(Step.MODEL, done=1, total=3, unit="GB"))
    screen.on_step("Worker_TP0", 11, StepReport(Step.MODEL, done=2, total=3, unit="GB"))
    screen.on_ready("Worker_TP0", 11)
    screen.on_step("Worker_TP0", 11, StepReport(Step.SERVING))


def test_elsewhere_a_line_per_step(pipe: tuple[Reader, int]) -> None:
    reader, fd = pipe
    screen = StartScreen(LineWriter(fd), fd)
    start(screen)
    screen.note("ready: here")
    screen.close()
    lines = [re.sub(r" +\d+\.\d\d s  ", " ", line) for line in reader.text().splitlines()]
    assert lines == [
        "xserve: Worker (pid 11): import",
        "xserve: Worker_TP0 (pid 11): model 1/3 GB",
        "xserve: Worker_TP0 (pid 11): ready",
        "xserve: ready: here",
    ]


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_that_wants_plain_text_gets_it(
    terminal: tuple[Reader, int], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    reader, fd = terminal
    with monkeypatch.context() as patch:
        patch.setenv(name, value)
        screen = StartScreen(LineWriter(fd), fd)
        start(screen)
        screen.close()
    assert "\x1b" not in reader.text()


def test_on_a_terminal_one_live_line_a_process_and_output_above_it(terminal: tuple[Reader, int]) -> None:
    reader, fd = terminal
    writer = LineWriter(fd)
    before = threading.active_count()
    screen = StartScreen(writer, fd)
    start(screen)
    screen.on_step("APIServer_0", 12, StepReport(Step.IMPORT, detail="fastapi"))
    writer.write(b"(Worker_TP0 pid=11) said \x1b[31mred\x1b[0m\n")
    assert threading.active_count() == before
    screen.note("ready: here")
    screen.close()
    screen.close()
    writer.write(b"plain again\n")
    screen_lines = _render(reader.text())
    worker, front = (line.split() for line in screen_lines[2:4])
    assert worker[:3] == ["Worker_TP0", "11", "ready"]
    assert re.fullmatch(r"\d+\.\d s", " ".join(worker[3:])), "how long it took"
    assert front == ["APIServer_0", "12", "import", "fastapi"]
    assert screen_lines[0] == "(Worker_TP0 pid=11) said red"
    assert screen_lines[1].endswith("ready: here")
    assert screen_lines[4] == "plain again"


def _render(text: str) -> list[str]:
    """What a terminal shows: the few controls that are used, on lines without an end on the right."""
    lines: list[str] = [""]
    row = column = 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]", text):
        if token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            column = 0
        elif token.startswith("\x1b["):
            number = int(re.sub(r"\D", "", token) or 1)
            if token.endswith("A"):
                row -= number
            elif token.endswith("K"):
                lines[row] = ""
            else:
                assert token[-1] in "mhl", token
        else:
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (StepReport(Step.MODEL), ""),
        (StepReport(Step.MODEL, detail="x"), " x"),
        (StepReport(Step.MODEL, done=1.5, total=3, unit="GB", detail="x"), " 1.5/3 GB, x"),
        (StepReport(Step.MODEL, done=3, unit="layers"), " 3 layers"),
    ],
)
def test_progress(report: StepReport, text: str) -> None:
    assert progress_text(report) == text


def test_a_new_process_takes_its_predecessors_row(pipe: tuple[Reader, int]) -> None:
    _, fd = pipe
    screen = StartScreen(LineWriter(fd), fd)
    screen.on_ready("W", 1)
    screen.on_step("W", 2, StepReport(Step.IMPORT))
    assert list(screen._rows) == [2]
