"""Messages on the control socket: one JSON object a line, one request and one reply a connection. No I/O here.

Client → supervisor: `StatusRequest`, `StopRequest`. Supervisor → client: `StatusReply`, `StopReply`, `ErrorReply`.
``type`` tells them apart; fields that the reader does not know are skipped, so that either side may be older.
"""

from __future__ import annotations

import msgspec

REQUEST_BYTES = 64 << 10
"""The longest request line; a client that sends more is dropped."""
REPLY_BYTES = 16 << 20
"""The longest reply line that a client takes."""


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the tree, as `xserve status` shows it."""

    title: str
    role: str
    rank: int | None = None
    node: int = 0
    pid: int
    phase: str
    """The lifecycle step that it is in."""
    since: float
    """Unix seconds at which it entered the phase."""
    restarts: int = 0


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What `xserve status --json` prints: these fields, this order."""

    name: str
    state: str
    """starting, ready, draining, stopping, failed"""
    since: float
    """Unix seconds at which it came into the state."""
    url: str
    processes: tuple[ProcessStatus, ...] = ()


class StatusRequest(msgspec.Struct, frozen=True, tag_field="type", tag="status"):
    """What is running?"""


class StopRequest(msgspec.Struct, frozen=True, tag_field="type", tag="stop"):
    """Stop in order. `budget`: seconds for the whole tree; None: the launch's ``--shutdown-timeout``."""

    budget: float | None = None


class StatusReply(msgspec.Struct, frozen=True, tag_field="type", tag="status"):
    status: InstanceStatus


class StopReply(msgspec.Struct, frozen=True, tag_field="type", tag="stop"):
    """The stop has begun. It is over when the supervisor, `pid`, is gone: within `budget` seconds."""

    pid: int
    budget: float


class ErrorReply(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    message: str
    """One line."""


Request = StatusRequest | StopRequest
Reply = StatusReply | StopReply | ErrorReply

_requests = msgspec.json.Decoder(Request)
_replies = msgspec.json.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """One line, newline included; JSON text holds no raw newline."""
    return msgspec.json.encode(message) + b"\n"


def decode_request(line: bytes) -> Request:
    """`msgspec.DecodeError` (a ValueError) says what is wrong."""
    request: Request = _requests.decode(line)
    return request


def decode_reply(line: bytes) -> Reply:
    reply: Reply = _replies.decode(line)
    return reply
