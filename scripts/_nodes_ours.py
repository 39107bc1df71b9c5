"""Our way from node 0 to the workers of node 1, for `bench_nodes`: what a launch has, less the engine core's book.

Here: codec, `CoreLink`. On node 1: a process with `NodeLink`, `Relay` and `LocalGroup`, as a node agent is one, and the
workers that it starts. They carry out `take`, whose answer is the size of what came.
"""

from __future__ import annotations

import os
import secrets
from multiprocessing.connection import Connection

import msgspec
from _nodes_transports import ALL, Place, fork_on
from _testnet import inside

from launcher import clock
from launcher.clock import Deadline
from launcher.config import NodeSettings, RankSettings, WorkerSettings
from launcher.process.spec import ProcessSpec
from launcher.worker.reference import ReferenceWorker

_TOKEN = secrets.token_bytes(16)


class Taker(ReferenceWorker):
    def take(self, payload: bytes) -> int:
        return len(payload)


def specs(workers: int) -> tuple[ProcessSpec, ...]:
    """Ranks of node 1, behind as many of node 0."""
    world = 2 * workers
    return tuple(
        ProcessSpec(
            title=f"Worker_DP0_PP0_TP{rank}",
            role="worker",
            target="launcher.worker.main:run",
            rank=rank,
            payload=msgspec.msgpack.encode(
                WorkerSettings(
                    worker="_nodes_ours:Taker",
                    ranks=RankSettings(
                        rank=rank, local_rank=rank - workers, world_size=world, tp_rank=rank, tp_size=world
                    ),
                )
            ),
        )
        for rank in range(workers, world)
    )


class Ours:
    def __init__(self, place: Place, workers: int, key: bytes) -> None:
        self._place, self._workers, self._key = place, workers, key
        self._pid, self._line = fork_on(place.namespaces[1], self._relay)

    def _nodes(self, node: int) -> NodeSettings:
        address = self._place.addresses[0]
        return NodeSettings(
            nnodes=2, node_rank=node, ranks_per_node=self._workers, master_addr=address, address=address, key=self._key
        )

    # --- node 1

    def _relay(self, line: Connection) -> None:
        from launcher.executor.local_group import LocalGroup

        group = LocalGroup(specs(self._workers), "spawn")
        from launcher.executor.data_link import NodeLink
        from launcher.executor.relay import GroupEnded, Relay
        from launcher.nodes.messages import Hello
        from launcher.nodes.secure import Security

        relay = Relay(
            group, NodeLink(line.recv(), Security.of(self._nodes(1)), Hello(_TOKEN, 0, 1)), node=1, host="node1"
        )
        try:
            while True:
                relay.pump()
                relay.wait(Deadline.after(None))
        except GroupEnded:
            pass
        finally:
            relay.close()
            group.stop(2)

    # --- node 0

    def connect(self) -> None:
        from launcher.executor.core_link import CoreLink
        from launcher.executor.waits import Waits
        from launcher.ipc.waiting import Spin
        from launcher.nodes.messages import GroupReady
        from launcher.nodes.secure import Security
        from launcher.worker.rpc import make_codec

        with inside(self._place.namespaces[0]):
            security = Security.of(self._nodes(0))
            self._link = CoreLink(self._place.addresses[0], security, generation=0, token=_TOKEN, nodes=[1])
        self._codec, self._spin = make_codec(trusted=False), Spin()
        self._waits = Waits([], [self._link], [])
        self._call_id = 0
        self._line.send(self._link.endpoint)
        while not isinstance(self._next(), GroupReady):
            pass

    def _next(self) -> object:
        """What node 1 has to say. Waits as the executor does."""
        while (got := self._link.read()) is None:
            begin = clock.now()
            if not self._spin.run(self._link.has_news):
                self._waits.sleep(Deadline.after(60))
                self._spin.slept(int((clock.now() - begin) * 1e9))
        return got[1]

    def call(self, number: int, payload: bytes, answers: int) -> None:
        from launcher.executor.frames import Whole
        from launcher.worker.rpc import PlainCall

        del number  # calls have numbers of their own, one after the other
        self._call_id += 1
        reply_rank = ALL if answers == ALL else self._workers + answers
        frames = self._link.cut(self._codec.encode(PlainCall(self._call_id, reply_rank, "take", (payload,))))
        self._link.send(frames)
        while not self._link.flush():
            self._waits.sleep(Deadline.after(60))
        left = self._workers if answers == ALL else 1
        while left:
            whole = self._next()
            if not isinstance(whole, Whole):
                continue  # where the ranks are, for the watchdog
            reply = self._codec.decode(whole.tag, whole.head, whole.buffers)
            if (reply.call_id, reply.value) != (self._call_id, len(payload)):
                raise RuntimeError(f"rank {whole.rank} answered {reply}")
            left -= 1

    def close(self) -> None:
        from launcher.nodes.messages import EndGroup

        self._link.say(EndGroup("", 0, "the bench is over", orderly=True, final=True))
        os.waitpid(self._pid, 0)
        self._link.close()
