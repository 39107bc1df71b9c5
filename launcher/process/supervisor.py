"""The supervisor: one thread, one wait for everything, a table for what is wanted (`lifecycle`).

It owns the tree: it starts the helper, the API servers and the engine cores, holds every status and output line (also
those of the workers, which are the cores' children), hears the control socket and the signals, and stops all of it
within one budget. It imports no torch and no zmq, and it decides nothing in a signal handler.
"""

from __future__ import annotations

import faulthandler
import math
import os
import select
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from launcher import clock
from launcher.clock import Deadline
from launcher.errors import Failure
from launcher.process import kernel, procfs, sessions
from launcher.process.child import STACK_SIGNAL
from launcher.process.helper import HelperSettings
from launcher.process.helper_client import Helper, helper_spec
from launcher.process.lifecycle import Action, Event, State, next_cell
from launcher.process.nursery import Child, ExitStatus, Nursery
from launcher.process.reports import (
    ChildGone,
    ChildStarted,
    DownMessage,
    Drain,
    Drained,
    Hang,
    Ping,
    Pong,
    ReadyReport,
    Step,
    StepReport,
    TreeState,
    UpMessage,
)
from launcher.process.restart import Decision, Kind, RestartSettings
from launcher.process.sd_notify import Notifier
from launcher.process.signals import SignalPipe
from launcher.process.spec import ChildMethod, ProcessSpec
from launcher.process.start_lines import StartLines
from launcher.process.stop import StopSequence
from launcher.process.tree import Tree
from launcher.process.units import Phase, Unit, Units
from launcher.process.verdict import Verdict
from launcher.process.watchdog import Watchdog
from launcher.process.wires import Output, Wires

ROOT = "Supervisor"
_FAIL_BUDGET = 1.0
"""Seconds for stopping a tree that has failed: what must go is gone within 2 s of the death."""
_INTERRUPT_BUDGET = 2.0
"""Seconds for stopping a start: nothing is being served yet."""
_STOP_SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
"""And the exit code when it interrupts a start or forces a stop."""
_NEVER = Deadline.after(None)


class Screen(Protocol):
    """Shows the start."""

    def on_step(self, title: str, pid: int, report: StepReport) -> None: ...
    def on_ready(self, title: str, pid: int) -> None: ...
    def note(self, line: str) -> None: ...
    def close(self) -> None: ...


class Guest(Protocol):
    """Someone else who listens in our loop (the control socket, the writer to stderr)."""

    def filenos(self) -> dict[int, int]: ...
    def on_event(self, fd: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class SupervisorSettings:
    method: ChildMethod
    """How engine cores are started."""
    helper: HelperSettings
    launch_id: str
    ready_timeout: float
    """Seconds without progress."""
    shutdown_timeout: float
    """Seconds for a whole stop."""
    environment: Mapping[str, str]
    """For the helper's exec."""
    watchdog_timeout: float = 0.0
    """Seconds without an answer after which a process counts as hung; 0: never."""
    restart: RestartSettings = field(default_factory=RestartSettings)
    renew: Callable[[ProcessSpec, int], ProcessSpec] = lambda spec, _generation: spec
    """A process's spec for its n-th life (0 is the first)."""
    story: Callable[[Failure, tuple[Failure, ...]], str] = lambda cause, _others: cause.headline
    """A failure for a reader of the log."""
    keep: Callable[[Failure, tuple[Failure, ...], Tree], str] = lambda _cause, _others, _tree: ""
    """Keep what is known of a failure; the line to say where."""
    lock_fd: int | None = None
    ready_line: str = "ready"


@dataclass
class Outcome:
    """How a launch ended."""

    exit_code: int = 0
    cause: Failure | None = None
    follow_ons: tuple[Failure, ...] = ()
    spent: bool = False
    """The cause would have been followed by a restart, but there had been too many."""
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
        self._settings = settings
        self._units = Units(specs, settings.restart, settings.launch_id)
        self._http = http
        self._screen = screen
        self._notifier = notifier
        self._outcome = Outcome()
        self._verdict = Verdict(self.tree, output.tail)
        self._watchdog = Watchdog(settings.watchdog_timeout)
        self._signals = SignalPipe(_stop_signals() | {signal.SIGCHLD, STACK_SIGNAL})
        self._wires = Wires(output, self._pid_of)
        spec = helper_spec(settings.method, settings.helper, settings.environment)
        self._helper = Helper(spec, self._wires, settings.lock_fd)
        self._helper.on_step = screen.on_step
        self._helper.on_ready = self._helper_ready
        self._nursery = Nursery(settings.method, forker=self._helper)
        self._sequence: StopSequence[Child] | None = None
        self._failed_units: list[tuple[Unit, Decision]] = []
        self._been_ready = False
        self._spawn_instead = False
        """The helper cannot be forked from."""
        self._stop_code = 0
        """The exit code if the stop under way ends as it should."""
        self._stop_by = _NEVER
        self._drain_by = _NEVER
        self._drained: set[str] = set()
        self._start_lines = StartLines()
        self._told = TreeState(state="")

    def _pid_of(self, title: str) -> int:
        record = self.tree.records.get(title)
        return record.pid if record else self._helper.pid

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
        for fd in (self._nursery.fileno(), self._helper.fileno(), self._signals.fileno(), *self._wires.fds()):
            poll.register(fd, select.POLLIN)
        guests = {fd: (guest, events) for guest in self.guests for fd, events in guest.filenos().items()}
        for fd, (_, events) in guests.items():
            poll.register(fd, events)
        for fd, _ in poll.poll(self._until_next_timer()):
            if fd in guests:
                guests[fd][0].on_event(fd)
            for title, message in self._wires.read(fd):
                self._on_line(title, message)
        self._helper.pump()
        if self._helper.failure is not None and self.state is State.STARTING and not self._verdict.due:
            self._verdict.outside(self._helper.failure)
        for child, message in self._nursery.pump():
            if message is None:
                self._on_gone(child)
            else:
                self._on_report(child.title, message)
        for number in self._signals.read():
            if number in _STOP_SIGNALS:
                self.ask_to_stop(number)
            elif number == STACK_SIGNAL:
                self.show_stacks("asked by SIGQUIT")
        self._reap_strangers()

    def _until_next_timer(self) -> int | None:
        """Milliseconds; None: nothing is due."""
        waits = [self._verdict.deadline.remaining(), self._drain_by.remaining()]
        waits += [sequence.advance() for sequence in self._sequences()]
        if not self._stopping:
            waits.append(self._watchdog.until_turn(clock.now()))
            soonest = self._units.soonest_start()
            # A unit that is due and not started waits for the helper: its word wakes us.
            waits += [soonest] if soonest > 0 else []
            waits += [unit.reap_by.remaining() for unit in self._units if unit.phase is Phase.ENDING]
        if self._is_coming or any(len(guest.filenos()) > 1 for guest in self.guests):
            waits.append(1.0)  # to look at the start's limit; to drop control clients that are over time
        soonest = min(waits)
        return None if math.isinf(soonest) else Deadline.after(soonest).remaining_ms()

    def _timers(self) -> None:
        if self._is_coming:
            self._check_start()
        else:
            self._start_lines.reset()
        if not self._stopping:
            self._watch()
        if self._verdict.deadline.expired:
            self._on_verdict()
        if not self._stopping and self.state is not State.DRAINING:
            self._turn_units()
        if self._drain_by.expired:
            self._drain_by = _NEVER
            self._handle(Event.DRAINED)
        if self._sequence is not None and self._sequence.done:
            self._handle(Event.ALL_GONE)

    # --- start

    def _begin(self) -> None:
        self._helper.start()
        self._turn_units()

    @property
    def _method(self) -> ChildMethod:
        """How engine cores are started as things stand."""
        spawn = self._spawn_instead or (self._settings.method == "forkserver" and not self._helper.warm)
        return "spawn" if spawn else self._settings.method

    def _turn_units(self) -> None:
        """Finish what ends, start what is due."""
        for unit in self._units:
            if unit.phase is Phase.ENDING:
                self._finish(unit)
            if unit.is_due(helper_ready=self._helper.is_ready, method=self._method):
                self._start(unit)

    def _start(self, unit: Unit) -> None:
        """Start a unit with its lines; the ends that travel are closed here once they have."""
        method = unit.method(self._method)
        spec = msgspec.structs.replace(unit.spec, child_method="spawn") if method == "spawn" else unit.spec
        descriptors, ours = self._wires.lay(spec)
        if spec.role == "api_server" and self._http is not None:
            descriptors["http"] = self._http.fileno()
        try:
            [child] = self._nursery.start_all([spec], method=method, descriptors={spec.title: descriptors})
        finally:
            for fd in ours:
                os.close(fd)
        unit.started(child)
        self.tree.started(child.title, child.pid, child.start_time)
        self._helper.guard({child.pid: child.start_time})
        if spec.role == "api_server":
            self._nursery.send(child, self._told)

    def _finish(self, unit: Unit) -> None:
        """Once the old life is reaped to the last process, make room for the next."""
        records = [self.tree[title] for title in unit.titles]
        reaped = all(record.gone or not record.pid for record in records)
        if not (unit.sequence is None or unit.sequence.done) or not (reaped or unit.reap_by.expired):
            return
        found = {record.pid: record.start_time for record in records if record.pid}
        sessions.kill_members(found, unit.mark, Deadline.after(1), {self._helper.pid})
        self._wires.drop(unit.titles)
        for record in records:
            self._helper.unguard(record.pid)
        if unit.child is not None:
            self._nursery.forget(unit.child)
        unit.next_life(self._settings.renew)
        self.tree.renew(unit.spec, ROOT)

    def _helper_ready(self, info: dict[str, Any]) -> None:
        self._screen.on_ready(self._helper.title, self._helper.pid)
        if self._method == "forkserver" and (unsafe := info.get("unsafe_to_fork")):
            self._screen.note(f"spawn instead of forkserver: after the preload {'; '.join(unsafe)}")
            self._spawn_instead = True

    def _check_start(self) -> None:
        """The start's limit: no progress of anybody for `ready_timeout` seconds."""
        running = set[str]().union(*(unit.titles for unit in self._units if unit.phase is Phase.RUNNING))
        behind = [record for record in self.tree.behind() if record.title in running]
        if not behind:
            return
        if line := self._start_lines.due([record for record in self.tree if record.title in running]):
            self._screen.note(line)
        last = max(record.last_progress for record in self.tree if record.title in running)
        # The engine core has a limit too, a few seconds later: if it went first, its workers' stacks would go with it.
        if clock.now() - last > self._settings.ready_timeout and not self._verdict.due:
            self.show_stacks(f"no progress for {self._settings.ready_timeout:g} s")
            slowest = self.tree.slowest()
            guilty = slowest if slowest is not None and slowest in behind else behind[0]
            self._verdict.too_slow(guilty, self._settings.ready_timeout)

    def _watch(self) -> None:
        """Ping who serves; one that has not answered for the limit is hung."""
        ready = [c for c in self._nursery.children if c.is_ready and not c.is_gone and not self._is_expected(c.title)]
        turn = self._watchdog.turn(clock.now(), [child.title for child in ready])
        if turn is None:
            return
        for child in ready:
            self._nursery.send_nowait(child, Ping(number=self._watchdog.number))
        if turn.late and not self._verdict.due:
            self.show_stacks("no answer from " + ", ".join(title for title, _ in turn.late))
            for title, age in turn.late:
                self._verdict.silent(self.tree[title], age, self._watchdog.limit)

    def show_stacks(self, why: str) -> None:
        """Have every process print the Python stack of each of its threads; all of them go on.

        By a signal that each has set up at birth (faulthandler): no tool, no privilege, no interpreter lock needed.
        """
        self._screen.note(f"stacks of all processes: {why}")
        faulthandler.dump_traceback(file=2)
        for record in self.tree:
            if not record.pid or record.gone or record.step is Step.SPAWNED:
                continue
            stat = procfs.read_stat(record.pid)
            if stat is not None and stat.state in "TtD":
                self._screen.note(f"{record.title} (pid {record.pid}) cannot show its stack: state {stat.state}")
            sessions.signal_process(record.pid, record.start_time, STACK_SIGNAL)

    # --- listen

    def _on_line(self, title: str, message: UpMessage | None) -> None:
        if message is not None:
            self._on_report(title, message)
        elif self.tree[title].pid and not self.tree[title].goodbye and not self._is_expected(title):
            self._verdict.lost_line(title)

    def _on_report(self, title: str, message: UpMessage) -> None:
        record = self.tree[title]
        changed = self.tree.note(title, message)
        if isinstance(message, StepReport):
            self._screen.on_step(title, record.pid, message)
            if self.state is State.STARTING:
                self._notifier.extend_timeout(self._settings.ready_timeout + 10)
        elif isinstance(message, ReadyReport):
            self._screen.on_ready(title, record.pid)
        elif isinstance(message, ChildStarted):
            self._helper.guard({message.pid: message.start_time})
        elif isinstance(message, ChildGone):
            self._worker_gone(message)
        elif isinstance(message, Drained):
            self._on_drained(title, message)
        elif isinstance(message, Pong):
            self._watchdog.heard(title, clock.now())
        elif isinstance(message, Hang) and not self._is_expected(title) and message.failure.title in self.tree.records:
            record.notes = message.notes
            self.show_stacks(f"{message.failure.title} is hung")
            self._verdict.hung(message.failure.title, message.failure)
        if record.failure is not None and not self._is_expected(title):
            self._verdict.suspect()
        if changed:
            self._announce_phase()
        if isinstance(message, ReadyReport):
            self._on_ready(title)

    def _on_ready(self, title: str) -> None:
        unit = self._units.of(title)
        if unit is not None and unit.title == title:
            unit.budget.ready(clock.now())
            if self._units.all_ready():
                self._handle(Event.ALL_READY)

    def _on_drained(self, title: str, message: Drained) -> None:
        self._drained.add(title)
        self._outcome.cut_requests += message.cut
        if self._drained >= {unit.title for unit in self._units if unit.spec.role == "api_server"}:
            self._drain_by = Deadline.after(0)

    def _worker_gone(self, message: ChildGone) -> None:
        """An engine core has reaped a worker."""
        self._helper.unguard(message.pid)
        if message.wanted or self._is_expected(message.title):
            if message.signal == signal.SIGKILL and self._stopping:
                self._outcome.cut_short.append(message.title)
        else:
            self._verdict.died(self.tree[message.title], ExitStatus(message.exit_code, message.signal))

    def _on_gone(self, child: Child) -> None:
        self._helper.unguard(child.pid)
        self.tree.gone(child.title, wanted=child.wanted)
        if not child.wanted and child.exit is not None and not self._is_expected(child.title):
            self._verdict.died(self.tree[child.title], child.exit)

    def _reap_strangers(self) -> None:
        """Orphans of the tree (we are their subreaper), and anybody's where we are PID 1: reap, never judge by them.

        Our own children are looked at without reaping (WNOWAIT) and left to their nursery.
        """
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if info is None or self._helper.owns(info.si_pid) or self._owns(info.si_pid):
                return  # ours are pumped in the next round, which comes at once
            os.waitpid(info.si_pid, 0)
            record = self.tree.by_pid(info.si_pid)
            if record is not None and not record.gone:
                exited = info.si_code == os.CLD_EXITED
                status = ExitStatus(info.si_status, None) if exited else ExitStatus(None, info.si_status)
                expected = self._is_expected(record.title)
                self.tree.gone(record.title, wanted=expected)
                if not expected:
                    self._verdict.died(record, status)

    def _owns(self, pid: int) -> bool:
        return any(child.pid == pid and child.exit is None for child in self._nursery.children)

    # --- what is wanted

    @property
    def _stopping(self) -> bool:
        return self.state in (State.STOPPING, State.GONE)

    @property
    def _is_coming(self) -> bool:
        """Something is being started."""
        return self.state in (State.STARTING, State.RECOVERING)

    def _is_expected(self, title: str) -> bool:
        """Whether the end of this process is no news."""
        return self._stopping or self._units.is_ending(title)

    def _sequences(self) -> list[StopSequence[Child]]:
        ending = [unit.sequence for unit in self._units if unit.phase is Phase.ENDING]
        return [sequence for sequence in (self._sequence, *ending) if sequence is not None]

    def _on_verdict(self) -> None:
        """A cause is found: ask every unit that failed whether it is to be started again."""
        cause, others = self._verdict.judge()
        if line := self._settings.keep(cause, others, self.tree):
            self._screen.note(line)
        now, kind = clock.now(), Kind.SERVICE if self._been_ready else Kind.FIRST_START
        if cause.permanent:
            kind = Kind.PERMANENT
        failed = [u for u in self._units if {f.title for f in (cause, *others)} & u.titles and u.phase is Phase.RUNNING]
        decisions = [(unit, unit.budget.failed(now, kind)) for unit in failed]
        if decisions and all(decision.restart for _, decision in decisions) and self.state is not State.DRAINING:
            self._screen.note(self._settings.story(cause, others))
            self._failed_units = decisions
            self._handle(Event.UNIT_FAILED)
            return
        self._outcome.cause, self._outcome.follow_ons = cause, others
        self._outcome.spent = any(decision.spent for _, decision in decisions)
        self._handle(Event.FAILED)

    def _recover(self) -> None:
        limits = self._settings.restart
        for unit, decision in self._failed_units:
            when = f"in {decision.delay:g} s" if decision.delay else "now"
            self._screen.note(
                f"restarting {unit.title} {when}"
                f" (restart {decision.number} of {limits.max_restarts} within {limits.window:g} s)"
            )
            alive = [unit.child] if unit.child is not None else []
            unit.end(decision.delay, StopSequence(alive, 0, self._nursery.send))
        self._failed_units = []

    def ask_to_stop(self, number: signal.Signals | None = None, budget: float | None = None) -> None:
        """A stop was asked for, by a signal or (None) over the control socket. The second one forces."""
        if self.state is State.STARTING:
            words = "stopping before ready"
        elif self.state is State.RECOVERING:
            words = "stopping; nothing is started any more"
        elif self.state is State.READY:
            words = f"finishing what runs, then stopping (at most {self._settings.shutdown_timeout:g} s)"
        else:
            words = "killing what is left"
        self._screen.note(f"{number.name if number else 'stop'} received: {words}")
        if number is not None and self.state not in (State.READY, State.RECOVERING) and not self._outcome.cause:
            self._stop_code = self._stop_code or _STOP_SIGNALS[number]
        if math.isinf(self._stop_by.at):
            self._stop_by = Deadline.after(self._settings.shutdown_timeout if budget is None else budget)
        self._handle(Event.STOP_ASKED)

    def _handle(self, event: Event) -> None:
        old = self.state
        self.state, action = next_cell(self.state, event)
        if self.state is not old:
            self.since = clock.now()
            if self.state is not State.GONE:
                self._announce_phase()
        self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case Action.ANNOUNCE:
                self._been_ready = True
                self._notifier.ready()
                self._screen.close()
                self._screen.note(self._settings.ready_line)
            case Action.RECOVER:
                self._recover()
            case Action.RESUME:
                self._screen.note("whole again")
            case Action.CUT:
                self._begin_drain(0.0)
            case Action.INTERRUPT:
                self._stop(min(self._stop_by.remaining(), _INTERRUPT_BUDGET))
            case Action.DRAIN:
                left = self._stop_by.remaining()
                # What is left after the drain must do for ending the processes in order.
                self._begin_drain(max(0.0, left - min(5.0, left / 4)))
            case Action.STOP:
                self._stop(self._stop_by.remaining())
            case Action.FAIL:
                self._stop(min(self._settings.shutdown_timeout, _FAIL_BUDGET))
            case Action.FORCE:
                self._stop(0).force()
            case Action.LEAVE:
                self._conclude()
            case Action.NOTHING:
                pass

    def _begin_drain(self, budget: float) -> None:
        self._notifier.stopping()
        self._drain_by = Deadline.after(budget + 0.5 if budget else 0)
        self._tell_api(Drain(budget=budget))

    def _stop(self, budget: float) -> StopSequence[Child]:
        if self._verdict.due:  # a stop that comes between a failure and its verdict must not hide it
            self._outcome.cause, self._outcome.follow_ons = self._verdict.judge()
        self._drain_by = _NEVER
        self._notifier.stopping()
        self._screen.close()
        if self._sequence is None:
            self._sequence = StopSequence(self._nursery.children, budget, self._nursery.send)
        return self._sequence

    def _conclude(self) -> None:
        assert self._sequence is not None
        outcome = self._outcome
        outcome.cut_short += [child.title for child in self._sequence.cut_short]
        outcome.exit_code = self._stop_code
        if outcome.cause is not None:
            outcome.exit_code = 125 if outcome.spent else 2 if outcome.cause.permanent else 1

    def _announce_phase(self) -> None:
        phase = self.tree.phase() if self._is_coming else str(self.state)
        if self._outcome.cause is not None:
            phase = self._outcome.cause.headline
        state = TreeState(state="failed" if self._outcome.cause is not None else str(self.state), phase=phase)
        if state != self._told:
            self._told = state
            self._notifier.status(phase)
            self._tell_api(state)

    def _tell_api(self, message: DownMessage) -> None:
        for child in self._nursery.children:
            if child.spec.role == "api_server" and not child.is_gone:
                self._nursery.send(child, message)

    # --- end

    def _end(self) -> None:
        """Whatever happened: nothing of the launch may be left when this returns."""
        self._nursery.close()
        spare = {self._helper.pid}
        sessions.kill_members(self.tree.sessions(), self._settings.launch_id, Deadline.after(1.5), spare)
        self._helper.close()
        self._wires.close()
        deadline = Deadline.after(1)
        while not deadline.expired:  # zombies of those that were just killed
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break
        self._signals.close()


def _stop_signals() -> set[signal.Signals]:
    """A SIGHUP that we inherited as ignored stays so (nohup)."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return set(_STOP_SIGNALS) - ({signal.SIGHUP} if ignored else set())
