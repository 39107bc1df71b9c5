"""A worker process, from its birth to its end: the target of its `ProcessSpec`.

The one list of steps, followed by both sides (`launcher.process.reports.Step`):

    JOIN     several nodes only: wait until all have joined, and learn where the group meets
    IMPORT   import the worker class by name, mix in the extension, construct it
    DEVICE   init_device: collective, all ranks at the same time
    GROUPS   the rank knows its place: from here on it bears its full title
    MODEL    load_model, with progress
    QUEUES   attach to the broadcast ring and to this rank's answer ring
    READY, SERVING

The parent is watched before the first of them (`launcher.process.child`).
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import msgspec

from launcher.clock import Deadline
from launcher.config import WorkerSettings
from launcher.errors import ClosedError
from launcher.ipc import QueueReader, QueueWriter, Watched
from launcher.process.child import ChildContext, adopt_environment
from launcher.process.reports import Step
from launcher.worker.base import no_waits
from launcher.worker.classes import worker_class
from launcher.worker.loop import Loop
from launcher.worker.marks import Mark
from launcher.worker.rpc import GROUP, QUEUES, GroupPlace, Queues, make_codec

log = logging.getLogger(__name__)

_QUEUES_TIMEOUT = 60.0
"""Seconds. The parent sends the queues before it waits for anything."""


def run(ctx: ChildContext) -> None:
    """Follow the steps, serve, clean up. Raises what the worker raises while starting."""
    settings = msgspec.msgpack.decode(ctx.spec.payload, type=WorkerSettings)
    parent = Watched(os.pidfd_open(os.getppid()), "its parent", None, os.getppid())
    listening: list[int] = []
    try:
        try:
            if settings.awaits_group:
                settings, listening = _join(ctx, settings)
        except ClosedError as error:
            log.debug("stopped before all nodes had joined: %s", error)
            return
        worker = prepare(ctx, settings)
        try:
            _serve(ctx, worker, settings, parent)
        except ClosedError as error:
            log.debug("stopped before it served: %s", error)
        ctx.enter(Step.STOPPING)
        worker.shutdown()
    finally:
        for fd in (parent.pidfd, *listening):
            os.close(fd)


def _join(ctx: ChildContext, settings: WorkerSettings) -> tuple[WorkerSettings, list[int]]:
    """Step JOIN: the settings with the group's place in them, and the socket of the rendezvous where we serve it.

    No limit of its own: node 0 has one, and the parent's end or a request to stop (`ClosedError`) ends it.
    """
    ctx.enter(Step.JOIN)
    payload, fds = ctx.wait_handover(GROUP, Deadline.after(None))
    place = msgspec.msgpack.decode(payload, type=GroupPlace)
    adopt_environment(place.env)
    rendezvous = f"{place.rendezvous}?fd={fds[0]}" if fds else place.rendezvous
    return msgspec.structs.replace(settings, rendezvous=rendezvous, generation=place.generation), fds


def prepare(ctx: ChildContext, settings: WorkerSettings) -> Any:
    """Steps IMPORT to MODEL; the worker, loaded."""
    ctx.enter(Step.IMPORT, settings.worker)
    worker = worker_class(settings)(settings)
    worker.progress = ctx.progress
    if (torch := sys.modules.get("torch")) is not None:
        # A torch that was imported before the fork has read its environment then; OMP_NUM_THREADS no longer counts.
        torch.set_num_threads(settings.num_threads)
    ctx.enter(Step.DEVICE, settings.device)
    worker.init_device()
    ctx.set_title(ctx.spec.title)
    ctx.enter(Step.GROUPS)
    ctx.enter(Step.MODEL, settings.model or "")
    worker.load_model()
    return worker


def _serve(ctx: ChildContext, worker: Any, settings: WorkerSettings, parent: Watched) -> None:
    """Steps QUEUES to SERVING; returns when asked to end."""
    ctx.enter(Step.QUEUES)
    payload, fds = ctx.wait_handover(QUEUES, Deadline.after(_QUEUES_TIMEOUT))
    queues = msgspec.msgpack.decode(payload, type=Queues)
    border = queues.calls.descriptors
    trusted = not settings.awaits_group
    codec = make_codec(trusted=trusted)
    calls = QueueReader(queues.calls, fds[:border], codec=codec)
    answers = QueueWriter(queues.answers, fds[border:-1], codec=codec)
    mark = Mark(fds[-1], queues.calls.index)
    worker.waits = mark.waits
    try:
        answers.watch(0, parent)
        ctx.ready({})
        ctx.enter(Step.SERVING)
        why = Loop(worker, settings.ranks.rank, calls, answers, mark, trusted=trusted).run(
            parent=parent, stop_fd=ctx.fileno(), stop_requested=lambda: ctx.stop_requested
        )
        log.debug("the loop has ended: %s", why)
    finally:
        calls.close()
        answers.close()
        worker.waits = no_waits
        mark.close()
