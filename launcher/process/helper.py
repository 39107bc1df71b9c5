"""The helper process: warm forkserver, and guard over the launch.

One process with two duties, because both want the same thing: to be small, single-threaded and always listening.

*Forkserver.* It imports the modules it is told (torch, the worker's own) and then forks children on request: a start
costs a fork instead of an import (QUEUE.md: 0.04 s against 4.4 s for eight workers). It must stay with one thread,
no socket and no device context; after the preload it says what of it is not safe to fork from (threads, an initialised
device), and then the supervisor falls back to spawn.

*Guard.* When the supervisor dies without a word (kill -9), its children die by the kernel's parent-death signal; what
they had started does not. The helper sees EOF on its channel, ends every session of the launch and every process with
its launch id, removes the run directory, and goes: within 2 s of the supervisor's death. It holds a copy of the run
directory's lock (descriptor ``lock``) until then, so that no new start takes the directory while it is being cleaned.

Wire: the supervisor sends `Fork` (with the child's end of a channel), `Guard`, `Unguard`, `Ping`, `Stop`; the helper
sends `StepReport`, `ReadyReport` (with its threads), `Pong`. EOF from the supervisor = its death.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
from types import FrameType
from typing import NoReturn

import msgspec

from launcher.clock import Deadline
from launcher.host.process_state import unsafe_to_fork
from launcher.process import kernel, procfs, sessions
from launcher.process.child import ChildContext, run_child
from launcher.process.reports import Fork, Guard, Ping, Pong, Step, Stop, Unguard

_CLEAN_UP = 1.5
"""Seconds for ending sessions: the guard outlives the supervisor by at most 2 s."""


class HelperSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of the helper's spec."""

    preload: tuple[str, ...] = ()
    """Modules to import; empty: guard only."""
    clean_up: str = ""
    """``module:function`` that removes the run directory of a dead supervisor; called with `run_dir`."""
    run_dir: str = ""
    launch_id: str = ""


class _Guard:
    """What must end with the supervisor."""

    def __init__(self, ctx: ChildContext, settings: HelperSettings) -> None:
        self._ctx = ctx
        self._run_dir = settings.run_dir
        self._sessions: dict[int, int] = {}
        # Imported now: at the time of need the disk may be full, the installation replaced.
        module, _, name = settings.clean_up.partition(":")
        self._clean_up = getattr(importlib.import_module(module), name) if module else None

    def note(self, message: object) -> None:
        if isinstance(message, Guard):
            self._sessions |= message.sessions
        elif isinstance(message, Unguard):
            # The leader is reaped, but what it started may live on in its session: keep the session while it does.
            self._sessions = {
                sid: start
                for sid, start in self._sessions.items()
                if sid != message.pid or sessions.find_members({sid: start}, "", {os.getpid()})
            }

    def end_all(self) -> None:
        """The supervisor is dead: end what is left of the launch and remove its directory."""
        self._drain()
        sessions.kill_members(self._sessions, self._ctx.spec.launch_id, Deadline.after(_CLEAN_UP))
        if self._clean_up is not None:
            self._clean_up(self._run_dir)

    def _drain(self) -> None:
        """Sessions that were announced but not yet read."""
        try:
            while (got := self._ctx.channel.recv_nowait()) is not None:
                self.note(got[0])
        except EOFError:
            return


def run(ctx: ChildContext) -> None:
    """The helper's target."""
    settings = msgspec.msgpack.decode(ctx.spec.payload, type=HelperSettings)
    guard = _Guard(ctx, settings)
    _preload(ctx, settings, guard)
    threads, unsafe = procfs.thread_names(), unsafe_to_fork()
    ctx.ready({"threads": threads, "unsafe_to_fork": unsafe, "preloaded": list(settings.preload)})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        try:
            message, fds = ctx.channel.recv(Deadline.after(None))
        except EOFError:
            guard.end_all()
            return
        if isinstance(message, Stop):
            return
        if isinstance(message, Ping):
            ctx.send(Pong(number=message.number))
        if isinstance(message, Fork):
            _fork(message, fds[0])
            os.close(fds[0])
        guard.note(message)


def _preload(ctx: ChildContext, settings: HelperSettings, guard: _Guard) -> None:
    """Import; meanwhile the channel is not read, so the supervisor's death comes as a signal."""

    def on_parent_death(_number: int, _frame: FrameType | None) -> NoReturn:
        # The one handler of ours that acts: an import can't be made to poll, and 2 s may pass before it ends. It
        # never returns into the interrupted code, so it can't break anything there.
        if os.getppid() != ctx.parent_pid:
            guard.end_all()
        os._exit(1)

    signal.signal(signal.SIGTERM, on_parent_death)
    kernel.set_parent_death_signal(signal.SIGTERM)
    if os.getppid() != ctx.parent_pid:
        on_parent_death(0, None)
    # Importing makes objects that stay: the collector would only walk them, again and again.
    gc.disable()
    for name in settings.preload:
        ctx.enter(Step.IMPORT, name)
        importlib.import_module(name)
    # And later, in every child: writing into each of them, it would make the child's own copy of all of this.
    gc.freeze()
    gc.enable()
    kernel.set_parent_death_signal(0)


def _fork(request: Fork, fd: int) -> None:
    """Fork twice: the go-between ends at once, so that the subreaper above (the supervisor) becomes the parent."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    between = os.fork()
    if between == 0:
        try:
            if os.fork() == 0:
                run_child(socket.socket(fileno=fd), request.parent_pid, arm=True, wait_for_parent=True)
        finally:
            os._exit(0)
    os.waitpid(between, 0)


def main() -> NoReturn:
    """Entry of the exec'ed helper."""
    fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    run_child(socket.socket(fileno=fd), parent_pid, arm=False, outlives_parent=True)
