"""What travels between processes to attach a queue: its place and shape, never its contents."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec


class Watched(NamedTuple):
    """A peer whose death ends a wait. `pidfd` is borrowed: stop watching before you close it.

    Any descriptor serves that becomes readable when the peer is gone, and never before.
    """

    pidfd: int
    title: str
    rank: int | None
    pid: int


DESCRIPTORS = 4


class RingHandle(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a ring. The descriptors go beside it, in this order (by SCM_RIGHTS or inherited):

    ring memfd, arena memfd, the eventfd that wakes the writer, the one that wakes the readers.
    """

    name: str
    """For messages: ``plans``, ``answers 3``."""
    capacity: int
    """Bytes of data in the ring."""
    readers: int
    role: Literal["writer", "reader"]
    index: int = -1
    """A reader's number, 0 … readers - 1."""

    @property
    def descriptors(self) -> int:
        """How many go beside it."""
        return DESCRIPTORS

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> RingHandle:
        return msgspec.msgpack.decode(data, type=cls)


def describe_peer(peer: Watched | None, fallback: str) -> str:
    """``Worker_DP0_PP0_TP3 (rank 3, pid 4711)``"""
    if peer is None:
        return fallback
    rank = "" if peer.rank is None else f"rank {peer.rank}, "
    return f"{peer.title} ({rank}pid {peer.pid})"
