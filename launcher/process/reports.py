"""Messages between a child and its parent (and, mirrored, the supervisor) over the channel. No I/O here.

Up (child → parent): `Born`, `StepReport`, `ReadyReport`, `FailureReport`, `Hang`, `Pong`, `ChildStarted`, `ChildGone`,
`Drained`, `Leave`, `Goodbye`.
Down (parent → child): `Birth` first, then `Handover`, `TreeState`, `Drain`, `Stop`, `Ping`; to the helper `Fork`,
`Guard`, `Unguard`.
EOF in either direction = the process at the other end is gone.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from launcher.errors import Failure
from launcher.process.spec import ProcessSpec


class Step(StrEnum):
    """The life of a child, in order. Both sides run from this one list; `lifecycle` holds who may go where."""

    SPAWNED = "spawned"
    FDS_CLOSED = "foreign fds closed"
    WATCHING = "watching parent"
    JOIN = "waiting for the other nodes"
    IMPORT = "import"
    DEVICE = "device"
    GROUPS = "groups"
    MODEL = "model"
    QUEUES = "queues"
    KV_CACHE = "kv cache"
    WARM_UP = "warm-up"
    READY = "ready"
    SERVING = "serving"
    STOPPING = "stopping"
    GONE = "gone"


# --- up ----------------------------------------------------------------------------------------------------------


class StepReport(msgspec.Struct, frozen=True, tag=True):
    """The child has entered `step`, or made progress within it (`done` of `total` `unit`)."""

    step: Step
    detail: str = ""
    done: float = 0
    total: float = 0
    unit: str = ""


class ReadyReport(msgspec.Struct, frozen=True, tag=True):
    """The child is READY; `info` is for its parent (a core: model length, KV blocks …)."""

    info: dict[str, Any] = {}


class FailureReport(msgspec.Struct, frozen=True, tag=True):
    """The sender failed. `cause`: the failure of one of its own children that made it fail, as far as it knows."""

    failure: Failure
    cause: Failure | None = None
    notes: tuple[str, ...] = ()
    """What it did last, for the crash bundle."""


class Hang(msgspec.Struct, frozen=True, tag=True):
    """A child of the sender is hung. The sender lives on, so that the stacks of all can be shown first."""

    failure: Failure
    notes: tuple[str, ...] = ()


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The sender's main loop turns: the answer to `Ping`."""

    number: int


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The group of nodes was ended in order (by node 0): this node's tree is to stop as well, exit 0."""

    reason: str


class ChildStarted(msgspec.Struct, frozen=True, tag=True):
    """An engine core started a worker: so that the supervisor knows every pid of the tree."""

    title: str
    pid: int
    start_time: int
    """Field 22 of /proc/<pid>/stat, ticks since boot: with the pid it names the process for ever."""


class ChildGone(msgspec.Struct, frozen=True, tag=True):
    """An engine core has reaped a worker. `wanted`: it was told to go."""

    title: str
    pid: int
    exit_code: int | None
    signal: int | None
    wanted: bool


class Born(msgspec.Struct, frozen=True, tag=True):
    """First word of a child of the forkserver: its pid, sent once it has become the supervisor's child."""

    pid: int


class Drained(msgspec.Struct, frozen=True, tag=True):
    """An API server has no request left; `cut` were aborted because the time was over."""

    cut: int = 0


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """Last words of an orderly end: an EOF after this is no death."""


# --- down --------------------------------------------------------------------------------------------------------


class Birth(msgspec.Struct, frozen=True, tag=True):
    """First message to every child. `fd_names` name the descriptors sent along, in order.

    ``status``: a second channel, to the supervisor, that mirrors every report (workers). ``output``: becomes fds 1
    and 2. ``child:<title>:status`` and ``child:<title>:output``: to be handed on to that child. Others are the role's
    own (``http``).
    """

    spec: ProcessSpec
    fd_names: tuple[str, ...] = ()


class Handover(msgspec.Struct, frozen=True, tag=True):
    """Descriptors for a step (rings for ``queues``): `payload` says what they are."""

    name: str
    payload: bytes = b""


class TreeState(msgspec.Struct, frozen=True, tag=True):
    """To API servers and node agents whenever it changes. `state`: starting, ready, recovering, draining, stopping,
    failed."""

    state: str
    phase: str = ""
    info: dict[str, Any] = {}


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Admit nothing more, finish what runs within `budget` seconds, then send `Drained`. Goes to API servers and node
    agents; an agent of a tree without API servers is waited for as they are, until it ends by itself."""

    budget: float


class Ping(msgspec.Struct, frozen=True, tag=True):
    """To be answered by `Pong` from the main loop."""

    number: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Stop within `budget` seconds."""

    budget: float


# --- supervisor → its helper (forkserver or guard); the helper answers with the reports above -----------------------


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Fork a child for `parent_pid`; its end of the channel comes along as the only descriptor."""

    parent_pid: int


class Guard(msgspec.Struct, frozen=True, tag=True):
    """These sessions (leader's pid → start time) are ours: end them if the supervisor dies without a word."""

    sessions: dict[int, int]


class Unguard(msgspec.Struct, frozen=True, tag=True):
    """The process is gone and reaped."""

    pid: int


UpMessage = (
    StepReport | ReadyReport | FailureReport | ChildStarted | ChildGone | Born | Hang | Pong | Drained | Goodbye | Leave
)
DownMessage = Birth | Handover | TreeState | Drain | Stop | Ping | Fork | Guard | Unguard
