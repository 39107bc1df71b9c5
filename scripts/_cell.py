"""What the cells of `bench_queue` and `bench_nodes` have in common: children with a pipe, and one answer on stdout."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import traceback
from collections.abc import Callable, Collection
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Protocol


class Bench(Protocol):
    def run(self) -> Any: ...
    def close(self) -> None: ...


def fork(target: Callable[[Connection], None]) -> tuple[int, Connection]:
    """A child that runs `target` with its end of a pipe and dies with us; its pid and our end."""
    mine, other = Pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        other.close()
        return pid, mine
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() == parent:
            mine.close()
            target(other)
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def answer(transports: Collection[str], make: Callable[[], Bench]) -> None:
    """Run the bench and print what it found. Does not return."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not for the parent
    if "vllm" in transports:
        import vllm.distributed.device_communicators.shm_broadcast  # noqa: F401  # before the fork: once for all
    bench = make()
    try:
        print(json.dumps(bench.run()), file=answers, flush=True)
    finally:
        bench.close()
    os._exit(0)  # vLLM's and ZMQ's threads must not hold us up
