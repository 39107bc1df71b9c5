"""Memory fences for shared memory, all in one place, with the argument for each use.

Python has no fence, but a lock has one inside. *Release, then acquire* the same lock (so it is normally held):

- x86: each half is, or contains, a locked instruction, which is a full barrier. Besides, x86 lets only a later load
  overtake an earlier store; stores stay in order, and so do loads. So `publish` and `consume` need nothing there.
- ARMv8 and others: everything before the release is visible before it; everything after the acquire happens after
  it; and an acquiring compare-and-swap cannot overtake an earlier releasing store, least of all one to the same word.
  (Acquire, then release would be no fence: both neighbours may move into the middle and pass each other there.)
  This rests on how C libraries make locks, which they do not promise. So there every sleeper looks again within
  `RECHECK_SECONDS`: a lost wake-up costs a moment, never a hang.

The C half has C11's own fences for the same three uses. It looks again as often: the other end may be in Python.

Uses:

`full`     store, then load elsewhere (Dekker): "I published" then "is anyone asleep?", against "I sleep" then "is there
           something?". Without it both sides can miss each other. Needed on every CPU.
`publish`  earlier stores before a later store: the record before the cursor; slot release before the read cursor.
`consume`  an earlier load before later loads: the cursor before the record.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable

STRONGLY_ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")
RECHECK_SECONDS = None if STRONGLY_ORDERED else 0.05
"""Longest sleep without a look at the memory; None: the wake-ups can be relied on."""


_nothing: Callable[[], object] = bool
"""x86 keeps stores in order, and loads. (Of the calls that do nothing, one into C is the cheapest.)"""


class Fences:
    """Fences of one endpoint, which one thread uses at a time (the lock is held between fences)."""

    __slots__ = ("_lock", "consume", "full", "publish")

    def __init__(self, *, strong: bool = STRONGLY_ORDERED) -> None:
        lock = self._lock = threading.Lock()
        lock.acquire()
        acquire, release = lock.acquire, lock.release

        def full() -> None:
            release()
            acquire()

        self.full: Callable[[], None] = full
        self.publish: Callable[[], object] = _nothing if strong else full
        self.consume: Callable[[], object] = _nothing if strong else full
