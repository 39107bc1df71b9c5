"""Bind this process to CPUs and NUMA nodes: sched_setaffinity(2) and set_mempolicy(2).

Done in the child, before its first big allocation, so that every start method can and nobody has to be wrapped: a
wrapping program that is refused dies before there is anybody who could report it. The C library has no function for
set_mempolicy, so the system call is made by its number.

Containers often forbid one or both (seccomp). `denied` finds out beforehand, by asking for what is in force already.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence

_MPOL_BIND = 2
_CALLS = {
    "x86_64": (238, 239),
    "aarch64": (237, 236),
    "riscv64": (237, 236),
    "ppc64le": (261, 260),
    "s390x": (270, 269),
}
"""Machine → numbers of (set_mempolicy, get_mempolicy)."""
_MAX_NODES = 1024
_WORD = ctypes.sizeof(ctypes.c_ulong) * 8
_Mask = ctypes.c_ulong * (_MAX_NODES // _WORD)
_libc = ctypes.CDLL(None, use_errno=True)


def bind(cpus: Sequence[int], memory_nodes: Sequence[int]) -> list[str]:
    """Bind the calling thread and all it will start; what could not be done, in words. Never raises for a refusal."""
    refused = []
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            refused.append(f"CPUs: {error.strerror}")
    if memory_nodes:
        try:
            _set_policy(_MPOL_BIND, _mask_of(memory_nodes))
        except OSError as error:
            refused.append(f"memory: {error.strerror}")
    return refused


def denied() -> tuple[str, ...]:
    """Which of ``cpus`` and ``memory`` this process may not bind. Changes nothing: it sets what is set."""
    found = []
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(0))
    except OSError:
        found.append("cpus")
    try:
        _set_policy(*_get_policy())
    except OSError:
        found.append("memory")
    return tuple(found)


def memory_nodes() -> tuple[int, ...]:
    """The nodes that this thread is bound to; empty: it is not. Raises OSError where it is forbidden to ask."""
    mode, mask = _get_policy()
    if mode != _MPOL_BIND:
        return ()
    return tuple(node for node in range(_MAX_NODES) if mask[node // _WORD] >> (node % _WORD) & 1)


def _mask_of(nodes: Sequence[int]) -> ctypes.Array[ctypes.c_ulong]:
    mask = _Mask()
    for node in nodes:
        mask[node // _WORD] |= 1 << (node % _WORD)
    return mask


def _numbers() -> tuple[int, int]:
    try:
        return _CALLS[platform.machine()]
    except KeyError:
        raise OSError(38, f"memory policy is not known for {platform.machine()}") from None


def _set_policy(mode: int, mask: ctypes.Array[ctypes.c_ulong]) -> None:
    # The kernel takes one node less than it is told.
    _call(_numbers()[0], mode, mask if any(mask) else None, _MAX_NODES + 1 if any(mask) else 0)


def _get_policy() -> tuple[int, ctypes.Array[ctypes.c_ulong]]:
    mode, mask = ctypes.c_int(), _Mask()
    _call(_numbers()[1], ctypes.byref(mode), mask, _MAX_NODES, None, 0)
    return mode.value, mask


def _call(number: int, *arguments: object) -> None:
    if _libc.syscall(ctypes.c_long(number), *arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
