"""What a supervisor is given, whom it shows things to, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from launcher.errors import Failure
from launcher.process.helper import HelperSettings
from launcher.process.reports import StepReport
from launcher.process.restart import RestartSettings
from launcher.process.spec import ChildMethod, ProcessSpec
from launcher.process.tree import Tree


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
