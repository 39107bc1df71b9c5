"""The supervisor: one thread, one wait for everything, a table for what is wanted (`lifecycle`).

It owns the tree: it starts the helper, the API servers and the engine cores, holds every status and output pipe (also
those of the workers, which are the cores' children), hears the control socket and the signals, and stops all of it
within one budget. It imports no torch and no zmq, and it decides nothing in a signal handler.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from launcher import clock
from launcher.clock import Deadline
from launcher.errors import Failure
from launcher.process import channel, kernel, procfs, sessions
from launcher.process.causes import describe_exit, first_cause
from launcher.process.helper import HelperSettings
from launcher.process.lifecycle import Event, State, next_cell
from launcher.process.nursery import Child, ExitStatus, Nursery
from launcher.process.oom import oom_kills
from launcher.process.reports import (
    ChildGone,
    ChildStarted,
    DownMessage,
    Drain,
    Drained,
    Fork,
    Guard,
    ReadyReport,
    Step,
    StepReport,
    Stop,
    TreeState,
    Unguard,
    UpMessage,
)
from launcher.process.sd_notify import Notifier
from launcher.process.signals import SignalPipe
from launcher.process.spec import ChildMethod, ProcessSpec
from launcher.process.stop import StopSequence
from launcher.process.tree import Record, Tree

ROOT = "Supervisor"
_COLLECT = 0.5
"""Seconds from the first failure to the verdict: its cause may be reported after it."""
_FAIL_BUDGET = 1.0
"""Seconds for stopping a tree that has failed: what must go is gone within 2 s of the death."""
_FORCE_SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


class Output(Protocol):
    """Takes what children print."""

    def feed(self, title: str, pid: int, data: bytes) -> None: ...
    def finish(self, title: str, pid: int) -> None: ...
    def tail(self, title: str) -> tuple[str, ...]: ...


class Screen(Protocol):
    """Shows the start."""

    def on_step(self, title: str, pid: int, report: StepReport) -> None: ...
    def on_ready(self, title: str, pid: int) -> None: ...
    def note(self, line: str) -> None: ...
    def close(self) -> None: ...


class Guest(Protocol):
    """Someone else who listens in our loop (the control socket)."""

    def filenos(self) -> dict[int, int]: ...
    def on_event(self, fd: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class SupervisorSettings:
    method: ChildMethod
    helper: HelperSettings
    launch_id: str
    instance: str
    ready_timeout: float
    """Seconds without progress."""
    shutdown_timeout: float
    """Seconds for a whole stop."""
    environment: Mapping[str, str]
    """For the helper's exec."""
    lock_fd: int | None = None
    ready_line: str = "ready"


@dataclass
class Outcome:
    """How a launch ended."""

    exit_code: int = 0
    cause: Failure | None = None
    follow_ons: tuple[Failure, ...] = ()
    cut_requests: int = 0
    cut_short: list[str] = field(default_factory=list)
    """Titles of processes that had to be killed."""


class Supervisor:
    """See the module. Create it in the process's main thread; `run` once."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        settings: SupervisorSettings,
        *,
        http: socket.socket | None,
        output: Output,
        screen: Screen,
        notifier: Notifier,
    ) -> None:
        self.state = State.STARTING
        self.since = clock.now()
        self.tree = Tree(specs, ROOT)
        self.guests: list[Guest] = []
        self._specs = list(specs)
        self._settings = settings
        self._http = http
        self._output = output
        self._screen = screen
        self._notifier = notifier
        self._signals = SignalPipe([*_FORCE_SIGNALS, signal.SIGCHLD, signal.SIGQUIT])
        if settings.environment.get("XSERVE_HUP_IGNORED"):
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._nursery = Nursery(settings.method, forker=self)
        self._helpers = Nursery("spawn")
        self._status: dict[int, tuple[str, channel.ParentChannel]] = {}
        self._outputs: dict[int, str] = {}
        self._outcome = Outcome()
        self._stop_code = 0
        """The exit code if the stop under way ends as it should."""
        self._verdict = Deadline.after(None)
        self._drain = Deadline.after(None)
        self._stop_deadline = Deadline.after(None)
        self._sequence: StopSequence[Child] | None = None
        self._drained: set[str] = set()
        self._phase = ""
        self._oom_before = oom_kills()

    # --- the loop

    def run(self) -> Outcome:
        """Start, serve, stop; returns when nothing is left. Never raises for a child's failure."""
        kernel.become_subreaper()
        try:
            self._begin()
            while self.state is not State.GONE:
                self._wait()
                self._timers()
        finally:
            self._end()
        return self._outcome

    def _wait(self) -> None:
        poll = select.poll()
        for fd in (self._nursery.fileno(), self._helpers.fileno(), self._signals.fileno()):
            poll.register(fd, select.POLLIN)
        for fd in (*self._status, *self._outputs):
            poll.register(fd, select.POLLIN)
        guests = {fd: (guest, events) for guest in self.guests for fd, events in guest.filenos().items()}
        for fd, (_, events) in guests.items():
            poll.register(fd, events)
        ready = [fd for fd, _ in poll.poll(self._next_timer())]
        for fd in ready:
            if fd in self._outputs:
                self._read_output(fd)
            elif fd in self._status:
                self._read_status(fd)
            elif fd in guests:
                guests[fd][0].on_event(fd)
        self._pump()
        for number in self._signals.read():
            self._on_signal(number)
        self._reap_strangers()

    def _next_timer(self) -> int:
        """Milliseconds until something is due; None-like -1 when nothing is."""
        waits = [self._verdict.remaining(), self._drain.remaining()]
        if self._sequence is not None:
            waits.append(self._sequence.advance())
        if self.state is State.STARTING:
            waits.append(1.0)
        if any(len(guest.filenos()) > 1 for guest in self.guests):
            waits.append(1.0)  # a client that must be dropped when its time is over
        soonest = min(waits)
        return -1 if soonest == float("inf") else Deadline.after(soonest).remaining_ms()

    def _timers(self) -> None:
        if self.state is State.STARTING:
            self._check_start()
        if self._verdict.expired:
            self._verdict = Deadline.after(None)
            self._judge()
        if self._drain.expired:
            self._drain = Deadline.after(None)
            self._handle(Event.DRAINED)
        if self._sequence is not None and self._sequence.done:
            self._handle(Event.ALL_GONE)

    # --- start

    def _begin(self) -> None:
        helper_spec = ProcessSpec(
            title="Forkserver" if self._settings.method == "forkserver" else "Guard",
            comm="xs:forksrv" if self._settings.method == "forkserver" else "xs:guard",
            role="forkserver" if self._settings.method == "forkserver" else "guard",
            target="launcher.process.helper:run",
            env=dict(self._settings.environment),
            payload=msgspec.msgpack.encode(self._settings.helper),
            instance=self._settings.instance,
            launch_id=self._settings.launch_id,
        )
        self._start_helper(helper_spec)
        self._start([s for s in self._specs if s.role == "api_server"], "spawn")
        if self._settings.method != "forkserver":
            self._start_cores(self._settings.method)

    def _start_helper(self, spec: ProcessSpec) -> None:
        descriptors = {} if self._settings.lock_fd is None else {"lock": self._settings.lock_fd}
        read, write = os.pipe2(os.O_CLOEXEC)
        self._outputs[read] = spec.title
        os.set_blocking(read, False)
        try:
            self._helpers.start_all([spec], descriptors={spec.title: descriptors | {"output": write}})
        finally:
            os.close(write)
        self._guard(self.tree.sessions())

    def _start_cores(self, method: ChildMethod) -> None:
        specs = [spec for spec in self._specs if spec.role != "api_server"]
        if method == "spawn":
            specs = [msgspec.structs.replace(spec, child_method="spawn") for spec in specs]
        self._start(specs, method)

    def _start(self, specs: Sequence[ProcessSpec], method: ChildMethod) -> None:
        """Start children with their pipes; the ends that travel are closed here once they have."""
        descriptors: dict[str, dict[str, int]] = {}
        ours: list[int] = []
        try:
            for spec in specs:
                mine = descriptors.setdefault(spec.title, {})
                mine["output"] = self._output_pipe(spec.title, ours)
                for child in spec.children:
                    mine[f"child:{child.title}:output"] = self._output_pipe(child.title, ours)
                    mine[f"child:{child.title}:status"] = self._status_pipe(child.title, ours)
                if spec.role == "api_server" and self._http is not None:
                    mine["http"] = self._http.fileno()
            children = self._nursery.start_all(specs, method=method, descriptors=descriptors)
        finally:
            for fd in ours:
                os.close(fd)
        for child in children:
            self.tree.started(child.title, child.pid, child.start_time)
        self._guard({child.pid: child.start_time for child in children})

    def _output_pipe(self, title: str, ours: list[int]) -> int:
        read, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read, False)
        self._outputs[read] = title
        ours.append(write)
        return write

    def _status_pipe(self, title: str, ours: list[int]) -> int:
        parent, child = channel.pair()
        line = channel.parent_end(parent)
        self._status[line.fileno()] = (title, line)
        fd = child.detach()
        ours.append(fd)
        return fd

    def fork(self, sock: socket.socket) -> None:
        """`nursery.Forker`: have the warm helper fork."""
        self._tell_helper(Fork(parent_pid=os.getpid()), [sock.fileno()])

    def _guard(self, found: Mapping[int, int]) -> None:
        self._tell_helper(Guard(sessions=dict(found)))

    def _tell_helper(self, message: DownMessage, fds: Sequence[int] = ()) -> None:
        for helper in self._helpers.children:
            self._helpers.send(helper, message, fds)

    def _check_start(self) -> None:
        """Limits of the start: no progress of anybody for `ready_timeout` seconds."""
        behind = self.tree.behind()
        if not behind:
            return
        last = max(record.last_progress for record in self.tree)
        # The engine core has the same limit and more to say: it goes first.
        if clock.now() - last > self._settings.ready_timeout + 2 and not self._verdict_due:
            record = behind[0]
            age = clock.now() - record.last_progress
            record.failure = self._failure_of(
                record,
                "timeout",
                f"not ready: no progress for {age:.0f} s in step '{record.step}'"
                f" (--ready-timeout {self._settings.ready_timeout:g})",
            )
            self._failed()

    # --- listen

    def _pump(self) -> None:
        for child, message in self._helpers.pump():
            self._on_helper(child, message)
        for child, message in self._nursery.pump():
            if message is None:
                self._on_gone(child)
            else:
                self._on_report(child.title, message)

    def _on_helper(self, helper: Child, message: UpMessage | None) -> None:
        if isinstance(message, StepReport):
            self._screen.on_step(helper.title, helper.pid, message)
        elif isinstance(message, ReadyReport):
            self._helper_ready(helper, message.info)
        elif message is None and helper.failure is not None and self.state is State.STARTING:
            # The preload failed: so would the workers' own import. This is the cause.
            failure = helper.failure
            if failure.kind == "died":
                failure = msgspec.structs.replace(failure, last_output=self._output.tail(helper.title))
            self._helper_failure = failure
            self._failed()

    _helper_failure: Failure | None = None

    def _helper_ready(self, helper: Child, info: dict[str, Any]) -> None:
        self._screen.on_ready(helper.title, helper.pid)
        if self._settings.method != "forkserver" or self.state is not State.STARTING:
            return
        threads = info.get("threads", [])
        if len(threads) > 1:
            self._screen.note(
                f"start method spawn instead of forkserver: the preload left {len(threads)} threads"
                f" ({', '.join(threads[1:6])})"
            )
            self._start_cores("spawn")
        else:
            self._start_cores("forkserver")

    def _read_status(self, fd: int) -> None:
        title, line = self._status[fd]
        while True:
            try:
                got = line.recv_nowait()
            except EOFError:
                del self._status[fd]
                line.close()
                record = self.tree[title]
                if record.pid and not record.goodbye and not self._stopping:
                    self._failed()  # how it died is for its parent, or for our reaping, to tell
                return
            if got is None:
                return
            for extra in got[1]:
                os.close(extra)
            self._on_report(title, got[0])

    def _on_report(self, title: str, message: UpMessage) -> None:
        record = self.tree[title]
        changed = self.tree.note(title, message)
        if isinstance(message, StepReport):
            self._screen.on_step(title, record.pid, message)
            self._notifier.extend_timeout(self._settings.ready_timeout + 10)
        elif isinstance(message, ReadyReport):
            self._screen.on_ready(title, record.pid)
        elif isinstance(message, ChildStarted):
            self._guard({message.pid: message.start_time})
        elif isinstance(message, ChildGone):
            self._worker_gone(message)
        elif isinstance(message, Drained):
            self._drained.add(title)
            self._outcome.cut_requests += message.cut
            if self._drained >= {c.title for c in self._nursery.children if c.spec.role == "api_server"}:
                self._drain = Deadline.after(0)
        if record.failure is not None and not self._stopping:
            self._failed()
        if changed:
            self._announce_phase()
            if isinstance(message, ReadyReport) and all(self.tree[spec.title].ready for spec in self._specs):
                self._handle(Event.ALL_READY)

    def _worker_gone(self, message: ChildGone) -> None:
        self._tell_helper(Unguard(pid=message.pid))
        record = self.tree[message.title]
        if message.wanted or self._stopping or record.failure is not None:
            if message.signal == signal.SIGKILL and message.wanted:
                self._outcome.cut_short.append(message.title)
            return
        self._record_death(record, ExitStatus(message.exit_code, message.signal))

    def _on_gone(self, child: Child) -> None:
        self._tell_helper(Unguard(pid=child.pid))
        self.tree.gone(child.title, wanted=child.wanted)
        if not child.wanted and child.exit is not None:
            record = self.tree[child.title]
            if record.failure is None:
                self._record_death(record, child.exit)
            else:
                self._failed()

    def _record_death(self, record: Record, status: ExitStatus) -> None:
        killed = status.signal == signal.SIGKILL
        headline = describe_exit(*status, out_of_memory=killed and oom_kills() > self._oom_before)
        failure = self._failure_of(record, "died", headline)
        record.failure = msgspec.structs.replace(failure, exit_code=status.code, signal=status.signal)
        self._failed()

    def _failure_of(self, record: Record, kind: Any, headline: str) -> Failure:
        step = record.progress.step if record.progress and not record.ready else record.step
        if step is Step.GONE:
            step = Step.SERVING if record.ready else Step.SPAWNED
        return Failure(
            title=record.title,
            role=record.spec.role,
            kind=kind,
            headline=headline,
            step=step,
            rank=record.spec.rank,
            node=record.spec.node,
            pid=record.pid or None,
            at=clock.now(),
        )

    def _read_output(self, fd: int) -> None:
        title = self._outputs[fd]
        record = self.tree.records.get(title)
        pid = record.pid if record else (self._helpers.children[-1].pid if self._helpers.children else 0)
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        if data:
            self._output.feed(title, pid, data)
            return
        del self._outputs[fd]
        os.close(fd)
        self._output.finish(title, pid)

    def _on_signal(self, number: signal.Signals) -> None:
        if number in _FORCE_SIGNALS:
            self.ask_to_stop(number)

    def _reap_strangers(self) -> None:
        """Orphans of the tree (we are their subreaper), and anybody's where we are PID 1: reap, never judge by them.

        Our own children are looked at without reaping (WNOWAIT) and left to their nursery.
        """
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if info is None:
                return
            if any(c.pid == info.si_pid and c.exit is None for c in (*self._nursery.children, *self._helpers.children)):
                return  # pumped in the next round, which comes at once
            os.waitpid(info.si_pid, 0)
            record = self.tree.by_pid(info.si_pid)
            if record is not None and not record.gone:
                exited = info.si_code == os.CLD_EXITED
                status = ExitStatus(info.si_status, None) if exited else ExitStatus(None, info.si_status)
                self.tree.gone(record.title, wanted=self._stopping)
                if record.failure is None and not self._stopping:
                    self._record_death(record, status)

    # --- what is wanted

    @property
    def _stopping(self) -> bool:
        return self.state in (State.STOPPING, State.GONE)

    @property
    def _verdict_due(self) -> bool:
        return self._verdict.at != float("inf")

    def ask_to_stop(self, number: signal.Signals | None = None, budget: float | None = None) -> None:
        """A stop was asked for, by a signal or (None) over the control socket. The second one forces."""
        if number is not None:
            if self.state in (State.STARTING, State.DRAINING, State.STOPPING):
                self._stop_code = self._stop_code or (0 if self._outcome.cause else _FORCE_SIGNALS[number])
            self._screen.note(f"received {number.name}: {self._stop_words()}")
        if self._stop_deadline.at == float("inf"):
            self._stop_deadline = Deadline.after(self._settings.shutdown_timeout if budget is None else budget)
        self._handle(Event.STOP_ASKED)

    def _stop_words(self) -> str:
        if self.state is State.STARTING:
            return "stopping before ready"
        if self.state is State.READY:
            return f"finishing running requests, then stopping (at most {self._settings.shutdown_timeout:g} s)"
        return "killing what is left"

    def _failed(self) -> None:
        """A failure is known: the verdict comes shortly, when its cause has had time to be reported."""
        if not self._verdict_due and not self._stopping:
            self._verdict = Deadline.after(_COLLECT)

    def _judge(self) -> None:
        failures = self.tree.failures()
        if self._helper_failure is not None:
            failures.append(self._helper_failure)
        if not failures:  # a pipe closed, and nobody could say why
            lost = next(r for r in self.tree if (r.pid and not r.ready) or r.gone)
            failures = [self._failure_of(lost, "died", "closed its status pipe without a word")]
        cause, follow_ons = first_cause(failures)
        if cause.kind == "died":
            cause = msgspec.structs.replace(cause, last_output=self._output.tail(cause.title))
        self._outcome.cause, self._outcome.follow_ons = cause, follow_ons
        self._handle(Event.FAILED)

    def _handle(self, event: Event) -> None:
        old = self.state
        self.state, action = next_cell(self.state, event)
        if self.state is not old:
            self.since = clock.now()
        getattr(self, f"_do_{action}")()

    def _do_nothing(self) -> None:
        pass

    def _do_announce(self) -> None:
        self._announce_phase()
        self._notifier.ready()
        self._screen.close()
        self._screen.note(self._settings.ready_line)

    def _do_interrupt(self) -> None:
        self._notifier.stopping()
        self._stop(min(self._stop_deadline.remaining(), 2.0))

    def _do_drain(self) -> None:
        self._notifier.stopping()
        left = self._stop_deadline.remaining()
        # What is left after the drain must do for ending the processes in order.
        budget = max(0.0, left - min(5.0, left / 4))
        self._drain = Deadline.after(budget + 0.5 if budget else 0)
        self._tell_api(TreeState(state=self.state))
        self._tell_api(Drain(budget=budget))

    def _do_stop(self) -> None:
        self._stop(self._stop_deadline.remaining())

    def _do_fail(self) -> None:
        self._notifier.stopping()
        self._tell_api(TreeState(state="failed", phase=self._outcome.cause.headline if self._outcome.cause else ""))
        self._stop(min(self._settings.shutdown_timeout, _FAIL_BUDGET))

    def _do_force(self) -> None:
        if self._sequence is None:
            self._stop(0)
        self._sequence_or_fail().force()

    def _do_leave(self) -> None:
        outcome = self._outcome
        sequence = self._sequence_or_fail()
        outcome.cut_short += [child.title for child in sequence.cut_short]
        outcome.exit_code = self._stop_code
        if outcome.cause is not None:
            outcome.exit_code = 2 if outcome.cause.permanent else 1

    def _sequence_or_fail(self) -> StopSequence[Child]:
        assert self._sequence is not None
        return self._sequence

    def _stop(self, budget: float) -> None:
        self._drain = self._verdict = Deadline.after(None)
        self._screen.close()
        if self._sequence is None:
            self._sequence = StopSequence(self._nursery.children, budget, self._nursery.send)

    def _tell_api(self, message: DownMessage) -> None:
        for child in self._nursery.children:
            if child.spec.role == "api_server" and not child.is_gone:
                self._nursery.send(child, message)

    def _announce_phase(self) -> None:
        phase = self.tree.phase() if self.state is State.STARTING else str(self.state)
        if phase != self._phase:
            self._phase = phase
            self._notifier.status(phase)
            self._tell_api(TreeState(state=self.state, phase=phase))

    # --- end

    def _end(self) -> None:
        """Whatever happened: nothing of the launch may be left when this returns."""
        self._nursery.close()
        sessions.kill_members(self.tree.sessions(), self._settings.launch_id, Deadline.after(1.5), self._helper_pids())
        self._flush_outputs()
        for helper in self._helpers.children:
            self._helpers.send(helper, Stop(budget=1))
        self._helpers.stop(1.0)
        self._helpers.close()
        self._reap_all()
        for fd in self._outputs:
            os.close(fd)
        for _, line in self._status.values():
            line.close()
        self._outputs.clear()
        self._status.clear()
        self._signals.close()

    def _helper_pids(self) -> set[int]:
        return {child.pid for child in self._helpers.children}

    def _flush_outputs(self) -> None:
        """The last lines of the dead are still in their pipes."""
        for fd in list(self._outputs):
            with contextlib.suppress(OSError):
                for _ in range(64):
                    if fd not in self._outputs:
                        break
                    before = select.select([fd], [], [], 0)[0]
                    if not before:
                        break
                    self._read_output(fd)

    def _reap_all(self) -> None:
        deadline = Deadline.after(1)
        while not deadline.expired:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    return
            except ChildProcessError:
                return


__all__ = ["Guest", "Outcome", "Output", "Screen", "Supervisor", "SupervisorSettings", "procfs"]
