"""Units of restart: a direct child of the supervisor with everything below it, through its lives.

    waiting ──start──► running ──failure──► ending ──all gone──► waiting (until its delay has passed)

The old life is reaped to the last process before the new one starts: two engine cores would fight for one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum

import msgspec

from launcher.clock import Deadline
from launcher.process.nursery import Child
from launcher.process.reports import Step
from launcher.process.restart import Budget, RestartSettings
from launcher.process.spec import LAUNCH_ID_VARIABLE, ChildMethod, ProcessSpec, comes_by_exec
from launcher.process.stop import StopSequence

_REAP_LIMIT = 5.0
"""Seconds for the rest of a dead unit to be reaped. One in uninterruptible sleep must not hold the service for ever."""


class Phase(StrEnum):
    WAITING = "waiting"
    """To be started when `start_at` has come."""
    RUNNING = "running"
    ENDING = "ending"


class Unit:
    """One unit. `spec` is that of its current life."""

    def __init__(self, spec: ProcessSpec, settings: RestartSettings, launch_id: str) -> None:
        self._plan = spec
        self._launch_id = launch_id
        self.generation = 0
        self.spec = self._marked(spec)
        self.budget = Budget(settings)
        self.phase = Phase.WAITING
        self.start_at = Deadline.after(0)
        self.child: Child | None = None
        self.sequence: StopSequence[Child] | None = None
        self.reap_by = Deadline.after(None)

    @property
    def title(self) -> str:
        return self.spec.title

    @property
    def titles(self) -> set[str]:
        return {self.spec.title, *(child.title for child in self.spec.children)}

    @property
    def mark(self) -> str:
        """The launch id with the unit's name and life: in the environment of all that this life starts."""
        return f"{self._launch_id}.{self.title}.{self.generation}."

    def is_due(self, *, helper_ready: bool, method: ChildMethod) -> bool:
        """Whether it is to be started now; a fork from the helper waits for a helper."""
        if self.phase is not Phase.WAITING or not self.start_at.expired:
            return False
        return helper_ready or self.method(method) != "forkserver"

    def method(self, method: ChildMethod) -> ChildMethod:
        """Some come by exec whatever the method is: they start at once."""
        return "spawn" if comes_by_exec(self.spec) else method

    @property
    def is_ready(self) -> bool:
        """An API server is READY as soon as it answers probes; requests it takes once it has said SERVING."""
        if self.phase is not Phase.RUNNING or self.child is None or not self.child.is_ready:
            return False
        return self.spec.role != "api_server" or self.child.step is Step.SERVING

    def started(self, child: Child) -> None:
        self.phase = Phase.RUNNING
        self.child = child

    def end(self, delay: float, sequence: StopSequence[Child] | None) -> None:
        """It has failed: `sequence` ends what is left of it; it may start again `delay` seconds from now."""
        self.phase = Phase.ENDING
        self.sequence = sequence
        self.start_at = Deadline.after(delay)
        self.reap_by = Deadline.after(_REAP_LIMIT)

    def next_life(self, renew: Callable[[ProcessSpec, int], ProcessSpec]) -> None:
        """Everything of the old life is gone."""
        self.generation += 1
        self.spec = self._marked(renew(self._plan, self.generation))
        self.phase = Phase.WAITING
        self.child = self.sequence = None

    def _marked(self, spec: ProcessSpec) -> ProcessSpec:
        env = {LAUNCH_ID_VARIABLE: f"{self._launch_id}.{spec.title}.{self.generation}."}
        children = tuple(msgspec.structs.replace(child, env={**child.env, **env}) for child in spec.children)
        return msgspec.structs.replace(spec, env={**spec.env, **env}, children=children)


class Units:
    """All of them, in the order of the plan."""

    def __init__(self, specs: Iterable[ProcessSpec], settings: RestartSettings, launch_id: str) -> None:
        self._units = [Unit(spec, settings, launch_id) for spec in specs]

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._units)

    def of(self, title: str) -> Unit | None:
        """The unit that a process belongs to; None for the helper."""
        return next((unit for unit in self._units if title in unit.titles), None)

    def is_ending(self, title: str) -> bool:
        """Whether the end of this process is expected by now."""
        unit = self.of(title)
        return unit is not None and unit.phase is Phase.ENDING

    def all_ready(self) -> bool:
        return all(unit.is_ready for unit in self)

    def soonest_start(self) -> float:
        """Seconds until a waiting unit's delay has passed; ``inf`` when none waits."""
        return min((unit.start_at.remaining() for unit in self if unit.phase is Phase.WAITING), default=float("inf"))
