"""Several nodes on one machine, without agents: an executor, a stand-in for node 0's agent, and relay processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import zmq

from launcher.config import NodeSettings
from launcher.errors import Failure
from launcher.executor.multinode import MultinodeExecutor
from launcher.nodes.messages import (
    FromCore,
    GroupJoined,
    GroupLost,
    GroupWaiting,
    Member,
    OpenGroup,
    Reader,
    encode,
)
from tests.executor.rig import settings_of, specs_of

KEY = b"k" * 32


class Agent(threading.Thread):
    """Says `GroupJoined` at once, and tells the relays where to go."""

    def __init__(self, endpoint: str, nodes: list[Node], lost: Failure | None = None) -> None:
        super().__init__(daemon=True)
        self._nodes = nodes
        self._lost = lost
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(endpoint)
        self._done = threading.Event()
        self.heard: list[object] = []
        self.start()

    def run(self) -> None:
        reader, told = Reader(FromCore), False
        while not self._done.is_set():
            if not self._socket.poll(20):
                continue
            core, frame = self._socket.recv_multipart()
            word = reader.read(frame)
            self.heard.append(word)
            if not isinstance(word, OpenGroup):
                continue
            members = (
                Member(0, "near", "127.0.0.1"),
                *(Member(n.rank, "far.example", "127.0.0.1") for n in self._nodes),
            )
            if not told:
                self._socket.send_multipart([core, encode(GroupWaiting(word.generation, members[:1], (1,)))])
                for node in self._nodes:
                    node.go(word)
            told = True
            answer = GroupJoined(word.generation, members)
            last = GroupLost(word.generation, self._lost) if self._lost else answer
            self._socket.send_multipart([core, encode(last)])
        self._socket.close()
        self._context.term()

    def close(self) -> None:
        self._done.set()
        self.join(5)


class Node:
    """A relay process with its workers."""

    def __init__(self, rank: int, tmp: Path, specs: tuple[object, ...], settings: NodeSettings) -> None:
        self.rank = rank
        (tmp / f"specs{rank}").write_bytes(msgspec.msgpack.encode(specs))
        (tmp / f"nodes{rank}").write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(settings, node_rank=rank)))
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.executor.relay_process",
                str(rank),
                tmp / f"specs{rank}",
                tmp / f"nodes{rank}",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.pids = [int(pid) for pid in self.process.stdout.readline().split()[1:]]

    def go(self, word: OpenGroup) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.msgpack.encode(word).hex() + "\n")
        self.process.stdin.flush()

    def last_words(self, timeout: float = 10) -> str:
        return self.process.communicate(timeout=timeout)[0]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class Group:
    def __init__(self, executor: MultinodeExecutor, agent: Agent, nodes: list[Node]) -> None:
        self.executor = executor
        self.agent = agent
        self.nodes = nodes


@contextmanager
def group(
    tmp: Path,
    nnodes: int = 2,
    per_node: int = 2,
    *,
    key: bytes = b"",
    start: bool = True,
    env: dict[str, str] | None = None,
    lost: Failure | None = None,
    absent: bool = False,
) -> Iterator[Group]:
    """`absent`: the other nodes do not come."""
    nodes = NodeSettings(
        nnodes=nnodes,
        node_rank=0,
        ranks_per_node=per_node,
        master_addr="127.0.0.1",
        iface="lo",
        address="127.0.0.1",
        local_endpoint=f"ipc://{tmp}/agent.sock",
        key=key,
    )
    settings = settings_of(nnodes * per_node, awaits_group=True)
    settings = msgspec.structs.replace(settings, backend="mp-nodes", nodes=nodes)
    specs = specs_of(settings, env)
    others = [] if absent else [Node(k, tmp, specs[k * per_node : (k + 1) * per_node], nodes) for k in range(1, nnodes)]
    executor = agent = None
    try:
        executor = MultinodeExecutor(settings, specs=specs[:per_node], method="spawn")
        agent = Agent(nodes.local_endpoint, others, lost)
        if start:
            executor.start()
        yield Group(executor, agent, others)
    finally:
        if executor is not None:
            executor.shutdown(10)
        if agent is not None:
            agent.close()
        for node in others:
            node.close()
