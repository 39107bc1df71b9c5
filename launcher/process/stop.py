"""Stopping children within one budget, as a sequence that a loop advances: it never blocks.

    budget:  0 ─────────────────── 3/4 ────── 1
             Stop message          SIGTERM    SIGKILL, then reaped
             (SIGTERM at once to those not READY yet: they have nothing to finish)

A second stop request calls `force`: SIGKILL now, but those who are to tell others that it ends have a moment.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Sequence
from typing import Generic, Protocol, TypeVar

from launcher.clock import Deadline
from launcher.process.reports import Stop

_ORDERLY_SHARE = 0.75
"""Of the budget, for ending by message; the rest is for those that only a signal reaches."""
_LAST_WORDS = 0.5
"""Seconds for those who are spared by `force`."""
_STUCK = 5.0
"""Seconds to wait for a killed process to be reaped. One in uninterruptible sleep must not hold a stop for ever."""


class Stoppable(Protocol):
    """The part of `nursery.Child` that a stop needs."""

    wanted: bool
    cut_short: bool

    @property
    def title(self) -> str: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def is_gone(self) -> bool: ...
    def signal(self, number: int) -> None: ...


C = TypeVar("C", bound=Stoppable)


class StopSequence(Generic[C]):
    """Create it to begin. Call `advance` whenever something happened or the returned time has passed."""

    def __init__(self, children: Sequence[C], budget: float, speak: Callable[[C, Stop], None]) -> None:
        self._children = [child for child in children if not child.is_gone]
        self._deadline = Deadline.after(budget)
        self._terminate = Deadline.after(budget * _ORDERLY_SHARE)
        self._terminated = self._killed = self._spared = False
        self._speak = speak
        self._given_up = Deadline.after(None)
        for child in self._children:
            child.wanted = True
            if budget > 0:
                speak(child, Stop(budget=budget * _ORDERLY_SHARE))
                if not child.is_ready:
                    child.signal(signal.SIGTERM)

    @property
    def alive(self) -> list[C]:
        return [child for child in self._children if not child.is_gone]

    @property
    def done(self) -> bool:
        """Nothing is left, or what is left does not even die of SIGKILL (`alive` says who)."""
        return not self.alive or self._given_up.expired

    @property
    def cut_short(self) -> list[C]:
        return [child for child in self._children if child.cut_short]

    def advance(self) -> float:
        """Do what is due; seconds until the next step is."""
        if self._deadline.expired:
            self.force()
        elif self._terminate.expired and not self._terminated:
            self._terminated = True
            for child in self.alive:
                child.signal(signal.SIGTERM)
        if self._killed:
            return self._given_up.remaining()
        return (self._deadline if self._terminated else self._terminate).remaining()

    def force(self, spare: Collection[str] = ()) -> None:
        """SIGKILL, now; these titles are told to stop, and killed a moment later. Said again, it spares nobody."""
        if self._killed:
            return
        spared = [child for child in self.alive if child.title in spare and not self._spared]
        self._spared = True
        self._killed = not spared
        self._given_up = Deadline.after(_STUCK)
        for child in self.alive:
            if child not in spared:
                child.cut_short = True
                child.signal(signal.SIGKILL)
        for child in spared:
            self._terminated, self._deadline = True, Deadline.after(_LAST_WORDS)
            self._speak(child, Stop(budget=_LAST_WORDS))
