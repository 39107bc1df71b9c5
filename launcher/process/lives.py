"""The lives of the units: start what is due, finish what ends, and the helper from which cores are forked."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from launcher.clock import Deadline
from launcher.errors import Failure, ForkerLostError, describe
from launcher.process import sessions
from launcher.process.helper_client import Helper, helper_spec
from launcher.process.nursery import Nursery
from launcher.process.oom import OomWatch
from launcher.process.reports import TreeState
from launcher.process.restart import Decision
from launcher.process.spec import ChildMethod
from launcher.process.stop import StopSequence
from launcher.process.supervisor_settings import Screen, SupervisorSettings
from launcher.process.tree import Tree
from launcher.process.units import Phase, Unit, Units
from launcher.process.wires import Output, Wires

ROOT = "Supervisor"
HEARS_OF_THE_TREE = ("api_server", "node_agent")
"""Roles that are told the state of the tree, and that a drain begins: they speak to others outside of it."""
_LAST_WORDS = 1.5
"""Seconds for a node's agent to tell node 0 what failed here, before its unit is killed. It collects for 0.5 s."""


class Lives:
    """`told`: what API servers and node agents were last told of the tree; a new one is told at once."""

    def __init__(
        self,
        units: Units,
        tree: Tree,
        settings: SupervisorSettings,
        *,
        output: Output,
        screen: Screen,
        http: socket.socket | None,
        told: Callable[[], TreeState],
        oom: OomWatch,
    ) -> None:
        self.wires = Wires(output, self._pid_of)
        self.helper = Helper(
            helper_spec(settings.method, settings.helper, settings.environment),
            self.wires,
            settings.lock_fd,
            retry=settings.restart.policy == "always",
            oom=oom,
        )
        self.helper.on_step = screen.on_step
        self.helper.on_ready = self._helper_ready
        self.helper.on_death = self._helper_died
        self.nursery = Nursery(settings.method, forker=self.helper, oom=oom)
        self._units = units
        self._tree = tree
        self._settings = settings
        self._screen = screen
        self._http = http
        self._told = told
        self._spawn_instead = False
        """The helper cannot be forked from."""

    def _pid_of(self, title: str) -> int:
        record = self._tree.records.get(title)
        return record.pid if record else self.helper.pid

    def begin(self) -> None:
        self.helper.start()
        self.turn()

    def end(self, unit: Unit, decision: Decision) -> None:
        """It has failed and is to be started again: end what is left of it."""
        alive = [unit.child] if unit.child is not None else []
        budget = _LAST_WORDS if unit.spec.role == "node_agent" and unit.spec.children else 0
        unit.end(decision.delay, StopSequence(alive, budget, self.nursery.send))

    @property
    def method(self) -> ChildMethod:
        """How engine cores are started as things stand."""
        spawn = self._spawn_instead or (self._settings.method == "forkserver" and not self.helper.warm)
        return "spawn" if spawn else self._settings.method

    def turn(self) -> None:
        """Finish what ends, start what is due."""
        for unit in self._units:
            if unit.phase is Phase.ENDING:
                self._finish(unit)
            if unit.is_due(helper_ready=self.helper.is_ready, method=self.method):
                self._start(unit)

    def _start(self, unit: Unit) -> None:
        """Start a unit with its lines; the ends that travel are closed here once they have.

        One that the helper does not fork stays due, until there is another helper.
        """
        method = unit.method(self.method)
        spec = msgspec.structs.replace(unit.spec, child_method="spawn") if method == "spawn" else unit.spec
        descriptors, ours = self.wires.lay(spec)
        if spec.role == "api_server" and self._http is not None:
            descriptors["http"] = self._http.fileno()
        try:
            [child] = self.nursery.start_all([spec], method=method, descriptors={spec.title: descriptors})
        except ForkerLostError as error:
            self.wires.drop(unit.titles)
            self.helper.replace(str(error))
            return
        finally:
            for fd in ours:
                os.close(fd)
        unit.started(child)
        self._tree.started(child.title, child.pid, child.start_time)
        self.helper.guard({child.pid: child.start_time})
        if spec.role in HEARS_OF_THE_TREE:
            self.nursery.send(child, self._told())

    def _finish(self, unit: Unit) -> None:
        """Once the old life is reaped to the last process, make room for the next."""
        records = [self._tree[title] for title in unit.titles]
        reaped = all(record.gone or not record.pid for record in records)
        if not (unit.sequence is None or unit.sequence.done) or not (reaped or unit.reap_by.expired):
            return
        found = {record.pid: record.start_time for record in records if record.pid}
        sessions.kill_members(found, unit.mark, Deadline.after(1), {self.helper.pid})
        self.wires.drop(unit.titles)
        for record in records:
            self.helper.unguard(record.pid)
        if unit.child is not None:
            self.nursery.forget(unit.child)
        unit.next_life(self._settings.renew)
        self._tree.renew(unit.spec, ROOT)

    def _helper_died(self, failure: Failure) -> None:
        self._screen.note(f"{describe(failure)}; starting another one")

    def _helper_ready(self, info: dict[str, Any]) -> None:
        self._screen.on_ready(self.helper.title, self.helper.pid)
        if self.method == "forkserver" and (unsafe := info.get("unsafe_to_fork")):
            self._screen.note(f"spawn instead of forkserver: after the preload {'; '.join(unsafe)}")
            self._spawn_instead = True
