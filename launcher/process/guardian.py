"""A guard for trees without a supervisor (library use): ends what the workers had started, when their owner is killed.

The workers themselves go by the parent-death signal; what they had started does not (see `helper`). One small process
that sleeps, made by exec, child of the owner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from launcher.process.helper import HelperSettings
from launcher.process.helper_client import helper_spec
from launcher.process.nursery import Nursery
from launcher.process.reports import Guard, Stop


class Guardian:
    """Started by the constructor, which does not wait for it."""

    def __init__(self, settings: HelperSettings, environment: Mapping[str, str], lock_fd: int) -> None:
        self._nursery = Nursery("spawn")
        spec = helper_spec("spawn", settings, environment)
        [self._child] = self._nursery.start_all([spec], descriptors={spec.title: {"lock": lock_fd}})

    @property
    def pid(self) -> int:
        return self._child.pid

    def guard(self, sessions: Mapping[int, int]) -> None:
        """These sessions (leader's pid → start time) end with this process."""
        self._nursery.send(self._child, Guard(sessions=dict(sessions)))

    def close(self) -> None:
        """Dismiss and reap it."""
        with contextlib.suppress(OSError):
            self._nursery.send(self._child, Stop(budget=1))
            self._nursery.stop(1.0)
        self._nursery.close()
