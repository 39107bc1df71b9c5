"""Every error of xserve, told apart by what its reader does next.

=====================  ====  ==================================================================
class                  exit  what to do
=====================  ====  ==================================================================
`UsageError`           2     fix the command line or the configuration
`HostError`            2     fix the machine: a port, a directory, memory, a device
`NotRunningError`      3     start an instance, or give the name of one that runs
`CannotTellError`      4     look by hand: it may be running, and did not answer
`ChildFailedError`     1     read the cause it carries: a child died, raised or was too slow
`DeadlineError`        1     a wait passed its deadline; the message names who was awaited
`PeerDiedError`        1     the other end of a queue or pipe is gone: broken by the world
`ClosedError`          1     the object was closed by us: a bug in the caller, or an orderly stop
`NodeLostError`        69    look at the other node: it is gone, silent, or cannot be reached
`EngineDeadError`      1     wait for the engine core to come back: it is gone, or not up yet
`PoisonError`          1     do not send the request again: the engine core dies of it
`RemoteError`          1     a method raised on a worker; carries the remote traceback
`InternalError`        1     a bug in xserve: report it
=====================  ====  ==================================================================

Closed (by us) is not broken (by the world). ``str(error)`` is always one clear line that a person can act on.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec


class XserveError(Exception):
    """Base of all our errors; never raised itself. `exit_code` is what the command line ends with."""

    exit_code = 1


class UsageError(XserveError):
    """The command line or a configuration value is wrong; the message holds the value and what to write instead."""

    exit_code = 2


class HostError(XserveError):
    """The machine cannot do what was asked (port taken, memory short, directory not writable)."""

    exit_code = 2


class NotRunningError(XserveError):
    """There is no such instance (`status`, `stop`)."""

    exit_code = 3


class CannotTellError(XserveError):
    """An instance is there and cannot be asked: another user's, or it does not answer."""

    exit_code = 4


class DeadlineError(XserveError, TimeoutError):
    """A wait passed its deadline. The message says what was awaited, from which rank and pid, and for how long."""


class ClosedError(XserveError):
    """The object was closed by this process."""


class ForkerLostError(XserveError):
    """The helper was asked for a fork and did not give one: it is dead, stopped or hung."""


class InternalError(XserveError):
    """A bug in xserve."""


class PeerDiedError(XserveError):
    """The process at the other end died while we waited for it, or before we wrote to it."""

    def __init__(self, message: str, *, title: str = "", rank: int | None = None, pid: int | None = None) -> None:
        super().__init__(message)
        self.title = title
        self.rank = rank
        self.pid = pid


class NodeLostError(PeerDiedError):
    """Another node is gone, silent or out of reach; the message names it, its address and when it was last heard."""

    exit_code = 69


class EngineDeadError(PeerDiedError):
    """The engine core is gone, or not up yet: the request was not served to its end."""


class PoisonError(XserveError):
    """The request was given up: its engine core died of it, twice with nothing else running. `deaths`: how often."""

    def __init__(self, deaths: int) -> None:
        super().__init__(
            f"the engine core died {deaths} times while it worked on this request, the last two times on it alone; "
            "the request was given up, do not send it again"
        )
        self.deaths = deaths


class RemoteError(XserveError):
    """A method raised on a worker. `remote_traceback` is that process's own text; `type_name` its exception type.

    `host` is empty, and `node` 0, unless the worker is on another machine.
    """

    def __init__(
        self,
        message: str,
        *,
        type_name: str,
        remote_traceback: str,
        title: str = "",
        rank: int | None = None,
        node: int = 0,
        host: str = "",
    ):
        super().__init__(message)
        self.type_name = type_name
        self.remote_traceback = remote_traceback
        self.title = title
        self.rank = rank
        self.node = node
        self.host = host

    def __str__(self) -> str:
        return f"{self.args[0]}\n\nOn {self.title or f'rank {self.rank}'}:\n{self.remote_traceback}".rstrip()

    @property
    def headline(self) -> str:
        return str(self.args[0])


FailureKind = Literal["died", "raised", "timeout", "peer_lost"]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a process of the tree failed, as data: it travels over pipes, is ranked, printed and put into bundles.

    ``kind``: ``died`` = a hard death that we did not cause (signal, exit code without a report); ``raised`` = an
    exception of the process's own; ``peer_lost`` = it failed only because another one was gone; ``timeout`` = no
    progress within a limit.
    """

    title: str
    role: str
    kind: FailureKind
    headline: str
    """One line: the exception's type and text, or how it died."""
    step: str = ""
    """The lifecycle step it was in."""
    rank: int | None = None
    node: int = 0
    host: str = ""
    """Of a failure on another node."""
    pid: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    traceback: str = ""
    last_output: tuple[str, ...] = ()
    at: float = 0.0
    """Monotonic seconds, on the node where it happened."""
    permanent: bool = False
    """True: the same start would fail again for the same reason (usage, model missing); never retried."""
    node_lost: bool = False
    """A peer node is gone or cannot be reached: exit 69, or a wait for its return."""


class ChildFailedError(XserveError):
    """One or more children failed. `cause` is the first cause; `follow_ons` happened because of it."""

    def __init__(self, cause: Failure, follow_ons: tuple[Failure, ...] = ()) -> None:
        super().__init__(describe(cause))
        self.cause = cause
        self.follow_ons = follow_ons
        if cause.permanent:
            self.exit_code = 2
        elif cause.node_lost:
            self.exit_code = NodeLostError.exit_code


BEING_STOPPED = "it is being stopped"
"""What a node says that its operator stops: no failure of anything."""


def describe(failure: Failure) -> str:
    """The headline with its who and where, in one line."""
    if failure.role == "node_agent" and failure.pid is None and failure.headline.startswith("node "):
        return failure.headline  # of a node as a whole: who and where stand in it
    who = failure.title
    if failure.rank is not None:
        who = f"rank {failure.rank} ({failure.title})"
    if failure.host:
        who += f" on node {failure.node} ({failure.host})"
    pid = f", pid {failure.pid}" if failure.pid else ""
    step = f", step {failure.step}" if failure.step else ""
    return f"{who}{pid}{step}: {failure.headline}"


_PEER_LOSS = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|(closed|reset) by peer|broken pipe|socket (is )?closed"
    r"|remote process exited|peer .{0,40}(gone|died|closed)|ncclRemoteError|NCCL communicator was aborted",
    re.IGNORECASE,
)
"""How gloo, NCCL and sockets put it when another rank has gone away."""


def is_peer_loss(error: BaseException) -> bool:
    """Whether `error` only says that somebody else is gone: a consequence, not a cause."""
    if isinstance(error, PeerDiedError | ConnectionError | EOFError):
        return True
    if isinstance(error, XserveError):
        return False
    try:
        text = str(error)
    except Exception:
        return False  # its author's code failed: that is a fault of its own
    return _PEER_LOSS.search(text) is not None
