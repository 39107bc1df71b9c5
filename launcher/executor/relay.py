"""A node's end of a group: what comes over the data link goes to the workers' ring, what they answer goes back.

Lossless, in order, and as bytes: nothing is decoded but to check it (`worker.rpc.make_check`), nothing unpickled. Both
ways have back-pressure of their own. While the ring is full no call is read from the link, while the core takes nothing
no answer is read from the rings; the other way, deaths and the group's end go on. So memory is bounded: by what ZMQ
holds (`data_link.HWM`) and one message each way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from launcher.clock import Deadline
from launcher.errors import (
    XserveError,
)
from launcher.executor.data_link import NodeLink
from launcher.executor.local_group import LocalGroup
from launcher.nodes.messages import EndGroup

log = logging.getLogger(__name__)


class GroupEndedError(XserveError):
    """Node 0 has ended the group; `word` says why."""

    def __init__(self, word: EndGroup) -> None:
        super().__init__(f"node 0 has ended the group: {word.reason}")
        self.word = word


class Relay:
    """`pump`, then `wait`, again and again; after an error `close`. The group is the caller's to stop, and the link is
    closed with the relay."""

    def __init__(self, group: LocalGroup, link: NodeLink, *, node: int, host: str) -> None:
        """Makes the group's queues; their workers must have got, or get, their `GroupPlace` from the caller. `node` and
        `host` are put into failures."""

    def pump(self) -> None:
        """Move what can be moved both ways, without blocking; say what is new to the core.

        Raises `ChildFailedError` for a worker (node and host are in the failure; the core has been told),
        `NodeLostError` when the core is gone, `GroupEndedError` when it has ended the group.
        """

    def wait(self, deadline: Deadline, extra_fds: Sequence[int] = ()) -> list[int]:
        """Sleep until `pump` has something to do, one of `extra_fds` is readable, or time is up; those that are.

        Descriptors of ZMQ among them: ask the sockets first, as `launcher.nodes.sockets` says.
        """
        return []

    @property
    def is_ready(self) -> bool:
        """All workers are READY, and the core was told."""
        return False

    def close(self) -> None:
        """The data link, with what was said last. Idempotent."""
