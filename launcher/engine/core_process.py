"""The engine core's process: target ``launcher.engine.core_process:run``, payload `EngineSettings`.

Order matters, and this is the one place that keeps it:

1. the executor is made: it forks its workers, so nothing before it may make a thread or import ZMQ;
2. the parent is watched (a thread);
3. workers come up, the KV cache is sized and cut, they warm up;
4. the socket for API servers is bound (they may have been trying for long), then READY;
5. the loop, until a stop or a death. Whichever way it ends, the workers are ended last, within what time is left.
"""

from __future__ import annotations

import gc
import logging

import msgspec

from launcher.clock import Deadline
from launcher.config import EngineSettings
from launcher.engine.core import EngineCore
from launcher.executor.base import resolve_executor
from launcher.process.child import ChildContext
from launcher.process.reports import Step

FAILED_BUDGET = 1.0
"""Seconds for the workers to end after a failure: a group that lost a rank can do nothing useful any more."""

log = logging.getLogger(__name__)


def run(ctx: ChildContext) -> None:
    """Live as an engine core. Returns after an orderly stop; `ChildFailedError` when a worker is gone."""
    settings = msgspec.msgpack.decode(ctx.spec.payload, type=EngineSettings)
    executor = resolve_executor(settings.backend)(settings, ctx)
    stop: Deadline | None = None
    try:
        ctx.watch_parent()
        stop = serve(EngineCore(executor, settings), ctx)
        ctx.enter(Step.STOPPING)
    finally:
        for title in executor.shutdown(FAILED_BUDGET if stop is None else stop.remaining()):
            log.warning("%s did not end in time and was killed", title)


def serve(core: EngineCore, ctx: ChildContext) -> Deadline:
    """Bring `core` up, serve until told to stop; the deadline of the stop."""
    ctx.notes = core.recent_steps
    info = core.initialize(ctx.enter)
    # Only now: see step 1 above. ZMQ has threads.
    from launcher.engine.core_loop import CoreLoop
    from launcher.engine.front import Front

    with Front(core.settings.address, core.settings.generation) as front:
        loop = CoreLoop(core, front, info, ctx)
        # What lives now lives for ever: keep it out of the collector's way, which would stop a step to walk it.
        gc.collect()
        gc.freeze()
        ctx.ready(msgspec.to_builtins(info))
        ctx.enter(Step.SERVING)
        return loop.run()
