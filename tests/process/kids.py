"""Targets for children of the tests: `tests.process.kids:<name>`."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import time

from launcher.clock import Deadline
from launcher.process import numa
from launcher.process.child import ChildContext
from launcher.process.reports import Step


def good(ctx: ChildContext) -> None:
    """READY at once, ends when told."""
    ctx.enter(Step.MODEL)
    ctx.progress(1, 2, "MB")
    ctx.ready({"pid": os.getpid(), "sid": os.getsid(0), "environment": dict(os.environ)})
    while not ctx.stop_requested:
        select.select([ctx.fileno()], [], [], 10)


def raises(ctx: ChildContext) -> None:
    ctx.enter(Step.MODEL)
    raise ValueError("no such weight")


def raises_late(ctx: ChildContext) -> None:
    """A follow-on: it fails because another is gone, and earlier than the cause is reported."""
    ctx.enter(Step.MODEL)
    raise ConnectionError("connection closed by peer")


def dies(ctx: ChildContext) -> None:
    ctx.enter(Step.DEVICE)
    os.kill(os.getpid(), signal.SIGKILL)


def crashes(ctx: ChildContext) -> None:
    ctx.enter(Step.DEVICE)
    ctypes.string_at(0)


def hangs(ctx: ChildContext) -> None:
    ctx.enter(Step.DEVICE)
    time.sleep(1000)


def hangs_deaf(ctx: ChildContext) -> None:
    """READY, then deaf to messages and to SIGTERM."""
    ctx.ready()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1000)


def slow_but_alive(ctx: ChildContext) -> None:
    """Slower than the limit, with progress all along."""
    ctx.enter(Step.MODEL)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        time.sleep(0.1)
        ctx.progress(1)
    good(ctx)


def descriptors(ctx: ChildContext) -> None:
    """Report every open descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    ctx.ready({"fds": found, "named": dict(ctx.descriptors)})
    while not ctx.stop_requested:
        select.select([ctx.fileno()], [], [], 10)


def starts_a_shell(ctx: ChildContext) -> None:
    """Leaves a grandchild in its session, and one in a session of its own."""
    subprocess.Popen(["sh", "-c", "sleep 1000 & wait"])
    stray = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    ctx.ready({"stray": stray.pid})
    while not ctx.stop_requested:
        select.select([ctx.fileno()], [], [], 10)


def takes_over(ctx: ChildContext) -> None:
    """Reads a handover and answers with what came."""
    payload, fds = ctx.wait_handover("queues", Deadline.after(10))
    with open(fds[0], "rb") as file:
        file.seek(0)
        ctx.ready({"payload": payload.decode(), "file": file.read().decode()})
    while not ctx.stop_requested:
        select.select([ctx.fileno()], [], [], 10)


def bound(ctx: ChildContext) -> None:
    """Report what it is bound to."""
    ctx.ready({"cpus": sorted(os.sched_getaffinity(0)), "nodes": list(numa.memory_nodes())})
    while not ctx.stop_requested:
        select.select([ctx.fileno()], [], [], 10)


def confesses(ctx: ChildContext) -> None:
    """Report everything that could have been inherited."""
    import random

    import numpy
    import torch

    files = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            files[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    handled = [
        n.name for n in signal.Signals if callable(signal.getsignal(n)) and not isinstance(signal.getsignal(n), int)
    ]
    ctx.ready(
        {
            "fds": files,
            "handlers": handled,
            "blocked": [n.name for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "title": open("/proc/self/cmdline").read().strip("\0"),  # noqa: SIM115
            "comm": open("/proc/self/comm").read().strip(),  # noqa: SIM115
            "draws": [random.random(), float(numpy.random.random()), float(torch.rand(1))],
            "threads": len(os.listdir("/proc/self/task")),
            "cpus": sorted(os.sched_getaffinity(0)),
            "nodes": list(numa.memory_nodes()),
        }
    )
    while not ctx.stop_requested:
        select.select([ctx.fileno()], [], [], 10)
