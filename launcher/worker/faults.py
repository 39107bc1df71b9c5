"""Faults on demand: ``XSERVE_FAULT=<kind>:<rank>[:<seconds>][@<step>][,once]``, several joined by ``;``.

Operators rehearse failures with it, tests use it. Only the reference worker obeys, and the engine core above it for
faults of rank ``core``. This file holds the grammar and who fires when; what a fault does is in `injury`.

``<rank>``      a worker's rank, ``*`` for every worker, ``core`` for the engine core
``<seconds>``   for the kinds that take time; each has a default
``@<step>``     step kinds: at the n-th step that this process executes (1 = the first); without it: at every step
``,once``       not again after a restart
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from launcher.errors import UsageError

Point = Literal["import", "init", "step", "cleanup"]


class Kind(NamedTuple):
    """A row of the table: where in a process's life a fault strikes, and its seconds when none are given."""

    point: Point
    seconds: float | None
    """None: takes no seconds."""
    doc: str


KINDS: dict[str, Kind] = {
    "import_sleep": Kind("import", 5.0, "sleeps while the worker class is made"),
    "init_raise": Kind("init", None, "raises in init_device"),
    "init_segv": Kind("init", None, "dies of SIGSEGV in init_device"),
    "init_sleep": Kind("init", 15.0, "sleeps in init_device without a sign of life"),
    "init_progress": Kind("init", 15.0, "sleeps in init_device and reports progress each second"),
    "init_hang": Kind("init", None, "never returns from init_device"),
    "spawn_child": Kind("init", None, "starts a shell with a child of its own, and leaves both behind"),
    "step_raise": Kind("step", None, "raises in execute_model"),
    "step_segv": Kind("step", None, "dies of SIGSEGV in execute_model"),
    "step_sleep": Kind("step", 1.0, "sleeps in execute_model"),
    "step_hang": Kind("step", None, "never returns from execute_model"),
    "oom": Kind("step", None, "takes memory in execute_model until the kernel kills it; needs a memory limit"),
    "slow_cleanup": Kind("cleanup", 5.0, 'takes its time in shutdown, then prints "cleanup done"'),
}

CORE = "core"
_FORM = "<kind>:<rank>[:<seconds>][@<step>][,once]"
_FAULT = re.compile(r"(?P<kind>\w+):(?P<who>[^:@,]+)(:(?P<seconds>[^@,]*))?(@(?P<step>[^,]*))?(,(?P<once>.*))?")


class Fault(NamedTuple):
    """One fault of the text, checked."""

    kind: str
    who: str
    """A rank as decimal digits, ``*`` or ``core``."""
    seconds: float
    step: int | None
    once: bool

    @property
    def point(self) -> Point:
        return KINDS[self.kind].point

    def strikes(self, who: int | Literal["core"]) -> bool:
        return self.who == str(who) or (self.who == "*" and who != CORE)


def parse_faults(text: str) -> tuple[Fault, ...]:
    """All faults of ``XSERVE_FAULT``; empty text: none. `UsageError` names the wrong part and how to write it."""
    return tuple(_parse(part.strip()) for part in text.split(";") if part.strip())


def _parse(part: str) -> Fault:
    match = _FAULT.fullmatch(part)
    if match is None:
        raise _wrong(part, f"write {_FORM}")
    kind = KINDS.get(match["kind"])
    if kind is None:
        raise _wrong(part, f"there is no kind {match['kind']!r}; kinds are {', '.join(KINDS)}")
    who = match["who"]
    if not (who in ("*", CORE) or (who.isascii() and who.isdigit())):
        raise _wrong(part, f"{who!r} is no rank; write a number, * or {CORE}")
    if match["once"] not in (None, "once"):
        raise _wrong(part, f"after the comma stands {match['once']!r}; only ,once is known")
    who = who if who in ("*", CORE) else str(int(who))
    return Fault(match["kind"], who, _seconds(part, match, kind), _step(part, match, kind), match["once"] is not None)


def _seconds(part: str, match: re.Match[str], kind: Kind) -> float:
    given = match["seconds"]
    if given is None:
        return kind.seconds or 0.0
    if kind.seconds is None:
        raise _wrong(part, f"{match['kind']} takes no seconds; leave out {':' + given!r}")
    if re.fullmatch(r"\d+(\.\d*)?|\.\d+", given, re.ASCII) is None:
        raise _wrong(part, f"{given!r} is no number of seconds; write for example {match['kind']}:0:{kind.seconds:g}")
    return float(given)


def _step(part: str, match: re.Match[str], kind: Kind) -> int | None:
    given = match["step"]
    if given is None:
        return None
    if kind.point != "step":
        raise _wrong(part, f"{match['kind']} does not happen at a step; leave out {'@' + given!r}")
    if not (given.isascii() and given.isdigit()) or int(given) < 1:
        raise _wrong(part, f"{given!r} is no step; write a number from 1 on")
    return int(given)


def _wrong(part: str, what: str) -> UsageError:
    return UsageError(f"XSERVE_FAULT={part!r}: {what}")


class Schedule:
    """The faults of one process, and which of them fire now. Counts the process's steps."""

    def __init__(
        self,
        faults: Iterable[Fault],
        who: int | Literal["core"],
        *,
        generation: int = 0,
        marker_dir: Path | None = None,
    ) -> None:
        """`marker_dir`: an existing directory in which a ``once`` fault leaves a file when it fires; without one a
        ``once`` fault fires in generation 0 only."""
        self._who = who
        self._faults = [fault for fault in faults if fault.strikes(who)]
        self._generation = generation
        self._marker_dir = marker_dir
        self._steps = 0

    def __bool__(self) -> bool:
        return bool(self._faults)

    def due(self, point: Point) -> list[Fault]:
        """The faults to carry out at this point of the process's life. Each call for ``step`` is a step."""
        if not self._faults:
            return []
        if point == "step":
            self._steps += 1
        here = [f for f in self._faults if f.point == point and f.step in (None, self._steps)]
        return [fault for fault in here if not fault.once or self._first_time(fault)]

    def _first_time(self, fault: Fault) -> bool:
        if self._marker_dir is None:
            if self._generation:
                return False
            self._faults.remove(fault)
            return True
        try:
            # Created before the fault strikes: it may be the last thing that this process does.
            (self._marker_dir / f"{fault.kind}-{self._who}-{fault.step or 0}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
