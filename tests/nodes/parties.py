"""Leaders and followers in one process, on ports of their own, and a loop that drives them."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Iterator
from typing import TypeVar

from launcher.clock import now
from launcher.config import NodeSettings
from launcher.nodes.follower import Follower
from launcher.nodes.leader import Leader
from launcher.nodes.messages import OpenGroup

KEY = bytes(range(32))
OTHER_KEY = bytes(range(1, 33))
LOOPBACKS = ("127.0.0.1", "::1")


def free_port(address: str = "127.0.0.1") -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def settings(rank: int, port: int, **changes: object) -> NodeSettings:
    given: dict[str, object] = {
        "nnodes": 2,
        "node_rank": rank,
        "ranks_per_node": 1,
        "master_addr": "127.0.0.1",
        "master_port": port,
        "agreement": {"--max-model-len": "4096", "--dtype": "auto"},
    }
    return NodeSettings(**{**given, **changes})  # type: ignore[arg-type]


def group(generation: int = 0) -> OpenGroup:
    return OpenGroup(generation, b"token", "tcp://127.0.0.1:1", "127.0.0.1", 2)


P = TypeVar("P", Leader, Follower)


class Parties:
    """Several ends and all that they have told. `until` drives them as an agent's loop does."""

    def __init__(self) -> None:
        self.told: dict[object, list[object]] = {}

    def add(self, party: P) -> P:
        self.told[party] = []
        return party

    def leader(self, port: int, *, launch_id: str = "launch", version: str = "1", **changes: object) -> Leader:
        return self.add(Leader(settings(0, port, **changes), launch_id, version))

    def follower(self, port: int, rank: int = 1, *, owner: str = "", version: str = "1", **changes: object) -> Follower:
        owner = owner or f"owner{rank}"
        return self.add(Follower(settings(rank, port, **changes), owner, version, f"host{rank}"))

    def drop(self, party: Leader | Follower) -> None:
        del self.told[party]
        party.close()

    def of(self, party: Leader | Follower, kind: type) -> list[object]:
        return [event for event in self.told[party] if isinstance(event, kind)]

    def until(self, condition: Callable[[], object], seconds: float = 10.0, what: str = "") -> float:
        """Until it holds; the seconds that took. Fails the test at the deadline."""
        began = now()
        while True:
            self.pump()
            if condition():
                return now() - began
            if now() > began + seconds:
                raise AssertionError(f"not within {seconds} s: {what or condition}; told: {list(self.told.values())}")
            self.wait(0.2)

    def pump(self) -> None:
        for party, told in self.told.items():
            told += party.pump(now())  # type: ignore[attr-defined]

    def wait(self, longest: float) -> None:
        poll = select.poll()
        for party in self.told:
            for fd in party.fds():  # type: ignore[attr-defined]
                poll.register(fd, select.POLLIN)
        wait = min([longest, *(party.until_timer(now()) for party in self.told)])  # type: ignore[attr-defined]
        poll.poll(wait * 1000)

    def turn(self, longest: float) -> None:
        self.pump()
        self.wait(longest)

    def close(self) -> None:
        for party in list(self.told):
            party.close()  # type: ignore[attr-defined]


@contextlib.contextmanager
def parties() -> Iterator[Parties]:
    made = Parties()
    try:
        yield made
    finally:
        made.close()
