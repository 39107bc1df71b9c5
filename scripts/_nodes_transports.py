"""Ways from node 0 to eight workers on node 1 and back, for `bench_nodes`: vLLM's. Ours is in `_nodes_ours`.

A transport is made in the writer's process, which is on node 0, and starts its workers on node 1 itself. It sends the
same small message as in `_transports`: a record of the call's number and the payload.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol

import _cell
from _testnet import inside

ALL = -1


class Place(NamedTuple):
    """Where the two nodes are."""

    namespaces: tuple[str, str]
    addresses: tuple[str, str]


class Transport(Protocol):
    """Its constructor forks what is to be on node 1, while nothing here has a thread yet."""

    def connect(self) -> None: ...
    def call(self, number: int, payload: bytes, answers: int) -> None:
        """To all workers, and wait for the acknowledgements: of one rank, or of `ALL`."""

    def close(self) -> None: ...


def fork_on(namespace: str, target: Callable[[Connection], None]) -> tuple[int, Connection]:
    """A child on that node, which dies with us; its pid and a pipe to it."""

    def there(line: Connection) -> None:
        with inside(namespace):
            target(line)

    return _cell.fork(there)


class Vllm:
    """MessageQueue as vLLM's executor makes it over several nodes: a subscription per remote worker, a queue back."""

    def __init__(self, place: Place, workers: int) -> None:
        self._place = place
        work = functools.partial(self._work, address=place.addresses[1])
        self._children = [fork_on(place.namespaces[1], work) for _ in range(workers)]

    def connect(self) -> None:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        with inside(self._place.namespaces[0]):
            self._down = MessageQueue(len(self._children), 0, connect_ip=self._place.addresses[0])
            for rank, (_, line) in enumerate(self._children):
                line.send((rank, self._down.export_handle()))
            self._acks = [MessageQueue.create_from_handle(line.recv(), -1) for _, line in self._children]
            self._down.wait_until_ready()
            for ack in self._acks:
                ack.wait_until_ready()

    @staticmethod
    def _work(line: Connection, address: str) -> None:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        rank, handle = line.recv()
        down = MessageQueue.create_from_handle(handle, rank)
        up = MessageQueue(1, 0, connect_ip=address)
        line.send(up.export_handle())
        down.wait_until_ready()
        up.wait_until_ready()
        while (got := down.dequeue(indefinite=True)) is not None:
            number, answers, payload = got
            if answers in (ALL, rank):
                up.enqueue((number, len(payload)))

    def call(self, number: int, payload: bytes, answers: int) -> None:
        self._down.enqueue((number, answers, payload))
        for ack in self._acks if answers == ALL else self._acks[answers : answers + 1]:
            came, size = ack.dequeue()
            assert (came, size) == (number, len(payload))

    def close(self) -> None:
        self._down.enqueue(None)
        for pid, _ in self._children:
            os.waitpid(pid, 0)


def make(name: str, place: Place, workers: int, key: bytes) -> Transport:
    if name == "vllm":
        return Vllm(place, workers)
    import _nodes_ours

    made: Transport = _nodes_ours.Ours(place, workers, key if name == "xserve with key" else b"")
    return made
