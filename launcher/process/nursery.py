"""The children of this process: started all at once, heard on one wait, stopped within one budget, all reaped.

Used by the supervisor (API servers, engine cores) and by the multi-process executor (workers). It never blocks but in
`wait_*` and `stop`, always with a deadline, and it never signals a process but through the pidfd of its own child.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from launcher import clock, envs
from launcher.clock import Deadline
from launcher.errors import ChildFailedError, DeadlineError, Failure, ForkerLostError
from launcher.process import channel, procfs, spawn
from launcher.process.causes import describe_exit, first_cause
from launcher.process.child import ChildContext
from launcher.process.oom import OomWatch
from launcher.process.reports import (
    Birth,
    Born,
    ChildGone,
    ChildStarted,
    DownMessage,
    FailureReport,
    Goodbye,
    ReadyReport,
    Step,
    StepReport,
    UpMessage,
)
from launcher.process.spec import ChildMethod, ProcessSpec
from launcher.process.stop import StopSequence

log = logging.getLogger(__name__)

_COLLECT = 0.5
"""Seconds to wait after a first failure for others that may turn out to be its cause."""
_FORK_LIMIT = 5.0
"""Seconds for the helper to fork. It takes a millisecond; meanwhile nothing else is heard."""
_ORDER = list(Step)
_ENTRIES = {"forkserver": "launcher.process.helper", "guard": "launcher.process.helper"}
"""Modules with a `main` for exec'ed children that are not entered as all others are."""


class ExitStatus(NamedTuple):
    code: int | None
    signal: int | None


class Forker(Protocol):
    """Who forks for us with method forkserver."""

    def fork(self, sock: socket.socket) -> None: ...


class Child:
    """One child: its spec, pid, pidfd, its line to us, and what it has said of itself."""

    def __init__(self, spec: ProcessSpec, pid: int, line: channel.ParentChannel) -> None:
        self.spec = spec
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.start_time = procfs.start_time(pid)
        self.channel = line
        self.step = Step.SPAWNED
        self.since = clock.now()
        self.last_progress = self.since
        self.progress: StepReport | None = None
        self.ready_info: dict[str, Any] | None = None
        self.failure: Failure | None = None
        self.exit: ExitStatus | None = None
        self.wanted = False
        """True once it was told to go: its end is then no failure."""
        self.cut_short = False
        self.said_goodbye = False

    @property
    def title(self) -> str:
        return self.spec.title

    @property
    def is_ready(self) -> bool:
        return self.ready_info is not None

    @property
    def is_gone(self) -> bool:
        return self.exit is not None

    def signal(self, number: int) -> None:
        """Through the pidfd: it can only reach this child."""
        if self.exit is None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.pidfd, number)

    def note(self, message: UpMessage) -> None:
        """Take over what a message says of the child."""
        if isinstance(message, StepReport):
            if message.step != self.step:
                self.since = clock.now()
            self.step, self.progress, self.last_progress = message.step, message, clock.now()
        elif isinstance(message, ReadyReport):
            self.step, self.ready_info = Step.READY, message.info
            self.since = self.last_progress = clock.now()
        elif isinstance(message, FailureReport):
            self.failure = self.failure or message.failure
        elif isinstance(message, Goodbye):
            self.said_goodbye = True

    def close(self) -> None:
        self.channel.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Event(NamedTuple):
    """News of a child; `message` None: it is gone and reaped (`child.exit` says how)."""

    child: Child
    message: UpMessage | None


class Nursery:
    """See the module. `ctx`: where to report starts and ends of children, and whose ``child:*`` descriptors to pass."""

    def __init__(
        self,
        method: ChildMethod,
        *,
        ctx: ChildContext | None = None,
        forker: Forker | None = None,
        oom: OomWatch | None = None,
    ) -> None:
        self.method = method
        self.children: list[Child] = []
        self._ctx = ctx
        self._forker = forker
        self._poll = select.epoll()
        self._lines: dict[int, Child] = {}
        self._deaths: dict[int, Child] = {}
        self._oom = oom or OomWatch()

    # --- start

    def start_all(
        self,
        specs: Iterable[ProcessSpec],
        *,
        method: ChildMethod | None = None,
        descriptors: Mapping[str, Mapping[str, int]] | None = None,
    ) -> list[Child]:
        """Start every child before any is spoken to; none is waited for.

        `descriptors`: by title, what the child gets with its birth (borrowed: the caller closes them).
        Raises UsageError when the method is not safe here, HostError/OSError when the system refuses, ForkerLostError
        when the helper does; what was started by then is killed and reaped.
        """
        started: list[Child] = []
        try:
            for spec in specs:
                child = self._start(spec, method or self.method)
                self.children.append(child)
                started.append(child)
            for child in started:
                self._give_birth(child, dict((descriptors or {}).get(child.title, {})))
        except BaseException:
            self._end(started, 0)
            raise
        if self._ctx is not None:
            for child in started:
                self._ctx.send(ChildStarted(title=child.title, pid=child.pid, start_time=child.start_time))
            self._ctx.watch_parent()  # the forks are done: a thread can do no harm now
        return started

    def _start(self, spec: ProcessSpec, method: ChildMethod) -> Child:
        ours, theirs = channel.pair()
        with theirs:
            line = channel.parent_end(ours)
            try:
                if method == "fork":
                    pid = spawn.fork_child(theirs)
                elif method == "spawn":
                    module = _ENTRIES.get(spec.role, "launcher.process.exec_child")
                    pid = spawn.exec_child(theirs, envs.child_environment() | spec.env, module=module)
                else:
                    pid = self._ask_forker(theirs, line)
            except BaseException:
                line.close()
                raise
        child = Child(spec, pid, line)
        for fd, table in ((line.fileno(), self._lines), (child.pidfd, self._deaths)):
            table[fd] = child
            self._poll.register(fd, select.EPOLLIN)
        return child

    def _ask_forker(self, theirs: socket.socket, line: channel.ParentChannel) -> int:
        if self._forker is None:
            raise ValueError("method forkserver without a forkserver")
        self._forker.fork(theirs)
        theirs.close()  # or our own copy would hide the child's death during the wait
        try:
            message, _ = line.recv(Deadline.after(_FORK_LIMIT))
        except EOFError:
            raise ForkerLostError("the helper ended before it had forked") from None
        except DeadlineError:
            raise ForkerLostError(f"the helper has not forked within {_FORK_LIMIT:g} s") from None
        if not isinstance(message, Born):
            raise RuntimeError(f"expected the child's pid, got {message!r}")
        return message.pid

    def _give_birth(self, child: Child, descriptors: dict[str, int]) -> None:
        passed_on: list[int] = []
        if self._ctx is not None:
            for name in ("status", "output"):
                fd = self._ctx.descriptors.pop(f"child:{child.title}:{name}", None)
                if fd is not None:
                    descriptors[name] = fd
                    passed_on.append(fd)
        with contextlib.suppress(BrokenPipeError):  # dead already: its pidfd will tell
            child.channel.send(Birth(spec=child.spec, fd_names=tuple(descriptors)), list(descriptors.values()))
        for fd in passed_on:
            os.close(fd)

    # --- listen

    def fileno(self) -> int:
        """Readable when `pump` has something."""
        return self._poll.fileno()

    def pump(self) -> list[Event]:
        """What has happened, without blocking. A death comes after everything the child had said."""
        events: list[Event] = []
        for fd, _ in self._poll.poll(0):
            if (child := self._lines.get(fd)) is not None:
                events += self._read(child)
            elif (child := self._deaths.get(fd)) is not None:
                events += self._read(child)
                events += self._reap(child)
        return events

    def poll(self, timeout: float, extra_fds: Sequence[int] = ()) -> list[Event]:
        """Like `pump`, waiting at most `timeout` seconds for news or for one of `extra_fds` to be readable."""
        poll = select.poll()
        for fd in (self._poll.fileno(), *extra_fds):
            poll.register(fd, select.POLLIN)
        poll.poll(Deadline.after(timeout).remaining_ms())
        return self.pump()

    def _read(self, child: Child) -> list[Event]:
        events: list[Event] = []
        while child.channel.fileno() >= 0:
            try:
                got = child.channel.recv_nowait()
            except EOFError:
                self._forget_line(child)
                break
            if got is None:
                break
            message, fds = got
            for fd in fds:
                os.close(fd)  # no message of a child carries any
            child.note(message)
            events.append(Event(child, message))
        return events

    def _forget_line(self, child: Child) -> None:
        fd = child.channel.fileno()
        if fd >= 0:
            self._lines.pop(fd, None)
            with contextlib.suppress(OSError):
                self._poll.unregister(fd)
            child.channel.close()

    def _reap(self, child: Child) -> list[Event]:
        if child.exit is not None:
            return []
        info = os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOHANG)
        if info is None:
            return []
        if info.si_code == os.CLD_EXITED:
            child.exit = ExitStatus(info.si_status, None)
        else:
            child.exit = ExitStatus(None, info.si_status)
        child.step = Step.GONE
        child.since = clock.now()
        if child.failure is None and not child.wanted:
            child.failure = self._death(child, child.exit)
        self._forget_line(child)
        del self._deaths[child.pidfd]
        self._poll.unregister(child.pidfd)
        child.close()
        if self._ctx is not None:
            self._ctx.send(
                ChildGone(
                    title=child.title,
                    pid=child.pid,
                    exit_code=child.exit.code,
                    signal=child.exit.signal,
                    wanted=child.wanted,
                )
            )
        return [Event(child, None)]

    def _death(self, child: Child, status: ExitStatus) -> Failure:
        killed = status.signal == signal.SIGKILL
        return Failure(
            title=child.title,
            role=child.spec.role,
            kind="died",
            headline=describe_exit(*status, out_of_memory=killed and self._oom.struck(clock.now())),
            step=child.progress.step if child.progress else "",
            rank=child.spec.rank,
            node=child.spec.node,
            pid=child.pid,
            exit_code=status.code,
            signal=status.signal,
            at=clock.now(),
        )

    # --- wait

    def failures(self) -> list[Failure]:
        return [child.failure for child in self.children if child.failure is not None]

    def raise_if_failed(self) -> None:
        """ChildFailedError with the first cause, if a child failed; waits 0.5 s for what may have caused it."""
        if not self.failures():
            return
        deadline = Deadline.after(_COLLECT)
        while not deadline.expired and any(c.exit is None for c in self.children):
            self.poll(deadline.remaining())
        raise ChildFailedError(*first_cause(self.failures()))

    def wait_ready(self, timeout: float, on_tick: Callable[[], None] | None = None) -> None:
        """Wait until every child is READY; `timeout` counts from the last progress of any of them, in seconds.

        Raises ChildFailedError: at once when a child fails, or naming the child that is furthest behind when the
        time has passed.
        """
        self._wait(lambda child: child.is_ready, timeout, "ready", on_tick)

    def wait_step(self, step: Step, timeout: float, on_tick: Callable[[], None] | None = None) -> None:
        """Wait until every child has reached `step`."""
        place = _ORDER.index(step)
        self._wait(lambda child: _ORDER.index(child.step) >= place, timeout, step, on_tick)

    def _wait(
        self, done: Callable[[Child], bool], timeout: float, what: str, on_tick: Callable[[], None] | None
    ) -> None:
        begin = clock.now()
        while True:
            self.pump()
            self.raise_if_failed()
            behind = [child for child in self.children if not done(child)]
            if not behind:
                return
            last = max([begin, *(child.last_progress for child in self.children)])
            left = last + timeout - clock.now()
            if left <= 0:
                raise ChildFailedError(self.too_slow(behind, timeout, what))
            self.poll(min(left, 1.0))
            if on_tick is not None:
                on_tick()

    def too_slow(self, behind: list[Child], timeout: float, what: str) -> Failure:
        """The failure of the child that is furthest behind of those that are not `what` after `timeout` seconds."""
        child = min(behind, key=lambda c: (_ORDER.index(c.step), c.last_progress))
        age = clock.now() - child.last_progress
        others = ", ".join(c.title for c in behind if c is not child)
        failure = Failure(
            title=child.title,
            role=child.spec.role,
            kind="timeout",
            headline=(
                f"not {what}: no progress for {age:.0f} s in step '{child.step}' (--ready-timeout {timeout:g})"
                + (f"; also waiting: {others}" if others else "")
            ),
            step=child.step,
            rank=child.spec.rank,
            node=child.spec.node,
            pid=child.pid,
            at=clock.now(),
        )
        child.failure = failure
        return failure

    def forget(self, child: Child) -> None:
        """It is gone and reaped, and its failure has been dealt with."""
        self.children.remove(child)

    # --- speak and stop

    def send(self, child: Child, message: DownMessage, fds: Sequence[int] = ()) -> None:
        """Send; a child that is gone is no error here: its death is reported by `poll`."""
        with contextlib.suppress(OSError, DeadlineError):
            child.channel.send(message, fds, Deadline.after(5))

    def send_nowait(self, child: Child, message: DownMessage) -> None:
        """Send if there is room; a child that does not read must not hold its parent up."""
        with contextlib.suppress(OSError, DeadlineError):
            child.channel.send(message, deadline=Deadline.after(0))

    def stop(self, budget: float) -> list[Child]:
        """Stop all within `budget` seconds and reap them; returns those that had to be killed.

        See `StopSequence`.
        """
        return self._end(self.children, budget)

    def _end(self, children: Sequence[Child], budget: float) -> list[Child]:
        sequence = StopSequence(children, budget, self.send)
        while not sequence.done:
            self.poll(sequence.advance())
        return sequence.cut_short

    def close(self) -> None:
        """Kill and reap whatever is left; release every descriptor. Idempotent."""
        if self._poll.closed:
            return
        self.stop(0)
        for child in self.children:
            child.close()
        self._poll.close()
