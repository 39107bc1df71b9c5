"""A node's agent: target ``launcher.executor.node_agent:run``, payload `AgentSettings`.

On node 0 it is the door (`leader_agent`). On every other node it is the parent of the workers and the relay between
them and the engine core of node 0: `FollowerAgent`, by the table in `agent_life`. One life of it is in one group at
most: whichever way the group ends, the agent ends its workers and itself, and its supervisor starts the next life,
which joins again.

Order matters, as in an engine core: the workers are forked first, before anything makes a thread or a ZMQ context.
"""

from __future__ import annotations

import logging
import re
import select
import socket as stdlib

import msgspec

from launcher import __version__, clock
from launcher.clock import Deadline
from launcher.config import AgentSettings
from launcher.errors import BEING_STOPPED, ChildFailedError, NodeLostError, UsageError, XserveError
from launcher.executor.agent_life import Action, Event, State, next_cell
from launcher.executor.data_link import NodeLink
from launcher.executor.leader_agent import LeaderAgent
from launcher.executor.local_group import LocalGroup
from launcher.executor.relay import GroupEnded, Relay
from launcher.nodes.addresses import host_port, interface_environment, url_host
from launcher.nodes.events import Accepted, Ended, FollowerEvent, LeaderLost, Refused, Started, TimedOut, Unreachable
from launcher.nodes.follower import Follower
from launcher.nodes.messages import EndGroup, Hello, StartGroup
from launcher.nodes.secure import Security
from launcher.nodes.words import named
from launcher.process.child import ChildContext
from launcher.process.reports import Drain, Leave, Step, TreeState
from launcher.worker.rpc import GroupPlace

log = logging.getLogger(__name__)

FAILED_BUDGET = 1.0
"""Seconds for the workers to end after a failure."""
_CAUSE_WAIT = 1.0
"""Seconds for node 0 to say why, after the way to its engine core is gone."""
_STACKS_WAIT = 10.0
"""Seconds for our supervisor to show the stacks of a hung group and to end us."""
_REPORT = 1.0
"""Seconds between two signs of life while we wait for the other nodes."""


def run(ctx: ChildContext) -> None:
    """Live as a node's agent. Returns after an orderly end."""
    settings = msgspec.msgpack.decode(ctx.spec.payload, type=AgentSettings)
    if settings.nodes.node_rank == 0:
        ctx.watch_parent()
        LeaderAgent(ctx, settings).run()
        return
    group = LocalGroup(ctx.spec.children, ctx.spec.child_method, ctx=ctx, ring_bytes=settings.ring_bytes)
    budget = FAILED_BUDGET
    try:
        ctx.watch_parent()
        budget = FollowerAgent(ctx, settings, group).run().remaining()
        ctx.enter(Step.STOPPING)
    finally:
        for title in group.stop(budget):
            log.warning("%s did not end in time and was killed", title)


class FollowerAgent:
    """`run` once; the caller ends the workers.

    Raises what ended the group: `ChildFailedError` with the first cause, `NodeLostError`, `UsageError` when node 0 will
    never let this node in.
    """

    def __init__(self, ctx: ChildContext, settings: AgentSettings, group: LocalGroup) -> None:
        self._ctx = ctx
        self._settings = settings
        self._nodes = settings.nodes
        self._group = group
        self._host = stdlib.gethostname()
        self._node_0 = f"node 0 at {host_port(self._nodes.master_addr, self._nodes.master_port)}"
        self._state = State.JOINING
        self._error: XserveError | None = None
        self._reason = ""
        """Why it is over, for people, when it is no error."""
        self._tree = ""
        """The state of our supervisor's tree, as last told."""
        self._stop_by = Deadline.after(None)
        self._fallen: tuple[Deadline, XserveError] | None = None
        """The group is over, with this error unless somebody knows better until then."""
        self._report_at = 0.0
        self._relay: Relay | None = None
        self._start: StartGroup | None = None
        self._follower = Follower(settings.nodes, settings.nodes.owner, __version__, self._host)

    def run(self) -> Deadline:
        """Until it is over; the time that is left for ending the workers."""
        try:
            # A start that fails on this node is stopped by our supervisor, and node 0 is still to hear why.
            self._ctx.heed_sigterm()
            self._ctx.enter(Step.JOIN, self._who())
            while self._state is not State.OVER:
                self._wait()
                self._turn()
            if self._error is not None:
                raise self._error
            return self._stop_by.earlier(self._settings.shutdown_timeout)
        finally:
            if self._relay is not None:
                self._relay.close()
            self._follower.close()

    # --- the loop

    def _wait(self) -> None:
        now = clock.now()
        soonest = self._follower.until_timer(now)
        if self._state is State.JOINING:
            soonest = min(soonest, self._report_at - now)
        if self._fallen is not None:
            soonest = min(soonest, self._fallen[0].remaining())
        deadline = Deadline.after(max(0.0, soonest)).earlier(self._stop_by.remaining())
        fds = [*self._follower.fds(), self._ctx.fileno()]
        if self._relay is not None and self._fallen is None:
            self._relay.wait(deadline, fds)
            return
        poll = select.poll()
        for fd in (*fds, self._group.fileno()):
            poll.register(fd, select.POLLIN)
        poll.poll(deadline.remaining_ms())

    def _turn(self) -> None:
        messages, stopped = self._ctx.news()
        if stopped:
            self._look_after_workers()  # it may follow from what they have to tell
        for message in messages:
            if isinstance(message, TreeState):
                self._tree = message.state
            else:
                self._stop_by = self._stop_by.earlier(message.budget)
                self._happen(Event.DRAIN if isinstance(message, Drain) else Event.STOP)
        if stopped:
            self._happen(Event.STOP)
        for event in self._follower.pump(clock.now()):
            self._from_node_0(event)
        self._look_after_workers()
        self._timers(clock.now())

    def _look_after_workers(self) -> None:
        try:
            if self._relay is not None and self._fallen is None:
                self._relay.pump()
                if self._relay.is_ready:
                    self._happen(Event.WORKERS_READY)
            elif (error := self._group.look()) is not None:
                raise error
        except GroupEnded as ended:
            self._ended(ended.end)
        except NodeLostError as error:
            lost = NodeLostError(f"{self._node_0} is lost, {self._follower.last_heard}: {error}")
            self._fallen = (Deadline.after(_CAUSE_WAIT), lost)
        except ChildFailedError as error:
            self._follower.leave(str(error), error.cause)
            self._broken(error)

    def _timers(self, now: float) -> None:
        if self._fallen is not None and self._fallen[0].expired:
            self._lost(self._fallen[1])
        if self._state is State.JOINING and now >= self._report_at:
            self._report_at = now + _REPORT
            self._ctx.progress(0, detail=self._who())
        if self._state is State.PARTING and self._stop_by.expired:
            self._happen(Event.STOP)

    def _who(self) -> str:
        here = ", ".join(f"node {m.node_rank} ({m.host})" for m in self._follower.members)
        return f"({here} joined)" if here else f"({self._node_0})"

    # --- node 0's words

    def _from_node_0(self, event: FollowerEvent) -> None:
        match event:
            case Accepted(members):
                log.info(
                    "joined by %s (%s); here: %s",
                    self._follower.iface,
                    self._follower.address,
                    ", ".join(named(member) for member in members),
                )
            case Started(start):
                self._start = start
                self._happen(Event.GROUP_STARTED)
            case Ended(end):
                self._ended(end)
            case Refused(reason):
                self._broken(UsageError(reason))
            case Unreachable(text):
                log.warning("%s", text)
            case TimedOut(text):
                self._broken(NodeLostError(text, title="NodeAgent_N0"))
            case LeaderLost(text):
                if self._state is State.JOINING:
                    log.warning("%s", text)
                else:
                    self._lost(NodeLostError(text, title="NodeAgent_N0"))

    def _ended(self, end: EndGroup) -> None:
        self._reason = end.reason
        if end.failure is not None and end.failure.kind == "timeout" and self._state is State.SERVING:
            # First our supervisor shows the stacks of what is here: to find out why, they are all there is.
            if self._fallen is None:
                self._ctx.report_hang(end.failure)
                self._fallen = (Deadline.after(_STACKS_WAIT), ChildFailedError(end.failure))
        elif end.orderly:
            self._happen(Event.ENDED)
        elif end.failure is None:
            text = f"{self._node_0} ended the group, {self._follower.last_heard}: {end.reason}"
            self._lost(NodeLostError(text, title="NodeAgent_N0"))
        elif end.failure.kind == "peer_lost" and end.failure.title == self._ctx.spec.title:
            # We are who was lost (stopped for a while, or cut off): that is no failure of this node's own.
            text = f"{self._node_0} has gone on without this node: {end.failure.headline}"
            self._lost(NodeLostError(text, title="NodeAgent_N0"))
        else:
            own = end.failure.node == self._nodes.node_rank
            # Another node's failure is for node 0 to count and to show in full; here it means: the group is lost.
            cause = (
                end.failure if own or end.failure.permanent else msgspec.structs.replace(end.failure, node_lost=True)
            )
            self._broken(ChildFailedError(cause))

    # --- the table

    def _lost(self, error: XserveError) -> None:
        """Node 0 is, without a word of why. It may have said before that it was told to stop: a second Ctrl-C kills."""
        if isinstance(error, NodeLostError) and self._follower.is_ending:
            self._reason = "node 0 was stopped"
            self._happen(Event.ENDED)
        else:
            self._broken(error)

    def _broken(self, error: XserveError) -> None:
        self._error = self._error or error
        self._happen(Event.BROKEN)

    def _happen(self, event: Event) -> None:
        before = self._state
        self._state, action = next_cell(before, event)
        self._follower.phase = str(self._state)
        if before is State.PARTING and self._state is State.OVER:
            self._error = None  # however it ended, it was our operator's wish
        match action:
            case Action.CONNECT:
                assert self._start is not None
                self._connect(self._start)
            case Action.ANNOUNCE:
                self._ctx.ready({})
                self._ctx.enter(Step.SERVING)
            case Action.LEAVE:
                self._ctx.send(Leave(reason=self._reason))
            case Action.PART | Action.QUIT:
                # The end of a supervisor that was killed is no order to stop: node 0 is to hear of a loss.
                if self._tree in ("draining", "stopping"):
                    self._follower.leave(BEING_STOPPED, None)
            case Action.FAIL | Action.NOTHING:
                pass

    def _connect(self, start: StartGroup) -> None:
        """To the engine core; and the workers are told where they meet."""
        self._ctx.enter(Step.GROUPS, f"group {start.generation} of launch {start.launch_id[:12]}")
        hello = Hello(start.token, start.generation, self._nodes.node_rank)
        link = NodeLink(self._our_zone(start.endpoint), Security.of(self._nodes), hello)
        self._relay = Relay(self._group, link, node=self._nodes.node_rank, host=self._host)
        place = GroupPlace(
            rendezvous=f"tcp://{url_host(self._our_zone(start.store_host))}:{start.store_port}/{start.generation}",
            generation=start.generation,
            env=self._interface(),
        )
        self._group.hand_over_group(place)

    def _our_zone(self, text: str) -> str:
        """A zone is a name on one machine: node 0's interface is not called as ours."""
        return re.sub("%[^]]+", f"%{self._follower.iface}", text)

    def _interface(self) -> dict[str, str]:
        """What --env or the plan has set stays."""
        given = self._ctx.spec.children[0].env
        found = interface_environment(self._follower.iface, self._follower.address)
        return {name: value for name, value in found.items() if name not in given}
