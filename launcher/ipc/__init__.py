"""Queues between processes of one machine: one writer broadcasts objects to N readers through shared memory.

    owner       Ring.create(name, readers)            memfd + arena memfd + 2 eventfds; hands out ends, takes no part
    writer      QueueWriter(handle, fds, codec=…)     enqueue(obj, deadline=…)
    reader i    QueueReader(handle, fds, codec=…)     dequeue(deadline=…) / try_dequeue() / wait_readable([…])

**In:** any object that the `Codec` carries, of any size from 0 bytes to gigabytes. **Out:** for each reader every
object, once, in order, equal to what was sent; it owns its memory (or holds a counted loan of an arena region).

**Always:**

- A record is visible to a reader only when it is whole: a writer that dies half way leaves nothing behind.
- The sender may overwrite its arrays as soon as `enqueue` returns.
- A reader may leave or be declared dead without stopping the others. Its place can be given to a new one
  (`QueueWriter.admit`), which gets all records from a known sequence number on.
- Every wait ends: at its deadline, at the death of a watched peer, at `shutdown`. What was written is delivered first.
- A reader that sleeps uses no CPU. It has said so in the header; who publishes looks there (`waiting`, `fences`).
- All readers are on this machine; what goes to another node goes over a network, which is not this room's business.
- Nothing has a name: when the last process is gone, however it went, the memory is gone.
- Nothing that came over a network is unpickled: only a codec made with ``trusted=True`` knows pickle.

Who writes which byte, and in which order: `layout`. The eventfds: one is written by readers (room has become free) and
wakes the writer; one is written by the writer (there is a record) and wakes all readers that sleep; `shutdown` writes
both. They carry no data and nobody reads them: sleepers hear the edges, and a spurious wake-up is harmless.

The hot calls are in C as well (`_native.c`), when setup found a compiler: a round trip then costs a third. It is the
same protocol, and ends in C and in Python may share a ring.

Files: `layout` the bytes · `fences` memory order · `native` the C half, or none · `segment` the kernel's part ·
`extents`, `arena` large messages · `ring` the owner · `endpoint`, `writer`, `reader` the ends · `waiting`, `readable`
sleeping · `handle` what is sent to attach · `codec`, `pickling`, `hooks` (`arrays`, `tensors`) objects to bytes · `raw`
messages passed on as they are.
"""

from launcher.ipc.codec import Codec
from launcher.ipc.handle import RingHandle, Watched
from launcher.ipc.hooks import BufferHook, register
from launcher.ipc.readable import WaitResult, WaitSet, wait_readable
from launcher.ipc.reader import EMPTY, Empty, QueueReader
from launcher.ipc.ring import Ring
from launcher.ipc.writer import QueueWriter

__all__ = [
    "EMPTY",
    "BufferHook",
    "Codec",
    "Empty",
    "QueueReader",
    "QueueWriter",
    "Ring",
    "RingHandle",
    "WaitResult",
    "WaitSet",
    "Watched",
    "register",
    "wait_readable",
]
