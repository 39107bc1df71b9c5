"""Each test gets directories of its own, and children that stand for a supervisor."""

from __future__ import annotations

import os
import select
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.control import places, run_dir
from launcher.control.protocol import (
    InstanceStatus,
    ProcessStatus,
    Reply,
    Request,
    StatusReply,
    StatusRequest,
    StopReply,
)
from launcher.control.server import ControlServer


@pytest.fixture(autouse=True)
def private_places(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """XDG_RUNTIME_DIR of this test alone; no other instance of the machine is seen."""
    # Not tmp_path: with the test's name in it, it is too long for a socket.
    with tempfile.TemporaryDirectory(prefix="xs-", dir="/tmp") as folder, monkeypatch.context() as patch:
        top = Path(folder)
        xdg = top / "xdg"
        xdg.mkdir(mode=0o700)
        patch.setenv("XDG_RUNTIME_DIR", str(xdg))
        patch.delenv("RUNTIME_DIRECTORY", raising=False)
        patch.setattr(places, "_temporary_bases", lambda: [top / "tmp-base"])
        patch.setattr(places, "UNITS", top / "units")
        yield xdg


def in_child(body: Callable[[int], None]) -> tuple[int, int]:
    """Fork; the child runs ``body(write_end)`` and ends. Returns its pid and the read end of the pipe."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read_end)
            body(write_end)
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    os.close(write_end)
    return pid, read_end


class FakeSupervisor:
    """A real process that claims a run directory and answers on its control socket until it is told to stop."""

    def __init__(self, name: str | None, *, answers: bool = True, obeys: bool = True) -> None:
        def body(report: int) -> None:
            owned = run_dir.claim(name)
            owned.record(launch_id="l1", url="http://127.0.0.1:8000")
            serve(owned, report, answers=answers, obeys=obeys)
            owned.remove()

        self.pid, self._pipe = in_child(body)
        self.path = Path(os.read(self._pipe, 4096).decode())
        assert self.path.name, "the fake supervisor did not start"
        self.reaped: int | None = None

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        if self.reaped is None:
            self.reaped = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._pipe)
        return self.reaped


def serve(owned: run_dir.RunDirectory, report: int, *, answers: bool, obeys: bool) -> None:
    stopping = False

    def handle(request: Request) -> Reply:
        nonlocal stopping
        if isinstance(request, StatusRequest):
            core = ProcessStatus(title="EngineCore_DP0", role="engine_core", pid=os.getpid(), phase="ready", since=1.0)
            return StatusReply(InstanceStatus(name=owned.name, state="ready", since=2.0, url="u", processes=(core,)))
        stopping = obeys
        return StopReply(os.getpid(), request.budget if request.budget is not None else 30.0)

    server = ControlServer(owned.control_socket, handle)
    os.write(report, str(owned.path).encode())
    while not stopping:
        poll = select.poll()
        for fd, events in server.filenos().items():
            poll.register(fd, events)
        for fd, _ in poll.poll(50):
            if answers:
                server.on_event(fd)
    server.flush()
    server.close()


@pytest.fixture
def supervisors() -> Iterator[Callable[..., FakeSupervisor]]:
    made: list[FakeSupervisor] = []

    def make(name: str | None = None, **behaviour: bool) -> FakeSupervisor:
        made.append(FakeSupervisor(name, **behaviour))
        return made[-1]

    yield make
    for one in made:
        if one.reaped is None:
            one.kill()
            one.wait()
