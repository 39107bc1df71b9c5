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
import time
import traceback
import types
from collections.abc import Callable, Mapping
from typing import NoReturn

import setproctitle

from launcher import envs, logs
from launcher.clock import Deadline
from launcher.errors import XserveError
from launcher.process import channel as channels
from launcher.process import kernel, numa, signals
from launcher.process.context import ChildContext
from launcher.process.failing import cause_behind, failure_of_exception
from launcher.process.reports import Birth, Born, FailureReport, Goodbye, Step
from launcher.process.reseed import reseed
from launcher.process.spec import ProcessSpec

_BIRTH_TIMEOUT = 30.0
"""Seconds. The parent sends the birth message right after the start; a parent that can't is stuck or gone."""

STACK_SIGNAL = signal.SIGQUIT
"""Has a child write the Python stacks of its threads to its output, and go on. It needs no interpreter lock, so it
works in a hung C call too; not in a process that is stopped or stuck in the kernel."""

log = logging.getLogger(__name__)

__all__ = ["STACK_SIGNAL", "ChildContext", "adopt_environment", "importing_main", "run_child", "will_fork"]

importing_main = ""
"""The script that this child is importing as its ``__main__`` right now: what is called meanwhile has no guard."""


def run_child(
    sock: socket.socket, parent_pid: int, *, arm: bool, wait_for_parent: bool = False, outlives_parent: bool = False
) -> NoReturn:
    """Never returns. `parent_pid` is who must be our parent; `arm` = its starting thread lives as long as it does.

    With `wait_for_parent` (forkserver) the process waits until it has been handed to that parent. With
    `outlives_parent` (the guard) a parent that is dead already is no reason to leave: it is the reason to be here.
    """
    code = 1
    try:
        code = _run(sock, parent_pid, arm, wait_for_parent, outlives_parent)
    except BaseException:
        # Before there was a line to report on. stderr is all that is left.
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        # Not sys.exit: a forked child must not run the exit handlers and finally blocks of its parent's stack.
        os._exit(code)


def _run(sock: socket.socket, parent_pid: int, arm: bool, wait_for_parent: bool, outlives_parent: bool) -> int:
    with contextlib.suppress(PermissionError):  # already leader of a session
        os.setsid()
    signals.reset_in_child()
    # setproctitle writes over the memory of argv and environ. It looks for that once, and finds it only while the
    # environment has not been changed.
    setproctitle.getproctitle()
    _close_foreign({0, 1, 2, sock.fileno()})
    if wait_for_parent:
        _wait_for_parent(parent_pid, sock)
    if arm:
        kernel.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent_pid and not outlives_parent:
        return 1  # it died before we could watch it
    up = channels.child_end(sock)
    if wait_for_parent:
        up.send(Born(pid=os.getpid()))
    birth, fds = up.recv(Deadline.after(_BIRTH_TIMEOUT))
    if not isinstance(birth, Birth):
        raise RuntimeError(f"expected a birth message, got {type(birth).__name__}")
    ctx = _be_born(up, birth, fds)
    ctx.parent_pid = parent_pid
    ctx.enter(Step.WATCHING)
    try:
        if birth.spec.main_path:
            _import_main(birth.spec.main_path)
        _target(birth.spec)(ctx)
    except BaseException as error:
        failure = failure_of_exception(error, birth.spec, ctx.step)
        log.debug("%s", failure.traceback)
        ctx.send(FailureReport(failure=failure, cause=cause_behind(error), notes=_notes(ctx)))
        return error.exit_code if isinstance(error, XserveError) else 1
    ctx.send(Goodbye())
    return 0


def _notes(ctx: ChildContext) -> tuple[str, ...]:
    try:
        return tuple(ctx.notes())
    except Exception as error:  # a failure is being reported: a second one must not hide it
        return (f"no notes: {error!r}",)


def _close_foreign(keep: set[int]) -> None:
    """Close every descriptor but `keep`: pipe ends of siblings, above all, whose EOF would never come otherwise."""
    low = 0
    for fd in [*sorted(keep), _highest_fd() + 1]:
        if low < fd:  # an empty range must not be asked for: closerange(0, 0) closes everything (CPython 3.11)
            os.closerange(low, fd)
        low = fd + 1


def _highest_fd() -> int:
    return max(int(name) for name in os.listdir("/proc/self/fd"))


def _wait_for_parent(parent_pid: int, sock: socket.socket) -> None:
    """The forkserver's go-between ends right after forking us; the subreaper above it becomes our parent, unless it is
    dead: then it is not there to be waited for, and its end of `sock` is closed."""
    deadline = Deadline.after(10)
    poll = select.poll()
    poll.register(sock, 0)  # no events asked for: only POLLHUP and POLLERR are told
    while os.getppid() != parent_pid and not deadline.expired and not poll.poll(0):
        time.sleep(0.0005)


def _be_born(up: channels.ChildChannel, birth: Birth, fds: list[int]) -> ChildContext:
    spec = birth.spec
    named = dict(zip(birth.fd_names, fds, strict=True))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    if "output" in named:
        output = named.pop("output")
        if sys.stdout is not None:
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
    faulthandler.unregister(STACK_SIGNAL)
    faulthandler.enable(file=2, all_threads=False)
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    reseed()
    refused = numa.bind(spec.cpus, spec.memory_nodes)
    logs.setup(spec.env.get("XSERVE_LOG_LEVEL", "info"), "")
    if refused:  # the plan has asked beforehand; this is for a child that may do less than its parent
        log.log(logging.DEBUG if spec.rank else logging.WARNING, "not bound to its NUMA node (%s)", "; ".join(refused))
    if not will_fork(spec):
        ctx.watch_parent()
    return ctx


def adopt_environment(variables: Mapping[str, str]) -> None:
    """What a child learns only after its birth: the interface for collectives, above all. Before the libraries that
    read it are used; a library that was imported before has read its own already."""
    os.environ.update(variables)


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
