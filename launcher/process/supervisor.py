"""The supervisor: one thread, one wait for everything, a table for what is wanted (`lifecycle`).

It owns the tree: it starts the helper, the API servers, the engine cores and the node agent, holds every status and
output line (also those of the workers, which are the cores' or the agent's children), hears the control socket and the
signals, and stops all of it within one budget. It imports no torch and no zmq, and it decides nothing in a signal
handler.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
from collections.abc import Sequence

import msgspec

from launcher import clock
from launcher.clock import Deadline
from launcher.errors import ChildFailedError, Failure
from launcher.process import kernel, sessions
from launcher.process.attention import Attention
from launcher.process.child import STACK_SIGNAL
from launcher.process.lifecycle import Action, Event, State, next_cell
from launcher.process.lives import HEARS_OF_THE_TREE, ROOT, Lives
from launcher.process.nursery import Child, ExitStatus
from launcher.process.oom import OomWatch
from launcher.process.recovery import Recovery
from launcher.process.reports import (
    ChildGone,
    ChildStarted,
    DownMessage,
    Drain,
    Drained,
    FailureReport,
    Hang,
    Leave,
    Pong,
    ReadyReport,
    Step,
    StepReport,
    TreeState,
    UpMessage,
)
from launcher.process.sd_notify import Notifier
from launcher.process.signals import SignalPipe
from launcher.process.spec import ProcessSpec
from launcher.process.stop import StopSequence
from launcher.process.supervisor_settings import Guest, Outcome, Screen, SupervisorSettings
from launcher.process.tree import Tree
from launcher.process.units import Phase, Unit, Units
from launcher.process.verdict import Verdict
from launcher.process.wires import Output

__all__ = ["Guest", "Outcome", "Output", "Screen", "Supervisor", "SupervisorSettings"]

_FAIL_BUDGET = 1.0
"""Seconds for stopping a tree that has failed: what must go is gone within 2 s of the death."""
_INTERRUPT_BUDGET = 2.0
"""Seconds for stopping a start: nothing is being served yet."""
_STOP_SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
"""And the exit code when it interrupts a start or forces a stop."""
_NEVER = Deadline.after(None)


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
        self._screen = screen
        self._notifier = notifier
        self._outcome = Outcome()
        self._signals = SignalPipe(_stop_signals() | {signal.SIGCHLD, STACK_SIGNAL})
        oom = OomWatch()
        self._verdict = Verdict(self.tree, output.tail, oom)
        self._lives = Lives(
            self._units, self.tree, settings, output=output, screen=screen, http=http, told=lambda: self._told, oom=oom
        )
        self._nursery, self._helper, self._wires = self._lives.nursery, self._lives.helper, self._lives.wires
        self._attention = Attention(
            self.tree, self._units, self._lives, self._verdict, screen, limit=settings.watchdog_timeout
        )
        self._sequence: StopSequence[Child] | None = None
        self._recovery = Recovery(self._units, self.tree, self._lives, settings, screen)
        self._left: set[str] = set()
        """Node agents whose group was ended in order: they end by themselves."""
        self._stop_code = 0
        """The exit code if the stop under way ends as it should."""
        self._stop_by = _NEVER
        self._drain_by = _NEVER
        self._drained: set[str] = set()
        self._told = TreeState(state="")
        """What the API servers and node agents know."""

    # --- the loop

    def run(self) -> Outcome:
        """Start, serve, stop; returns when nothing is left. Never raises for a child's failure."""
        kernel.become_subreaper()
        try:
            self._lives.begin()
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
                self._attention.show_stacks("asked by SIGQUIT")
        self._reap_strangers()

    def _until_next_timer(self) -> int | None:
        """Milliseconds; None: nothing is due."""
        waits = [self._verdict.deadline.remaining(), self._drain_by.remaining()]
        waits += [sequence.advance() for sequence in self._sequences()]
        if not self._stopping:
            waits.append(self._attention.watchdog.until_turn(clock.now()))
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
            self._attention.look_at_start(self._settings.ready_timeout)
        else:
            self._attention.start_is_over()
        if not self._stopping:
            self._attention.look_at_service()
        if self._verdict.deadline.expired:
            self._on_verdict()
        if not self._stopping and self.state is not State.DRAINING:
            self._lives.turn()
        if self._drain_by.expired:
            self._drain_by = _NEVER
            self._handle(Event.DRAINED)
        if self._sequence is not None and self._sequence.done:
            self._handle(Event.ALL_GONE)

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
            self._on_drained(title, message.cut)
        elif isinstance(message, Leave):
            self._on_leave(title, message.reason)
        elif isinstance(message, Pong):
            self._attention.watchdog.heard(title, clock.now())
        elif isinstance(message, Hang) and not self._is_expected(title):
            record.notes = message.notes
            self._on_hang(title, message.failure)
        elif isinstance(message, FailureReport) and message.cause is not None and not self._is_expected(title):
            self._on_cause(title, message.cause)
        if record.failure is not None and not self._is_expected(title):
            self._verdict.suspect()
        if changed:
            self._announce_phase()
        if isinstance(message, ReadyReport) or (isinstance(message, StepReport) and message.step is Step.SERVING):
            self._on_ready(title)

    def _on_hang(self, title: str, failure: Failure) -> None:
        where = f" on node {failure.node}" if failure.title not in self.tree.records else ""
        self._attention.show_stacks(f"{failure.title}{where} is hung")
        if where:
            self._on_cause(title, failure)
        else:
            self._verdict.hung(failure.title, failure)

    def _on_cause(self, title: str, cause: Failure) -> None:
        """`title` fails because of `cause`. The tree has noted one of its own already."""
        if cause.title not in self.tree.records:
            self._recovery.blame(title)
            self._verdict.outside(msgspec.structs.replace(cause, at=clock.now()))  # clocks of nodes differ

    def _on_leave(self, title: str, reason: str) -> None:
        """Node 0 has ended the launch."""
        self._left.add(title)
        if (unit := self._units.of(title)) is not None:
            self._verdict.absolve(unit.titles)  # its workers' last breath may have been heard before its word
        if self.state in (State.STARTING, State.READY, State.RECOVERING):
            self._stop_asked(f"{reason}: stopping this node too", None, None)

    def _on_ready(self, title: str) -> None:
        unit = self._units.of(title)
        if unit is not None and unit.title == title:
            unit.budget.ready(clock.now())
            if self._units.all_ready():
                self._handle(Event.ALL_READY)

    def _on_drained(self, title: str, cut: int) -> None:
        self._drained.add(title)
        self._outcome.cut_requests += cut
        if self._drained >= self._finishing():
            self._drain_by = Deadline.after(0)

    def _finishing(self) -> set[str]:
        """Who is waited for in a drain. Without API servers, the node agent: node 0 may be draining, and need us."""
        serving = {unit.title for unit in self._units if unit.spec.role == "api_server"}
        return serving or {unit.title for unit in self._units if unit.spec.role == "node_agent"}

    def _heralds(self) -> set[str]:
        """Node 0's agent: a forced stop is to reach the other nodes too."""
        return {u.title for u in self._units if u.spec.role == "node_agent" and not u.spec.children}

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
        unit = self._units.of(child.title)
        if unit is not None and self._is_parting(unit):
            self._on_drained(child.title, 0)
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
        if self._stopping or self._units.is_ending(title):
            return True
        unit = self._units.of(title)
        return unit is not None and (unit.title in self._left or self._is_parting(unit))

    def _is_parting(self, unit: Unit) -> bool:
        """Its end is what the drain under way waits for."""
        agent = unit.spec.role == "node_agent" and unit.title in self._finishing()
        return agent and self.state is State.DRAINING

    def _sequences(self) -> list[StopSequence[Child]]:
        ending = [unit.sequence for unit in self._units if unit.phase is Phase.ENDING]
        return [sequence for sequence in (self._sequence, *ending) if sequence is not None]

    def _on_verdict(self) -> None:
        """A cause is found: ask every unit that failed whether it is to be started again."""
        cause, others = self._verdict.judge()
        if line := self._settings.keep(cause, others, self.tree):
            self._screen.note(line)
        if self._recovery.decide(cause, others, allowed=self.state is not State.DRAINING):
            self._screen.note(self._settings.story(cause, others))
            self._handle(Event.UNIT_FAILED)
            return
        self._outcome.cause, self._outcome.follow_ons = cause, others
        self._outcome.spent = self._recovery.spent
        self._handle(Event.FAILED)

    def ask_to_stop(self, number: signal.Signals | None = None, budget: float | None = None) -> None:
        """A stop was asked for, by a signal or (None) over the control socket. The second one forces."""
        self._stop_asked(f"{number.name if number else 'stop'} received: {self._stop_words()}", number, budget)

    def _stop_words(self) -> str:
        if self.state is State.STARTING:
            return "stopping before ready"
        if self.state is State.RECOVERING:
            return "stopping; nothing is started any more"
        if self.state is State.READY:
            return f"finishing what runs, then stopping (at most {self._settings.shutdown_timeout:g} s)"
        return "killing what is left"

    def _stop_asked(self, note: str, number: signal.Signals | None, budget: float | None) -> None:
        self._screen.note(note)
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
                self._recovery.been_ready = True
                self._notifier.ready()
                self._screen.close()
                self._screen.note(self._settings.ready_line)
            case Action.RECOVER:
                self._recovery.restart()
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
                self._stop(0).force(self._heralds())
            case Action.LEAVE:
                self._conclude()
            case Action.NOTHING:
                pass

    def _begin_drain(self, budget: float) -> None:
        self._notifier.stopping()
        waits = budget > 0 and not self._left >= self._finishing()
        self._drain_by = Deadline.after(budget + 0.5 if waits else 0)
        self._tell(Drain(budget=budget))

    def _stop(self, budget: float) -> StopSequence[Child]:
        if self._verdict.due:  # a stop that comes between a failure and its verdict must not hide it
            self._outcome.cause, self._outcome.follow_ons = self._verdict.judge()
            self._announce_phase()  # the other nodes' agents are to hear that it failed
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
            outcome.exit_code = 125 if outcome.spent else ChildFailedError(outcome.cause).exit_code

    def _announce_phase(self) -> None:
        phase = self.tree.phase() if self._is_coming else str(self.state)
        if self._outcome.cause is not None:
            phase = self._outcome.cause.headline + (", and its restarts are used up" if self._outcome.spent else "")
        state = TreeState(state="failed" if self._outcome.cause is not None else str(self.state), phase=phase)
        if state != self._told:
            self._told = state
            self._notifier.status(phase)
            self._tell(state)

    def _tell(self, message: DownMessage) -> None:
        for child in self._nursery.children:
            if child.spec.role in HEARS_OF_THE_TREE and not child.is_gone:
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
