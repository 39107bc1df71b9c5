"""How nodes and moments are written for people."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from launcher import clock
from launcher.errors import Failure
from launcher.nodes.messages import Member

_MAX = 200


def plain(text: str) -> str:
    """A stranger's text for a log: one line, printable, not long."""
    kept = "".join(character if character.isprintable() else "?" for character in text[:_MAX])
    return kept if len(text) <= _MAX else f"{kept}…"


def clean(failure: Failure) -> Failure:
    """Another node's failure for our screen: without what would move its cursor or colour it. Long texts stay long."""
    return msgspec.structs.replace(
        failure,
        title=plain(failure.title),
        headline=_printable(failure.headline),
        step=plain(failure.step),
        host=plain(failure.host),
        traceback=_printable(failure.traceback),
        last_output=tuple(map(_printable, failure.last_output)),
    )


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() or character in "\n\t" else "?" for character in text)


def named(member: Member) -> str:
    return f"node {member.node_rank} ({member.host}, {member.address})"


def ranks(numbers: Iterable[int]) -> str:
    return ", ".join(str(number) for number in numbers)


def time_of_day(at: float) -> str:
    """Of a moment on the monotonic clock. For reading only: nothing is measured with it."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - (clock.now() - at)))
