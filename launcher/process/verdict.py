"""From failures to the one cause: wait a moment after the first, then rank (`causes`) and dress it for a reader."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection

import msgspec

from launcher import clock
from launcher.clock import Deadline
from launcher.errors import Failure, FailureKind
from launcher.process.causes import describe_exit, first_cause
from launcher.process.nursery import ExitStatus
from launcher.process.oom import OomWatch
from launcher.process.procfs import read_stat
from launcher.process.tree import Record, Tree

_COLLECT = 0.5
"""Seconds from the first failure to the verdict: its cause may be reported after it."""
_COLLECT_AFTER_DEATH = 0.1
"""Seconds from a hard death: only another one, a moment earlier, can be the cause of that."""


_STATES = {
    "T": ": it is stopped (state T, as by SIGSTOP)",
    "t": ": it is stopped by a debugger (state t)",
    "D": ": it is stuck in the kernel (state D)",
}
"""Why a process cannot even show its stack."""


class Verdict:
    """`tail`: the last lines that a title has printed."""

    def __init__(self, tree: Tree, tail: Callable[[str], tuple[str, ...]], oom: OomWatch | None = None) -> None:
        self._tree = tree
        self._tail = tail
        self._oom = oom or OomWatch()
        self._lost: list[str] = []
        self._others: list[Failure] = []
        self.deadline = Deadline.after(None)
        """When `judge` is due; never, while nothing has failed."""

    @property
    def due(self) -> bool:
        return self.deadline.at != float("inf")

    def suspect(self) -> None:
        """Something failed; give its cause time to be reported."""
        if not self.due:
            self.deadline = Deadline.after(_COLLECT)

    def lost_line(self, title: str) -> None:
        """A process let go of its status line. How it died is for its parent, or for our reaping, to tell."""
        self._lost.append(title)
        self.suspect()

    def absolve(self, titles: Collection[str]) -> None:
        """They went in order, as is known by now: that one let go of its line was no failure."""
        self._lost = [title for title in self._lost if title not in titles]
        if not (self._lost or self._others or self._tree.failures()):
            self.deadline = Deadline.after(None)

    def outside(self, failure: Failure) -> None:
        """A failure of somebody who is not in the tree: the helper, a process on another node."""
        self._others.append(failure)
        self.suspect()

    def died(self, record: Record, status: ExitStatus) -> None:
        """A death that nobody had asked for."""
        if record.failure is None:
            killed = status.signal == signal.SIGKILL
            headline = describe_exit(*status, out_of_memory=killed and self._oom.struck(clock.now()))
            failure = failure_of(record, "died", headline)
            record.failure = msgspec.structs.replace(failure, exit_code=status.code, signal=status.signal)
        self.suspect()
        self.deadline = self.deadline.earlier(_COLLECT_AFTER_DEATH)

    def hung(self, title: str, failure: Failure) -> None:
        """A process makes no progress; its stack is being shown, which takes a moment."""
        record = self._tree[title]
        record.failure = record.failure or failure
        self.suspect()

    def silent(self, record: Record, age: float, limit: float) -> None:
        """A process does not answer."""
        text = f"has not answered for {age:.0f} s{_state(record)} (--watchdog-timeout {limit:g})"
        self.hung(record.title, failure_of(record, "timeout", text))

    def too_slow(self, record: Record, limit: float) -> None:
        """No progress of anybody within the limit; `record` is the furthest behind."""
        age = clock.now() - record.last_progress
        where = f"in step '{record.step}'{_state(record)}"
        text = f"not ready: no progress for {age:.0f} s {where} (--ready-timeout {limit:g})"
        record.failure = failure_of(record, "timeout", text)
        self.suspect()

    def judge(self) -> tuple[Failure, tuple[Failure, ...]]:
        """(cause, follow-ons); a hard death comes with its last output. What was judged is forgotten."""
        self.deadline = Deadline.after(None)
        failures = [*self._tree.failures(), *self._others]
        if not failures:
            record = self._tree[self._lost[0]]
            failures = [failure_of(record, "died", "closed its status line without a word")]
        self._lost.clear()
        self._others.clear()
        for record in self._tree:
            record.failure = None
        cause, follow_ons = first_cause(failures)
        if cause.kind in ("died", "timeout"):
            cause = msgspec.structs.replace(cause, last_output=self._tail(cause.title) or cause.last_output)
        return cause, follow_ons


def _state(record: Record) -> str:
    return _STATES.get(stat.state, "") if (stat := read_stat(record.pid)) else ""


def failure_of(record: Record, kind: FailureKind, headline: str) -> Failure:
    return Failure(
        title=record.title,
        role=record.spec.role,
        kind=kind,
        headline=headline,
        step=record.last_step,
        rank=record.spec.rank,
        node=record.spec.node,
        pid=record.pid or None,
        at=clock.now(),
    )
