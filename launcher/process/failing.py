"""An exception of a child, as data for its parent (`launcher.errors.Failure`)."""

from __future__ import annotations

import os
import traceback

from launcher import clock
from launcher.errors import (
    ChildFailedError,
    Failure,
    FailureKind,
    NodeLostError,
    RemoteError,
    XserveError,
    is_peer_loss,
)
from launcher.process.spec import ProcessSpec

_MAX_TRACEBACK = 48 * 1024
"""Characters; the end of a traceback is what matters."""


def failure_of_exception(error: BaseException, spec: ProcessSpec, step: str) -> Failure:
    """A failure that only passes on another's is `peer_lost`: never the first cause."""
    kind: FailureKind = "raised"
    if isinstance(error, ChildFailedError | RemoteError) or is_peer_loss(error):
        kind = "peer_lost"
    trace = "".join(traceback.format_exception(error))
    return Failure(
        title=spec.title,
        role=spec.role,
        kind=kind,
        headline=_headline(error),
        step=step,
        rank=spec.rank,
        node=spec.node,
        pid=os.getpid(),
        traceback=trace[-_MAX_TRACEBACK:],
        at=clock.now(),
        permanent=isinstance(error, XserveError) and error.exit_code == 2,
        node_lost=isinstance(error, NodeLostError),
    )


def cause_behind(error: BaseException) -> Failure | None:
    """The failure of another process that `error` passes on, as far as this process knows it."""
    if isinstance(error, ChildFailedError):
        return error.cause
    if isinstance(error, RemoteError):
        return Failure(
            title=error.title,
            role="worker",
            kind="raised",
            headline=error.headline.partition(" raised ")[2] or error.headline,  # who it was stands in the fields
            step="serving",
            rank=error.rank,
            node=error.node,
            host=error.host,
            traceback=error.remote_traceback,
            at=clock.now(),
        )
    return None


def _headline(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    if isinstance(error, XserveError) and lines:
        return lines[0]  # made to be read alone
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
