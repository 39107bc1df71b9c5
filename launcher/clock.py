"""Monotonic time and deadlines. Wall time is never used to measure a wait: it jumps."""

from __future__ import annotations

import math
import time

now = time.monotonic
"""Seconds on the machine's monotonic clock: the same for all processes of one machine."""


class Deadline:
    """A point on the monotonic clock that a whole call, however many waits it makes, must not pass.

    ``Deadline.after(None)`` never expires. Deadlines are handed down, never re-started: a call that waits on eight
    ranks shares one among them.
    """

    __slots__ = ("at", "seconds")

    def __init__(self, at: float, seconds: float) -> None:
        self.at = at
        self.seconds = seconds
        """The length it was made with, for error messages."""

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        if seconds is None:
            return cls(math.inf, math.inf)
        return cls(now() + seconds, seconds)

    def remaining(self) -> float:
        """Seconds left, never negative; ``inf`` for a deadline that never comes."""
        return max(0.0, self.at - now())

    def remaining_ms(self, cap: float = 3600.0) -> int:
        """Milliseconds left for ``poll``, rounded up (so that a wait never wakes a moment early), at most ``cap`` s."""
        return math.ceil(min(self.remaining(), cap) * 1000)

    @property
    def expired(self) -> bool:
        return now() >= self.at

    def earlier(self, seconds: float) -> Deadline:
        """The sooner of this deadline and one ``seconds`` from now."""
        other = now() + seconds
        return self if self.at <= other else Deadline(other, seconds)

    def __repr__(self) -> str:
        return f"Deadline({self.remaining():.3f} s of {self.seconds} s left)"
