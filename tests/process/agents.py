"""Stand-ins for node agents, cores and workers of several nodes: `tests.process.agents:<name>`.

What each of their lives does stands in the environment: ``PLAY=ready;lose,join;ready``: commas between the acts of one
life, semicolons between lives; the last one is played again and again.
"""

from __future__ import annotations

import os
import select
import signal

import msgspec

from launcher import clock
from launcher.clock import Deadline
from launcher.errors import ChildFailedError, Failure, NodeLostError, UsageError
from launcher.process.child import ChildContext
from launcher.process.nursery import Nursery
from launcher.process.reports import Drain, Drained, Leave, Step, TreeState

FAR = Failure(
    title="Worker_DP0_PP0_TP7",
    role="worker",
    kind="raised",
    headline="ValueError: far away",
    rank=7,
    node=1,
    host="far",
    pid=77,
    traceback="Traceback of the far rank",
    at=0.5,
)


class _OverError(Exception):
    """An orderly end."""


def play(ctx: ChildContext) -> None:
    """An agent, or a core: with workers if its spec has children."""
    lives = os.environ["PLAY"].split(";")
    life = _life()
    nursery = Nursery(ctx.spec.child_method, ctx=ctx)
    try:
        nursery.start_all(ctx.spec.children)
        ctx.watch_parent()
        for act in lives[min(life, len(lives) - 1)].split(","):
            _ACTS[act](ctx, nursery)
        _serve(ctx, nursery)
    except _OverError:
        pass
    finally:
        nursery.stop(1)
        nursery.close()


def _serve(ctx: ChildContext, nursery: Nursery) -> None:
    """Until told to stop; says what it is told, on stdout."""
    while not ctx.stop_requested:
        for message in ctx.poll_messages():
            _hear(ctx, message)
        nursery.pump()
        nursery.raise_if_failed()
        select.select([ctx.fileno(), nursery.fileno()], [], [], 5)
    for message in ctx.poll_messages():  # what came with the stop
        _hear(ctx, message)


def _hear(ctx: ChildContext, message: object) -> None:
    if isinstance(message, TreeState):
        print(f"told {message.state}: {message.phase}", flush=True)
        if message.state == "ready":
            with open(os.environ["READY"], "a") as file:
                file.write("ready\n")
    elif isinstance(message, Drain):
        print(f"told to drain in {message.budget > 0}", flush=True)
        ctx.send(Drained())


def _join(ctx: ChildContext, _: Nursery) -> None:
    ctx.enter(Step.JOIN, "node 0")


def _long_join(ctx: ChildContext, _: Nursery) -> None:
    """Longer than the limit of the test's start, with signs of life."""
    ctx.enter(Step.JOIN)
    until = Deadline.after(2.5)
    while not until.expired:
        select.select([ctx.fileno()], [], [], 0.25)
        ctx.progress(0, detail="node 0 is silent")


def _load(ctx: ChildContext, nursery: Nursery) -> None:
    ctx.enter(Step.MODEL)
    nursery.wait_ready(20)


def _ready(ctx: ChildContext, nursery: Nursery) -> None:
    nursery.wait_ready(20)
    ctx.ready()
    if ctx.spec.role == "api_server":
        ctx.enter(Step.SERVING)


def _all_ready(ctx: ChildContext, _: Nursery) -> None:
    """Wait until the tree is ready. A core is not told: its node's agent writes down how often it was."""
    if ctx.spec.role == "engine_core":
        _eventually_ready(_life() + 1)
        return
    until = Deadline.after(20)
    while not until.expired:
        for message in ctx.poll_messages():
            _hear(ctx, message)
            if isinstance(message, TreeState) and message.state == "ready":
                return
        select.select([ctx.fileno()], [], [], until.remaining())


def _eventually_ready(times: int) -> None:
    until = Deadline.after(20)
    while not until.expired:
        with open(os.environ["READY"]) as file:
            if len(file.readlines()) >= times:
                return
        select.select([], [], [], 0.01)


def _life() -> int:
    return int(os.environ["XSERVE_LAUNCH_ID"].rstrip(".").rpartition(".")[2])


def _lose(ctx: ChildContext, _: Nursery) -> None:
    raise NodeLostError("node 1 (far, 10.0.0.2) has been silent for 10 s", title="NodeAgent_N1")


def _far(ctx: ChildContext, _: Nursery) -> None:
    raise ChildFailedError(FAR)


def _far_hang(ctx: ChildContext, nursery: Nursery) -> None:
    ctx.report_hang(msgspec.structs.replace(FAR, kind="timeout", headline="in one call for 30 s", traceback=""))


def _leave(ctx: ChildContext, nursery: Nursery) -> None:
    """As an agent whose launch was ended by node 0."""
    ctx.send(Leave("node 0 was stopped"))
    raise _OverError


def _until_drain(ctx: ChildContext, nursery: Nursery) -> None:
    """As a follower that is stopped by its operator: goes on for a while, then ends by itself."""
    while not any(isinstance(message, Drain) for message in ctx.poll_messages()):
        select.select([ctx.fileno()], [], [], 5)
    print("parting", flush=True)
    until = clock.now() + 0.7
    while clock.now() < until:
        select.select([], [], [], 0.1)
    print("parted", flush=True)
    raise _OverError


def _stop(ctx: ChildContext, _: Nursery) -> None:
    """As its operator."""
    os.kill(ctx.parent_pid, signal.SIGTERM)


def _wrong(ctx: ChildContext, _: Nursery) -> None:
    raise UsageError("--tp 8 here, --tp 4 on node 0")


def _die(ctx: ChildContext, _: Nursery) -> None:
    os.kill(os.getpid(), 9)


_ACTS = {
    "join": _join,
    "long-join": _long_join,
    "load": _load,
    "ready": _ready,
    "all-ready": _all_ready,
    "lose": _lose,
    "far": _far,
    "far-hang": _far_hang,
    "leave": _leave,
    "stop": _stop,
    "wrong": _wrong,
    "until-drain": _until_drain,
    "die": _die,
}


def worker(ctx: ChildContext) -> None:
    """READY, and to the end of its stop."""
    ctx.enter(Step.MODEL)
    ctx.ready()
    while not ctx.stop_requested:
        select.select([ctx.fileno()], [], [], 5)
