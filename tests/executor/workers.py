"""Workers for the tests of executors; imported by name in worker processes."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from launcher.errors import UsageError
from launcher.worker.reference import ReferenceWorker


class Probe(ReferenceWorker):
    """The reference worker with methods that a test can call."""

    count = 0

    @property
    def rank(self) -> int:
        return self.settings.ranks.rank

    def who(self) -> tuple[int, int]:
        return self.rank, os.getpid()

    def echo(self, *args: Any, **kwargs: Any) -> tuple[int, Any, Any]:
        return self.rank, args, kwargs

    def fail(self, rank: int, text: str = "boom") -> str:
        if self.rank == rank:
            raise ValueError(text)
        return f"fine on {self.rank}"

    def slow_fail(self, rank: int, seconds: float) -> str:
        if self.rank == rank:
            time.sleep(seconds)
            raise ValueError("too late to be nice")
        return f"fine on {self.rank}"

    def lost_peer(self) -> None:
        if self.rank == 1:
            os.kill(os.getpid(), 9)
        raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4711")

    def exit_all(self) -> None:
        raise SystemExit(3)

    def nap(self, rank: int, seconds: float) -> str:
        if self.rank == rank:
            time.sleep(seconds)
        return f"napped on {self.rank}"

    def bump(self) -> int:
        self.count += 1
        return self.count

    def total(self, array: Any) -> float:
        return float(array.sum())

    def unpicklable(self) -> Any:
        return threading.Lock()


class Extension:
    def from_extension(self) -> str:
        return "extended"


class Refusing(ReferenceWorker):
    def load_model(self) -> None:
        raise UsageError("model 'x' is not here; give a directory")
