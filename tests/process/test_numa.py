"""Binding to CPUs and nodes, allowed and forbidden: by real system calls, and a real seccomp filter."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from launcher.process import numa

DENY = r"""
import ctypes, json, os, struct, sys
from launcher.process import numa

def forbid(*calls):
    # BPF: load the call's number; for each forbidden one return EPERM; else allow.
    code = [struct.pack("HBBI", 0x20, 0, 0, 0)]
    for at, call in enumerate(calls):
        code.append(struct.pack("HBBI", 0x15, len(calls) - at, 0, call))
    code += [struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000), struct.pack("HBBI", 0x06, 0, 0, 0x00050001)]
    program = ctypes.create_string_buffer(b"".join(code))
    head = struct.pack("HxxxxxxP", len(code), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, head, 0, 0) == 0, os.strerror(ctypes.get_errno())
"""
SET_MEMPOLICY, GET_MEMPOLICY = numa._CALLS.get(os.uname().machine, (238, 239))
SET_AFFINITY = {"x86_64": 203, "aarch64": 122}.get(os.uname().machine, 203)

pytestmark = pytest.mark.skipif(
    os.uname().machine not in ("x86_64", "aarch64"), reason="numbers of calls are known for these machines"
)


def child(program: str) -> object:
    """What the program prints as JSON, run in a process of its own: binding is not undone."""
    done = subprocess.run([sys.executable, "-c", DENY + program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_binds_and_can_be_asked() -> None:
    cpu = min(os.sched_getaffinity(0))
    program = f"""
print(json.dumps([numa.bind([{cpu}], [0]), sorted(os.sched_getaffinity(0)), numa.memory_nodes(), numa.denied()]))"""
    assert child(program) == [[], [cpu], [0], []]


def test_unbound_is_not_touched() -> None:
    everywhere = sorted(os.sched_getaffinity(0))
    program = "print(json.dumps([numa.bind([], []), sorted(os.sched_getaffinity(0)), numa.memory_nodes()]))"
    assert child(program) == [[], everywhere, []]


def test_a_node_that_is_not_there_is_told() -> None:
    [[words]] = child("print(json.dumps([numa.bind([], [1023])]))")  # type: ignore[misc]
    assert words.startswith("memory: ")


def test_seccomp_forbids_memory() -> None:
    cpu = min(os.sched_getaffinity(0))
    program = f"""
forbid({SET_MEMPOLICY})
print(json.dumps([numa.denied(), numa.bind([{cpu}], [0]), sorted(os.sched_getaffinity(0))]))"""
    assert child(program) == [["memory"], ["memory: Operation not permitted"], [cpu]]


def test_seccomp_forbids_both() -> None:
    program = f"""
forbid({SET_MEMPOLICY}, {GET_MEMPOLICY}, {SET_AFFINITY})
print(json.dumps([numa.denied(), numa.bind([0], [0])]))"""
    denied, words = child(program)  # type: ignore[misc]
    assert denied == ["cpus", "memory"]
    assert words == ["CPUs: Operation not permitted", "memory: Operation not permitted"]


def test_every_child_carries_it_out_under_every_method(start: object, nursery: object) -> None:
    """See `test_clean_fork` for the forkserver."""
    from launcher.process.nursery import Nursery
    from tests.process.conftest import spec

    assert isinstance(nursery, Nursery)
    cpu = min(os.sched_getaffinity(0))
    [made] = nursery.start_all([spec("bound", cpus=(cpu,), memory_nodes=(0,))])
    nursery.wait_ready(20)
    assert made.ready_info == {"cpus": [cpu], "nodes": [0]}
    assert sorted(os.sched_getaffinity(0)) != [cpu] or len(os.sched_getaffinity(0)) == 1
