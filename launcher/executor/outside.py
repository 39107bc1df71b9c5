"""Node 0's ways to the other nodes in one hand: the data link, the line to its own agent, the rendezvous' socket.

Imported when the workers have been forked: ZMQ has threads.
"""

from __future__ import annotations

import secrets
import socket
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from launcher.config import NodeSettings
from launcher.errors import Failure, HostError
from launcher.executor.agent_line import AgentLine
from launcher.executor.core_link import CoreLink
from launcher.executor.data_link import Link
from launcher.executor.far_ranks import FarRanks
from launcher.executor.frames import Lost, Whole
from launcher.nodes.addresses import family_of, interface_environment, url_host
from launcher.nodes.messages import (
    CloseGroup,
    EndGroup,
    GroupFailed,
    GroupJoined,
    GroupLeaving,
    GroupLost,
    GroupProgress,
    GroupReady,
    GroupWaiting,
    OpenGroup,
    Places,
)
from launcher.nodes.secure import Security
from launcher.nodes.words import clean, plain
from launcher.worker.rpc import GroupPlace

_BACKLOG = 4096
"""Answers that may wait to be put into the book; beyond it ZMQ holds them, and then the nodes."""
_CONNECTIONS = 1024


class Outside:
    """One thread. What is heard goes into `far` and `arrived`. `close` it also after an error."""

    def __init__(self, nodes: NodeSettings, far: FarRanks, *, generation: int, launch_id: str) -> None:
        """Listens at this node's address and has the agent tell the nodes where. `HostError` if that cannot be."""
        self._far = far
        self._launch_id = launch_id
        self._nodes = nodes
        self.generation = generation
        self.arrived: deque[Whole] = deque()
        """Answers that are not in the book yet, each node's in order."""
        self.on_progress: Callable[[str], None] = lambda _text: None
        """Called with what a node, or who waits for one, has to tell."""
        token = secrets.token_bytes(16)
        with ExitStack() as undo:
            self._store = undo.enter_context(_listen(nodes.address))
            self._port: int = self._store.getsockname()[1]
            security = Security.of(nodes)
            self.link = CoreLink(nodes.address, security, generation=generation, token=token, nodes=far.nodes)
            undo.callback(self.link.close)
            group = OpenGroup(generation, token, self.link.endpoint, nodes.address, self._port)
            self.line = AgentLine(nodes.local_endpoint, group)
            undo.pop_all()

    @property
    def links(self) -> tuple[Link, Link]:
        """To be waited on."""
        return self.link, self.line

    def place(self, given: Mapping[str, str]) -> tuple[GroupPlace, int]:
        """What the workers of this node are told, and the listening socket for rank 0 (borrowed until `placed`).

        `given`: what their environment has by the plan or the user; it stays.
        """
        nodes = self._nodes
        found = interface_environment(nodes.iface, nodes.address) if nodes.iface else {}
        env = {name: value for name, value in found.items() if name not in given}
        url = f"tcp://{url_host(nodes.address)}:{self._port}/{self.generation}"
        return GroupPlace(url, self.generation, env), self._store.fileno()

    def placed(self) -> None:
        """Rank 0 has the socket: with it the port is to go."""
        self._store.close()

    def hear(self) -> None:
        """Take in all that has come, without blocking."""
        while len(self.arrived) < _BACKLOG and (got := self.link.read()) is not None:
            node, item = got
            match item:
                case Whole():
                    if self._far.node_of(item.rank) == node:
                        self.arrived.append(item)
                    else:
                        self._far.lost[node] = f"answered for rank {item.rank}, which it has not"
                case GroupReady():
                    self._far.ready.add(node)
                case GroupProgress(text):
                    self.on_progress(f"node {node}: {plain(text)}")
                case GroupFailed(failure, others):
                    self._far.failed(GroupFailed(clean(failure), tuple(map(clean, others))))
                case Places():
                    self._far.took(node, item)
                case Lost(why):
                    self._far.lost[node] = why
        while (word := self.line.read()) is not None:
            match word:
                case GroupWaiting(_, members, missing):
                    here = ", ".join(f"node {member.node_rank} ({member.host})" for member in members)
                    who = ", ".join(map(str, missing))
                    self.on_progress(f"(missing: {who}; joined: {here})")
                case GroupJoined(_, members):
                    self._far.joined(members)
                case GroupLeaving(_, failure):
                    self._far.leaving[failure.node] = failure
                case GroupLost(_, failure):
                    self._far.failures.append(failure)

    def end(self, reason: str, failure: Failure | None, *, orderly: bool) -> None:
        """The last words, to the nodes and to our agent."""
        word = EndGroup(self._launch_id, self.generation, reason, failure, final=orderly, orderly=orderly)
        self.link.say(word)
        self.line.end(CloseGroup(self.generation, reason, failure, orderly))

    def hung(self, failure: Failure) -> None:
        """To the nodes only: they show their stacks, and end. What follows here is the supervisor's to say."""
        self.link.say(EndGroup(self._launch_id, self.generation, failure.headline, failure))

    def close(self) -> None:
        self._store.close()
        self.link.close()
        self.line.close()


def _listen(address: str) -> socket.socket:
    """A listening TCP socket on a port that the kernel chooses: it is bound late, and by us, so nobody can take it."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        made = socket.socket(family, kind, protocol)
        try:
            if family_of(address) == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.bind(where)
            made.listen(_CONNECTIONS)
        except BaseException:
            made.close()
            raise
    except OSError as error:
        raise HostError(f"cannot listen on {address} for the ranks of other nodes: {error}; see --iface") from error
    return made
