"""What is known of every process of the tree: the actual state, filled from reports, read by `status`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import msgspec

from launcher import clock
from launcher.errors import Failure
from launcher.process.reports import (
    ChildGone,
    ChildStarted,
    FailureReport,
    Goodbye,
    ReadyReport,
    Step,
    StepReport,
    UpMessage,
)
from launcher.process.spec import ProcessSpec

_ORDER = list(Step)
_JOIN = _ORDER.index(Step.JOIN)


class Record:
    """One process: of ours or of an engine core's."""

    def __init__(self, spec: ProcessSpec, parent: str) -> None:
        self.spec = spec
        self.parent = parent
        """The title of the process that starts it."""
        self.pid = 0
        self.start_time = 0
        self.step = Step.SPAWNED
        self.came_to = Step.SPAWNED
        """The last step on its way up: not its end."""
        self.since = time.time()
        """Unix seconds, for people."""
        self.last_progress = clock.now()
        self.progress: StepReport | None = None
        self.ready = False
        self.gone = False
        self.goodbye = False
        self.wanted = False
        self.failure: Failure | None = None
        self.restarts = 0
        self.notes: tuple[str, ...] = ()
        """What it said that it did last."""

    @property
    def title(self) -> str:
        return self.spec.title

    @property
    def last_step(self) -> Step:
        """The step it was in when it ended, or is in."""
        if self.step is not Step.GONE:
            return self.step
        return Step.SERVING if self.ready else (self.progress.step if self.progress else Step.SPAWNED)

    def enter(self, step: Step) -> None:
        if step not in (Step.STOPPING, Step.GONE):
            self.came_to = step
        if step != self.step:
            self.step = step
            self.since = time.time()
        self.last_progress = clock.now()


class Tree:
    """Records by title, in the order of the plan (parents before children)."""

    def __init__(self, specs: Iterable[ProcessSpec], root: str) -> None:
        self.records: dict[str, Record] = {}
        self._add(specs, root)

    def _add(self, specs: Iterable[ProcessSpec], parent: str) -> None:
        for spec in specs:
            self.records[spec.title] = Record(spec, parent)
            self._add(spec.children, spec.title)

    def renew(self, spec: ProcessSpec, root: str) -> None:
        """A new life of `spec` and its children, in the old places."""
        for each, parent in ((spec, root), *((child, spec.title) for child in spec.children)):
            old = self.records[each.title]
            fresh = Record(each, parent)
            fresh.restarts = old.restarts + 1
            self.records[each.title] = fresh

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records.values())

    def __getitem__(self, title: str) -> Record:
        return self.records[title]

    def started(self, title: str, pid: int, start_time: int) -> None:
        record = self.records[title]
        record.pid, record.start_time = pid, start_time
        record.enter(record.step)

    def note(self, title: str, message: UpMessage) -> bool:
        """Take over a report of `title`; True when something that `status` shows has changed."""
        record = self.records[title]
        if isinstance(message, StepReport):
            changed = record.step != message.step
            record.progress = message
            record.enter(message.step)
            return changed
        if isinstance(message, ReadyReport):
            record.ready = True
            record.enter(Step.READY)
            return True
        if isinstance(message, FailureReport):
            record.failure = record.failure or message.failure
            record.notes = message.notes or record.notes
            if (cause := message.cause) is not None and cause.title in self.records:
                # A hung worker says nothing of itself: its parent's word is all there is.
                guilty = self.records[cause.title]
                guilty.failure = guilty.failure or msgspec.structs.replace(cause, pid=cause.pid or guilty.pid)
        elif isinstance(message, Goodbye):
            record.goodbye = True
        elif isinstance(message, ChildStarted) and message.title in self.records:
            self.started(message.title, message.pid, message.start_time)
        elif isinstance(message, ChildGone) and message.title in self.records:
            self.gone(message.title, wanted=message.wanted)
        return False

    def gone(self, title: str, *, wanted: bool) -> None:
        record = self.records[title]
        record.gone = True
        record.wanted = wanted
        record.enter(Step.GONE)

    def by_pid(self, pid: int) -> Record | None:
        return next((record for record in self if record.pid == pid), None)

    def failures(self) -> list[Failure]:
        return [record.failure for record in self if record.failure is not None]

    def sessions(self) -> dict[int, int]:
        """Session id → start time of its leader, for every process that was ever started."""
        return {record.pid: record.start_time for record in self if record.pid}

    def behind(self) -> list[Record]:
        """Processes that are not READY, the furthest behind first."""
        waiting = [record for record in self if not record.ready and not record.gone]
        return sorted(waiting, key=lambda r: (_ORDER.index(r.step), r.last_progress))

    def slowest(self) -> Record | None:
        """The one that the others wait for; None when all are READY. An engine core that waits for its workers is not
        what is slow."""

        def is_waiting(record: Record) -> bool:
            known = [self.records[child.title] for child in record.spec.children]
            return any(child.pid for child in known) and not all(child.ready for child in known)

        return next((record for record in self.behind() if not is_waiting(record)), None)

    def is_joining(self, title: str) -> bool:
        """Whether a process, with its children, waits for other nodes, or did when it ended."""
        record = self.records[title]
        every = (record, *(self.records[child.title] for child in record.spec.children))
        # Not the last steps: workers are told to stop as soon as who started them has failed.
        return record.came_to is Step.JOIN and all(_ORDER.index(r.came_to) <= _JOIN for r in every)

    def phase(self) -> str:
        """One line on the slowest: ``Worker_DP0_PP0_TP2: model 120/538 MB``."""
        record = self.slowest()
        return "ready" if record is None else f"{record.title}: {record.step}{describe_progress(record.progress)}"


def describe_progress(report: StepReport | None) -> str:
    """`` 120/538 MB`` or `` detail``, with a leading blank; empty when there is nothing to say."""
    if report is None:
        return ""
    text = f" {report.detail}" if report.detail else ""
    if report.total:
        text += f" {report.done:g}/{report.total:g} {report.unit}".rstrip()
    return text
