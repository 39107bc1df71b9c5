"""A node's end of a group: what comes over the data link goes to the workers' ring, what they answer goes back.

Lossless, in order, and as bytes: nothing is decoded but to check it (`ipc.raw.Check`), nothing unpickled. Both
ways have back-pressure of their own. While the ring is full no call is read from the link, while the core takes nothing
no answer is read from the rings; the other way, deaths and the group's end go on. So memory is bounded: by what ZMQ
holds (`data_link.HWM`) and one message each way. Small answers to one call go together (`gather`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from launcher import clock
from launcher.clock import Deadline
from launcher.errors import ChildFailedError, DeadlineError, Failure, HostError, PeerDiedError, UsageError
from launcher.executor.data_link import NodeLink
from launcher.executor.frames import Whole
from launcher.executor.gather import Answers, Gather
from launcher.executor.hangs import is_idle
from launcher.executor.local_group import LocalGroup
from launcher.executor.waits import Waits
from launcher.ipc import EMPTY, WaitSet
from launcher.ipc.codec import Message
from launcher.ipc.raw import Check, RawCodec
from launcher.nodes.messages import EndGroup, GroupFailed, GroupProgress, GroupReady, Place, Places
from launcher.worker.rpc import CALLS, REPLIES, ShutdownCall, error_reply, make_codec

log = logging.getLogger(__name__)

_NOW = Deadline(0.0, 0.0)
_TELL = 1.0
"""Seconds between two reports of the same kind."""
_AT_ONCE = 256
"""Messages each way in one `pump`: the caller's other business is not to starve."""


class GroupEnded(Exception):  # noqa: N818 - an end in order is no error
    """Node 0 has ended the group; `end` says why."""

    def __init__(self, end: EndGroup) -> None:
        super().__init__(f"node 0 has ended the group: {end.reason}")
        self.end = end


class Relay:
    """`pump`, then `wait`, again and again; `close` in any case. The group is the caller's to stop; the link is closed
    with the relay."""

    def __init__(self, group: LocalGroup, link: NodeLink, *, node: int, host: str) -> None:
        """Makes the group's queues; the caller gives the workers their `GroupPlace`. `node` and `host` are put into
        failures."""
        self._group = group
        self._link = link
        self._node = node
        self._host = host
        self._check = Check(CALLS)
        self._codec = make_codec(trusted=False)
        self._stuck: Message | None = None
        """A call for which the ring has no room."""
        self._last = 0
        """Number of the last call that was put into the ring."""
        self._ready = False
        self._progress = 0.0
        self._progress_at = self._places_at = 0.0
        self._unsettled = False
        """The core was last told that some rank is busy, or calls have come since."""
        self._ranks = [child.spec.rank or 0 for child in group.children]
        self._gather = Gather(self._ranks, self._send)
        self._news = True
        """The last wait has found something on the link; True before it."""
        self._waits: Waits | None = None
        self._extra: tuple[int, ...] = ()
        raw = RawCodec()
        group.hand_over_queues(raw, raw)
        self._rings = WaitSet(group.readers)

    # --- the loop

    def pump(self) -> None:
        """Move what can be moved both ways, without blocking; say what is new to the core.

        Raises `ChildFailedError` for a worker (node and host are in the failure; the core has been told),
        `NodeLostError` when the core is gone, `GroupEnded` when it has ended the group.
        """
        self._answers()
        self._look_after_workers()
        if self._news or self._stuck is not None or not self._link.welcome:
            self._calls()
            self._answers()  # to wake up many workers takes about as long as they do for a short call
        now = clock.now()
        if now >= self._gather.due:
            self._gather.flush()
        if self._link.is_held_back:
            self._link.flush()
        self._report(now)

    def wait(self, deadline: Deadline, extra_fds: Sequence[int] = ()) -> list[int]:
        """Sleep until `pump` has something to do, one of `extra_fds` is readable, or time is up; those that are.

        Descriptors of ZMQ among them: ask the sockets first, as `launcher.nodes.sockets` says.
        """
        if self._waits is None or self._extra != tuple(extra_fds):
            self._close_waits()
            self._extra = tuple(extra_fds)
            fds = [self._group.fileno(), *extra_fds]
            self._waits = Waits(self._group.readers, [self._link], fds, self._group.calls)
        now = clock.now()
        seconds = min(self._link.until_timer(), self._until_report(now), self._gather.due - now)
        reader = None
        if (only := self._gather.only(now)) is not None:
            reader = self._group.readers[self._ranks.index(only[0])]
            seconds = min(seconds, only[1] - now)
        ready = self._waits.sleep(
            deadline.earlier(max(0.0, seconds)),
            answers=not self._link.is_held_back,
            room=self._stuck is not None,
            only=reader,
        )
        self._news = self._waits.has_heard
        return [fd for fd in ready if fd in self._extra]

    @property
    def is_ready(self) -> bool:
        """All workers are READY, and the core was told."""
        return self._ready

    def close(self) -> None:
        """The data link, with what was said last. Idempotent."""
        self._close_waits()
        self._rings.close()
        self._link.close()

    # --- there -----------------------------------------------------------------------------------------------------

    def _calls(self) -> None:
        if self._stuck is not None and not self._enqueue(self._stuck):
            if self._link.is_down():
                # The ring may stay full: who computes does not know that nobody wants it any more.
                while not isinstance(item := self._link.read(), EndGroup):
                    pass
                raise GroupEnded(item)
            return
        for _ in range(_AT_ONCE):
            item = self._link.read()
            if item is None:
                return
            if isinstance(item, EndGroup):
                raise GroupEnded(item)
            self._pass_on(item)
            if self._stuck is not None:
                return

    def _pass_on(self, whole: Whole) -> None:
        call = self._check.read(whole.tag, whole.head, len(whole.buffers))
        if call is None or call.call_id != self._last + 1:
            raise self._link.broken("a call came that is none of ours, or not the next one")
        self._last += 1
        self._unsettled = True
        if isinstance(call, ShutdownCall):
            self._enqueue(whole.message)
            self._group.may_end()
        else:
            self._gather.expect(call.call_id, call.reply_rank)
            self._enqueue(whole.message)

    def _enqueue(self, message: Message) -> bool:
        """False: there is no room, and the message is kept."""
        try:
            self._group.calls.enqueue(message, deadline=_NOW)
            self._stuck = None
        except (DeadlineError, PeerDiedError):  # of a dead worker we hear from its parent's side, which is ours
            self._stuck = message
        except HostError as error:
            raise self._failed(self._own_failure(error)) from error
        self._link.paused = self._stuck is not None
        return self._stuck is None

    # --- and back --------------------------------------------------------------------------------------------------

    def _answers(self) -> None:
        for index in self._rings.ready():
            reader = self._group.readers[index]
            for _ in range(_AT_ONCE):
                if self._link.is_held_back:
                    return
                message = reader.try_dequeue()
                if message is EMPTY:
                    break
                self._gather.add(self._ranks[index], message)

    def _send(self, answers: Answers) -> None:
        if len(answers) > 1:
            self._link.offer_all(answers)
        else:
            self._offer(*answers[0])

    def _offer(self, rank: int, message: Message) -> None:
        try:
            self._link.offer(rank, message)
        except UsageError as error:  # too large
            tag, head, buffers = message
            reply = Check(REPLIES).read(tag, head, len(buffers))
            if reply is not None:
                self._link.offer(rank, self._codec.encode(error_reply(reply.call_id, error)))

    def _look_after_workers(self) -> None:
        error = self._group.look()
        if error is not None:
            raise self._failed(error.cause, error.follow_ons)

    def _failed(self, cause: Failure, others: Sequence[Failure] = ()) -> ChildFailedError:
        """The error to raise; the core is told."""
        self._gather.flush()  # they came before, and are good
        cause = self._here(cause)
        others = tuple(msgspec.structs.replace(self._here(f), traceback="", last_output=()) for f in others)
        self._link.say(GroupFailed(cause, others))
        return ChildFailedError(cause, others)

    def _here(self, failure: Failure) -> Failure:
        return msgspec.structs.replace(failure, node=self._node, host=self._host)

    def _own_failure(self, error: HostError) -> Failure:
        title = f"NodeAgent_N{self._node}"
        return Failure(
            title=title, role="node_agent", kind="raised", headline=str(error), step="serving", at=clock.now()
        )

    # --- news ------------------------------------------------------------------------------------------------------

    def _report(self, now: float) -> None:
        if not self._ready:
            self._report_start(now)
        if self._unsettled and now >= self._places_at:
            self._places_at = now + _TELL
            self._report_places()

    def _report_start(self, now: float) -> None:
        children = self._group.children
        latest = max(children, key=lambda child: child.last_progress)
        if not self._group.behind():
            self._ready = True
            self._link.say(GroupReady())
        elif latest.last_progress > self._progress and now >= self._progress_at:
            self._progress, self._progress_at = latest.last_progress, now + _TELL
            detail = latest.progress.detail if latest.progress is not None else ""
            self._link.say(GroupProgress(f"{latest.title}: {latest.step} {detail}".rstrip()))

    def _report_places(self) -> None:
        now, found = clock.now(), []
        self._unsettled = False
        for child, place in zip(self._group.children, self._group.places(), strict=True):
            busy = now - place.busy_since if place.busy_since else 0.0
            found.append(Place(child.spec.rank or 0, place.call_id, busy, place.waiting))
            self._unsettled = self._unsettled or not is_idle(place, self._last)
        self._link.say(Places(tuple(found)))

    def _until_report(self, now: float) -> float:
        if not self._ready:
            return max(0.0, self._progress_at - now) or _TELL
        return max(0.0, self._places_at - now) if self._unsettled else float("inf")

    def _close_waits(self) -> None:
        waits, self._waits = self._waits, None
        if waits is not None:
            waits.close()
