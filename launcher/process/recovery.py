"""From a verdict to what is started again: which units failed, what each one's budget says, and the restart."""

from __future__ import annotations

from launcher import clock
from launcher.errors import Failure
from launcher.process.lives import Lives
from launcher.process.restart import Decision, Kind, kind_of
from launcher.process.supervisor_settings import Screen, SupervisorSettings
from launcher.process.tree import Tree
from launcher.process.units import Phase, Unit, Units


class Recovery:
    """`decide` after each verdict; `restart` if it said so."""

    def __init__(self, units: Units, tree: Tree, lives: Lives, settings: SupervisorSettings, screen: Screen) -> None:
        self.been_ready = False
        """The tree has served: from now on a failure is one of the service."""
        self.spent = False
        """A unit stays down because it has had all its restarts."""
        self._units = units
        self._tree = tree
        self._lives = lives
        self._settings = settings
        self._screen = screen
        self._blamed: set[str] = set()
        self._due: list[tuple[Unit, Decision]] = []

    def blame(self, title: str) -> None:
        """It told of a failure on another node: what is to be started again is this one."""
        self._blamed.add(title)

    def decide(self, cause: Failure, others: tuple[Failure, ...], *, allowed: bool) -> bool:
        """Whether every unit that failed is to be started again; each failure is counted. `allowed`: no stop is under
        way."""
        guilty = {failure.title for failure in (cause, *others)} | self._blamed
        self._blamed = set()
        failed = [unit for unit in self._units if guilty & unit.titles and unit.phase is Phase.RUNNING]
        decisions = [(unit, unit.budget.failed(clock.now(), self._kind(cause, unit))) for unit in failed]
        if decisions and all(decision.restart for _, decision in decisions) and allowed:
            self._due = decisions
            return True
        for unit, decision in decisions:
            if decision.spent:
                self.spent = True
                given = f"{decision.number} restarts within {self._settings.restart.window:g} s"
                self._screen.note(f"{unit.title} is not started again: {given} are all that --max-restarts allows")
        return False

    def _kind(self, cause: Failure, unit: Unit) -> Kind:
        return kind_of(
            permanent=cause.permanent,
            node_lost=cause.node_lost,
            been_ready=self.been_ready,
            joining=self._tree.is_joining(unit.title),
        )

    def restart(self) -> None:
        """End what is left of the units; each starts again after its delay."""
        limits = self._settings.restart
        for unit, decision in self._due:
            when = f"in {decision.delay:g} s" if decision.delay else "now"
            counted = f"restart {decision.number} of {limits.max_restarts} within {limits.window:g} s"
            which = counted if decision.number else "it waits for the lost node; not counted"
            self._screen.note(f"restarting {unit.title} {when} ({which})")
            self._lives.end(unit, decision)
        self._due = []
