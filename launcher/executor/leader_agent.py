"""Node 0's agent: lets the other nodes in, and tells the engine core when all of them are there, or one is lost.

It holds no workers: those of node 0 are the engine core's. So it survives every life of the core, and a core that comes
back finds the nodes that have stayed. What it knows can be built again from what others repeat each second: the nodes'
beats, the core's `OpenGroup`. An agent that is killed is therefore started again, and no group is lost by it.

    engine core ──ipc──► `CoreLine`, in the run directory (0700: this user's processes only)
    other nodes ──tcp──► `launcher.nodes.leader.Leader`, on the master port
"""

from __future__ import annotations

import contextlib
import logging
import os
import select

import zmq

from launcher import __version__, clock
from launcher.clock import Deadline
from launcher.config import AgentSettings
from launcher.errors import HostError, UsageError, describe
from launcher.nodes.leader import Joined, Leader, Lost, Mismatch, Ready, Refused
from launcher.nodes.messages import (
    CloseGroup,
    FromCore,
    GroupJoined,
    GroupLeaving,
    GroupLost,
    GroupWaiting,
    Member,
    OpenGroup,
    Reader,
    WireError,
    encode,
)
from launcher.nodes.sockets import has_input
from launcher.nodes.words import named
from launcher.process.child import ChildContext
from launcher.process.reports import Step, TreeState

log = logging.getLogger(__name__)

_TELL = 1.0
"""Seconds between two words to a core that waits for nodes."""
_SHOW = 10.0
"""Seconds between two lines that say who has joined."""
_LEAVING = 2.0
"""Seconds for our own supervisor to begin a drain, after a node has said that it is being stopped: a batch system stops
all nodes at once, and a drain is not to be cut short by the first of them that says so."""


_ENDING = ("draining", "stopping", "failed")
"""States of a tree that is on its way to its end."""


class CoreLine:
    """The agent's end of the line to the engine core of its node. Never blocks."""

    def __init__(self, endpoint: str) -> None:
        self._path = endpoint.removeprefix("ipc://")
        self._reader = Reader(FromCore)
        self._core = b""
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise HostError(f"cannot listen at {endpoint!r} for the engine core: {error}") from error

    def fileno(self) -> int:
        """See `launcher.nodes.sockets` on waiting."""
        return int(self._socket.fileno())

    @property
    def has_input(self) -> bool:
        return has_input(self._socket)

    def read(self) -> OpenGroup | CloseGroup | None:
        while True:
            try:
                self._core, frame = self._socket.recv_multipart(zmq.DONTWAIT)
                return self._reader.read(frame)  # type: ignore[return-value]
            except zmq.Again:
                return None
            except (WireError, ValueError) as error:
                log.warning("the engine core's line: %s", error)

    def say(self, message: GroupWaiting | GroupJoined | GroupLeaving | GroupLost) -> None:
        """To the core that spoke last; dropped if it is gone."""
        if self._core:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send_multipart([self._core, encode(message)], zmq.DONTWAIT)

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
        with contextlib.suppress(OSError):
            os.unlink(self._path)


class LeaderAgent:
    """`run` once. Raises `UsageError` for a node whose settings can never fit, while nothing serves yet."""

    def __init__(self, ctx: ChildContext, settings: AgentSettings) -> None:
        self._ctx = ctx
        self._nodes = settings.nodes
        self._wanted: OpenGroup | None = None
        """The group of the core that is alive."""
        self._joined = False
        """All nodes were told to start it."""
        self._tell_at = self._show_at = 0.0
        self._state = TreeState(state="")
        self._held: list[tuple[float, Lost]] = []
        """Nodes that said that they are being stopped, and when the core is to hear of it."""
        self._leader = Leader(settings.nodes, ctx.spec.launch_id, __version__)
        try:
            self._line = CoreLine(settings.nodes.local_endpoint)
        except BaseException:
            self._leader.close()
            raise

    def run(self) -> None:
        try:
            self._ctx.ready({})
            self._ctx.enter(Step.SERVING)
            while not self._ctx.stop_requested:
                self._turn()
                self._wait()
            self._end()
        finally:
            self._line.close()
            self._leader.close()

    # --- the loop

    def _wait(self) -> None:
        poll = select.poll()
        for fd in (*self._leader.fds(), self._line.fileno(), self._ctx.fileno()):
            poll.register(fd, select.POLLIN)
        now = clock.now()
        waits = [at - now for at, _ in self._held]
        if self._wanted is not None and not self._joined:
            waits += [self._tell_at - now, self._show_at - now]
        if self._line.has_input:
            waits.append(0.0)
        soonest = min([self._leader.until_timer(now), *waits])
        poll.poll(Deadline.after(soonest).remaining_ms() if soonest > 0 else 0)

    def _turn(self) -> None:
        for message in self._ctx.poll_messages():
            if isinstance(message, TreeState):
                self._state = message
                if message.state in ("draining", "stopping"):
                    self._leader.is_ending()
        while (said := self._line.read()) is not None:
            self._from_core(said)
        for event in self._leader.pump(clock.now()):
            self._from_nodes(event)
        self._timers(clock.now())

    def _from_core(self, message: OpenGroup | CloseGroup) -> None:
        if isinstance(message, CloseGroup):
            self._leader.close_group(message)
            if self._wanted is not None and message.generation == self._wanted.generation:
                self._wanted = None
            return
        if self._wanted is None or message.generation != self._wanted.generation:
            self._joined = False
            self._held.clear()
        self._wanted = message
        self._leader.open_group(message)

    def _from_nodes(self, event: object) -> None:
        match event:
            case Joined(member):
                log.info("%s has joined: %s", named(member), self._who())
            case Ready(members):
                self._joined = True
                if self._wanted is not None:
                    self._line.say(GroupJoined(self._wanted.generation, members))
            case Lost(failure, leaving):
                log.warning("%s", describe(failure))
                if leaving:
                    if self._wanted is not None:
                        self._line.say(GroupLeaving(self._wanted.generation, failure))
                    self._held.append((clock.now() + _LEAVING, event))
                else:
                    self._lost(event)
            case Mismatch(reason):
                raise UsageError(reason)
            case Refused(reason):
                log.warning("refused: %s", reason)

    def _lost(self, event: Lost) -> None:
        self._joined = False
        if self._wanted is not None:
            self._line.say(GroupLost(self._wanted.generation, event.failure))

    def _timers(self, now: float) -> None:
        due = [event for at, event in self._held if at <= now]
        self._held = [(at, event) for at, event in self._held if at > now]
        for event in due:
            if self._state.state not in ("draining", "stopping"):
                self._lost(event)
        if self._wanted is None or self._joined:
            return
        if now >= self._tell_at:
            self._tell_at = now + _TELL
            self._line.say(GroupWaiting(self._wanted.generation, self._here, self._leader.missing))
        if now >= self._show_at:
            self._show_at = now + _SHOW
            log.info("%s", self._who())

    @property
    def _here(self) -> tuple[Member, ...]:
        """Without those that are in a group that is over, and have to come again."""
        return tuple(member for member in self._leader.members if member.node_rank not in self._leader.missing)

    def _who(self) -> str:
        names = ", ".join(named(member) for member in self._here)
        missing = self._leader.missing
        if not missing:
            return f"all {self._nodes.nnodes} nodes are here: {names}"
        wanted = ", ".join(str(rank) for rank in missing)
        return f"waiting for node{'s' * (len(missing) > 1)} {wanted} of {self._nodes.nnodes}; joined: {names}"

    # --- end

    def _end(self) -> None:
        """Told to stop: the other nodes are to stop too. Whether all is well, the last word of the tree says.

        A tree that has said nothing of an end is gone, or goes on without us: then we say nothing either, and the other
        nodes wait for node 0 as their restart policy says.
        """
        for message in self._ctx.poll_messages():
            if isinstance(message, TreeState):
                self._state = message
        if self._state.state not in _ENDING:
            return
        failed = self._state.state == "failed"
        reason = self._state.phase if failed else "node 0 was stopped"
        generation = self._wanted.generation if self._wanted is not None else -1
        self._leader.close_group(CloseGroup(generation, reason, orderly=not failed), final=True)
