"""The child's side of its life, from the first instruction after fork or exec to the last.

`run_child` follows the one list of steps (`reports.Step`): session, signals, foreign descriptors, parent watched, birth
message, environment, name, and only then the role's own target. The parent is watched *before* anything slow happens.
This file is the only one that writes `os.environ`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

import setproctitle

from launcher import clock, envs, logs
from launcher.clock import Deadline
from launcher.errors import (
    ChildFailedError,
    ClosedError,
    DeadlineError,
    Failure,
    FailureKind,
    PeerDiedError,
    XserveError,
)
from launcher.process import channel as channels
from launcher.process import kernel, signals
from launcher.process.reports import (
    Birth,
    Born,
    Drain,
    FailureReport,
    Goodbye,
    Handover,
    ReadyReport,
    Step,
    StepReport,
    Stop,
    TreeState,
    UpMessage,
)
from launcher.process.spec import ProcessSpec

_BIRTH_TIMEOUT = 30.0
"""Seconds. The parent sends the birth message right after the start; a parent that can't is stuck or gone."""
_PROGRESS_GAP = 0.2
"""Seconds between two progress reports of one step: enough for an eye and for a limit counted in seconds."""
_MAX_TRACEBACK = 48 * 1024
"""Characters; the end of a traceback is what matters."""

log = logging.getLogger(__name__)

importing_main = ""
"""The script that this child is importing as its ``__main__`` right now: what is called meanwhile has no guard."""


class ChildContext:
    """What a role's target is given: its spec, its descriptors, and its line to the parent."""

    def __init__(self, spec: ProcessSpec, up: channels.ChildChannel, status: channels.ChildChannel | None) -> None:
        self.spec = spec
        self.descriptors: dict[str, int] = {}
        """From the birth message, by name; owned by the target."""
        self.step = Step.SPAWNED
        self._up = up
        self._status = status
        self._handovers: deque[tuple[Handover, list[int]]] = deque()
        self._inbox: deque[TreeState | Drain | Stop] = deque()
        self._stop = False
        self._last_progress = 0.0
        self._watcher: threading.Thread | None = None
        self._signals: signals.SignalPipe | None = None
        self._wake = select.epoll()
        self._wake.register(up.fileno(), select.EPOLLIN)

    @property
    def channel(self) -> channels.ChildChannel:
        """The raw line to the parent, for roles that speak their own protocol over it (the helper)."""
        return self._up

    # --- up

    def send(self, message: UpMessage) -> None:
        """Report to the parent and, where there is a second line, to the supervisor. A dead listener is no error:
        the watch on the parent deals with that."""
        for line in (self._up, self._status):
            if line is not None:
                with contextlib.suppress(OSError, XserveError):
                    line.send(message)

    def enter(self, step: Step, detail: str = "") -> None:
        """Report a step of the life."""
        self.step = step
        self._last_progress = 0.0
        self.send(StepReport(step=step, detail=detail))

    def progress(self, done: float, total: float = 0, unit: str = "", detail: str = "") -> None:
        """Report progress within the step; cheap enough to call often."""
        now = clock.now()
        if now - self._last_progress >= _PROGRESS_GAP or (total and done >= total):
            self._last_progress = now
            self.send(StepReport(step=self.step, detail=detail, done=done, total=total, unit=unit))

    def ready(self, info: dict[str, Any] | None = None) -> None:
        """READY. From here on SIGTERM asks for an orderly end; before, it simply ends the process."""
        if self._signals is None:
            self._signals = signals.SignalPipe([signal.SIGTERM])
            self._wake.register(self._signals.fileno(), select.EPOLLIN)
        self.step = Step.READY
        self.send(ReadyReport(info=info or {}))

    # --- down

    def fileno(self) -> int:
        """Readable when `poll_messages` has something new or `stop_requested` may have changed."""
        return self._wake.fileno()

    @property
    def stop_requested(self) -> bool:
        """After `Stop` or SIGTERM. Looks at what has come in."""
        self._pump()
        return self._stop

    def poll_messages(self) -> list[TreeState | Drain | Stop]:
        """What the parent said since the last call, without blocking. A dead parent reads as `Stop`."""
        self._pump()
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def wait_handover(self, name: str, deadline: Deadline) -> tuple[bytes, list[int]]:
        """Payload and descriptors that the parent hands over for `name`.

        Raises DeadlineError, and ClosedError when told to stop.
        """
        while True:
            self._pump()
            for entry in self._handovers:
                if entry[0].name == name:
                    self._handovers.remove(entry)
                    return entry[0].payload, entry[1]
            if self._stop:
                raise ClosedError(f"told to stop while waiting for {name}")
            if deadline.expired:
                raise DeadlineError(f"the parent has not handed over {name} within {deadline.seconds:.0f} s")
            select.select([self._wake.fileno()], [], [], min(deadline.remaining(), 3600))

    def _pump(self) -> None:
        if self._signals is not None and self._signals.read():
            self._stop = True
        while True:
            try:
                got = self._up.recv_nowait()
            except EOFError:
                if not self._stop:
                    self._stop = True
                    self._inbox.append(Stop(budget=0))
                with contextlib.suppress(OSError, ValueError):
                    self._wake.unregister(self._up.fileno())  # or it would stay readable for ever
                return
            if got is None:
                return
            message, fds = got
            if isinstance(message, Handover):
                self._handovers.append((message, fds))
            elif isinstance(message, TreeState | Drain | Stop):
                self._stop = self._stop or isinstance(message, Stop)
                self._inbox.append(message)

    # --- name and parent

    def set_title(self, title: str) -> None:
        """``xserve::<title>`` for ps and GPU tools; the kernel's short name is the spec's own."""
        setproctitle.setproctitle(f"xserve::{title}")
        if self.spec.comm:
            kernel.set_comm(self.spec.comm)

    def watch_parent(self) -> None:
        """Start the thread that ends this process when the parent's end of the channel closes.

        The parent-death signal covers a parent that died; this covers one that let go of us, and starters whose
        thread may end. Not before this process has forked its own children: a fork wants one thread.
        """
        if self._watcher is None:
            self._watcher = threading.Thread(target=_exit_on_hangup, args=(self._up.fileno(),), daemon=True)
            self._watcher.name = "parent-watch"
            self._watcher.start()


def _exit_on_hangup(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, 0)  # no events asked for: only POLLHUP and POLLERR are told
    poll.poll()
    # An orderly end closes the channel from our own side first; what is left is a parent that is gone.
    time.sleep(0.2)  # room for a target that is already ending by itself
    os._exit(1)


def run_child(sock: socket.socket, parent_pid: int, *, arm: bool, wait_for_parent: bool = False) -> NoReturn:
    """Never returns. `parent_pid` is who must be our parent; `arm` = its starting thread lives as long as it does.

    With `wait_for_parent` (forkserver) the process waits until it has been handed to that parent.
    """
    code = 1
    try:
        code = _run(sock, parent_pid, arm=arm, wait_for_parent=wait_for_parent)
    except BaseException:
        # Before there was a line to report on. stderr is all that is left.
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        # Not sys.exit: a forked child must not run the exit handlers and finally blocks of its parent's stack.
        os._exit(code)


def _run(sock: socket.socket, parent_pid: int, *, arm: bool, wait_for_parent: bool) -> int:
    with contextlib.suppress(PermissionError):  # already leader of a session
        os.setsid()
    signals.reset_in_child()
    # setproctitle writes over the memory of argv and environ. It looks for that once, and finds it only while the
    # environment has not been changed.
    setproctitle.getproctitle()
    _close_foreign({0, 1, 2, sock.fileno()})
    if wait_for_parent:
        _wait_for_parent(parent_pid)
    if arm:
        kernel.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent_pid:
        return 1  # it died before we could watch it
    up = channels.child_end(sock)
    if wait_for_parent:
        up.send(Born(pid=os.getpid()))
    birth, fds = up.recv(Deadline.after(_BIRTH_TIMEOUT))
    if not isinstance(birth, Birth):
        raise RuntimeError(f"expected a birth message, got {type(birth).__name__}")
    ctx = _be_born(up, birth, fds)
    ctx.enter(Step.WATCHING)
    try:
        if birth.spec.main_path:
            _import_main(birth.spec.main_path)
        _target(birth.spec)(ctx)
    except BaseException as error:
        failure = _failure(ctx, error)
        log.debug("%s", failure.traceback)
        cause = error.cause if isinstance(error, ChildFailedError) else None
        ctx.send(FailureReport(failure=failure, cause=cause))
        return error.exit_code if isinstance(error, XserveError) else 1
    ctx.send(Goodbye())
    return 0


def _close_foreign(keep: set[int]) -> None:
    """Close every descriptor but `keep`: pipe ends of siblings, above all, whose EOF would never come otherwise."""
    low = 0
    for fd in [*sorted(keep), _highest_fd() + 1]:
        if low < fd:  # an empty range must not be asked for: closerange(0, 0) closes everything (CPython 3.11)
            os.closerange(low, fd)
        low = fd + 1


def _highest_fd() -> int:
    return max(int(name) for name in os.listdir("/proc/self/fd"))


def _wait_for_parent(parent_pid: int) -> None:
    """The forkserver's go-between ends right after forking us; the subreaper above it becomes our parent."""
    deadline = Deadline.after(10)
    while os.getppid() != parent_pid and not deadline.expired:
        time.sleep(0.0005)


def _be_born(up: channels.ChildChannel, birth: Birth, fds: list[int]) -> ChildContext:
    spec = birth.spec
    named = dict(zip(birth.fd_names, fds, strict=True))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    if "output" in named:
        output = named.pop("output")
        sys.stdout.flush()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
    _standard_streams()
    status = named.pop("status", None)
    ctx = ChildContext(spec, up, channels.child_end(socket.socket(fileno=status)) if status is not None else None)
    ctx.descriptors = named
    for name in envs.not_inherited():  # systemd's, above all: a child could announce READY in the supervisor's place
        os.environ.pop(name, None)
    os.environ.update(spec.env)
    ctx.set_title(spec.early_title or spec.title)
    faulthandler.disable()  # a fork inherits "enabled", but its handlers were reset above
    faulthandler.enable(file=2, all_threads=False)
    logs.setup(spec.env.get("XSERVE_LOG_LEVEL", "info"), "")
    if not will_fork(spec):
        ctx.watch_parent()
    return ctx


def will_fork(spec: ProcessSpec) -> bool:
    """Whether this process must keep to one thread until it has forked."""
    return spec.role in ("forkserver", "guard") or (bool(spec.children) and spec.child_method == "fork")


def _standard_streams() -> None:
    """Whole lines at once, whatever the parent's own streams were; never an encoding error on the way out."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for the life of the process
    for fd, name in ((1, "stdout"), (2, "stderr")):
        stream = open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)


def _import_main(path: str) -> None:
    """Run the user's script under another name than ``__main__``, so that its guarded part does not run, and let it
    be found as ``__main__``, so that what was defined in it is (as multiprocessing's spawn does)."""
    global importing_main
    importing_main = path
    try:
        content = runpy.run_path(path, run_name="__mp_main__")
    finally:
        importing_main = ""
    module = types.ModuleType("__mp_main__")
    module.__dict__.update(content)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def _target(spec: ProcessSpec) -> Callable[[ChildContext], None]:
    module, _, name = spec.target.partition(":")
    target: Callable[[ChildContext], None] = getattr(importlib.import_module(module), name)
    return target


def _failure(ctx: ChildContext, error: BaseException) -> Failure:
    """The exception as data. A failure that only passes on another's is `peer_lost`: never the first cause."""
    kind: FailureKind = "raised"
    if isinstance(error, ChildFailedError | PeerDiedError | EOFError | ConnectionError):
        kind = "peer_lost"
    text = str(error).strip().splitlines()
    headline = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    if isinstance(error, XserveError) and text:
        headline = text[0]
    trace = "".join(traceback.format_exception(error))
    return Failure(
        title=ctx.spec.title,
        role=ctx.spec.role,
        kind=kind,
        headline=headline,
        step=ctx.step,
        rank=ctx.spec.rank,
        node=ctx.spec.node,
        pid=os.getpid(),
        traceback=trace[-_MAX_TRACEBACK:],
        at=clock.now(),
        permanent=isinstance(error, XserveError) and error.exit_code == 2,
    )
