"""Ways to send an object from one process to N others and to hear from each of them: ours and the peers'.

A transport is made in the parent before it forks. Then, in the same order in all processes, the parent takes its end
with `writer_end` and reader i with `reader_end`; `lines` are pipes between them on which they may exchange handles.

All of them send the same small message per call, each in its own way: a record of the call's number and the payload, as
a msgspec struct here, as a pickled tuple there. A payload of `BARE` bytes or more, and any array, is sent as it is.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Protocol

import msgspec

from launcher.clock import Deadline
from launcher.ipc import Codec, QueueReader, QueueWriter, Ring, Watched

BARE = 1 << 20
WriterEnd = tuple[Callable[[int, Any], None], Callable[[], None]]
"""send(number, payload); collect one acknowledgement of every reader"""
ReaderEnd = tuple[Callable[[], Any], Callable[[int], None]]
"""receive() → payload; acknowledge(number)"""


class Transport(Protocol):
    def writer_end(self, lines: Sequence[Connection]) -> WriterEnd: ...
    def reader_end(self, rank: int, line: Connection) -> ReaderEnd: ...
    def memory(self) -> tuple[int, int] | None:
        """Bytes of shared memory, reserved and in fact there; asked in the parent. None: it has none."""


def _is_bare(payload: Any) -> bool:
    return type(payload) is not bytes or len(payload) >= BARE


class Call(msgspec.Struct, frozen=True, array_like=True):
    number: int
    payload: bytes


class Ack(msgspec.Struct, frozen=True, array_like=True):
    number: int


_CODEC = Codec({1: Call, 2: Ack}, trusted=True)
_NEVER = Deadline.after(None)


class Ours:
    """`launcher.ipc`: a ring to all readers, and one back from each. Deaths are watched, as in the executor."""

    def __init__(self, readers: int) -> None:
        self._down = Ring.create("bench", readers)
        self._up = [Ring.create(f"acks{rank}", 1, 4 << 20) for rank in range(readers)]

    def writer_end(self, lines: Sequence[Connection]) -> WriterEnd:
        writer = QueueWriter(*self._down.writer_handle(), codec=_CODEC, own_fds=False)
        acks = [QueueReader(*ring.reader_handle(0), codec=_CODEC, own_fds=False) for ring in self._up]
        for rank, (line, ack) in enumerate(zip(lines, acks, strict=True)):
            pid = line.recv()
            peer = Watched(os.pidfd_open(pid), "Reader", rank, pid)
            writer.watch(rank, peer)
            ack.watch(peer)

        def send(number: int, payload: Any) -> None:
            writer.enqueue(payload if _is_bare(payload) else Call(number, payload), deadline=_NEVER)

        def collect() -> None:
            for ack in acks:
                ack.dequeue(deadline=_NEVER)

        return send, collect

    def reader_end(self, rank: int, line: Connection) -> ReaderEnd:
        line.send(os.getpid())
        parent = Watched(os.pidfd_open(os.getppid()), "Writer", None, os.getppid())
        reader = QueueReader(*self._down.reader_handle(rank), codec=_CODEC, own_fds=False)
        reader.watch(parent)
        writer = QueueWriter(*self._up[rank].writer_handle(), codec=_CODEC, own_fds=False)
        writer.watch(0, parent)

        def receive() -> Any:
            got = reader.dequeue(deadline=_NEVER)
            return got.payload if type(got) is Call else got

        return receive, lambda number: writer.enqueue(Ack(number), deadline=_NEVER)

    def memory(self) -> tuple[int, int]:
        found = [os.fstat(fd) for ring in (self._down, *self._up) for fd in ring.writer_handle()[1][:2]]
        return sum(stat.st_size for stat in found), sum(stat.st_blocks * 512 for stat in found)


class Vllm:
    """vLLM's MessageQueue as it comes: one to all readers, one back from each."""

    def __init__(self, readers: int) -> None:
        self._readers = readers
        self._names: list[tuple[str, int]] = []

    def writer_end(self, lines: Sequence[Connection]) -> WriterEnd:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        down = MessageQueue(self._readers, self._readers, max_chunk_bytes=16 << 20)  # its executor's default
        for line in lines:
            line.send(down.export_handle())
        acks = [MessageQueue.create_from_handle(line.recv(), 0) for line in lines]
        down.wait_until_ready()
        for queue in (down, *acks):
            memory = queue.buffer.shared_memory
            self._names.append((memory.name, memory.size))
        for ack in acks:
            ack.wait_until_ready()

        def collect() -> None:
            for ack in acks:
                ack.dequeue()

        def send(number: int, payload: Any) -> None:
            down.enqueue(payload if _is_bare(payload) else (number, payload))

        return send, collect

    def reader_end(self, rank: int, line: Connection) -> ReaderEnd:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        down = MessageQueue.create_from_handle(line.recv(), rank)
        up = MessageQueue(1, 1)
        line.send(up.export_handle())
        down.wait_until_ready()
        up.wait_until_ready()

        def receive() -> Any:
            got = down.dequeue(indefinite=True)
            return got[1] if type(got) is tuple else got

        return receive, lambda number: up.enqueue((number,))

    def memory(self) -> tuple[int, int]:
        there = sum(os.stat(f"/dev/shm/{name.lstrip('/')}").st_blocks * 512 for name, _ in self._names)
        return sum(size for _, size in self._names), there


class Pipes:
    """A `multiprocessing.Pipe` to each reader; the message is pickled once."""

    def __init__(self, readers: int) -> None:
        self._pairs = [Pipe() for _ in range(readers)]

    def writer_end(self, lines: Sequence[Connection]) -> WriterEnd:
        del lines
        ends = [mine for mine, _ in self._pairs]

        def send(number: int, payload: Any) -> None:
            data = pickle.dumps((number, payload), 5)
            for end in ends:
                end.send_bytes(data)

        def collect() -> None:
            for end in ends:
                pickle.loads(end.recv_bytes())

        return send, collect

    def reader_end(self, rank: int, line: Connection) -> ReaderEnd:
        del line
        end = self._pairs[rank][1]
        return lambda: pickle.loads(end.recv_bytes())[1], lambda number: end.send_bytes(pickle.dumps((number,), 5))

    def memory(self) -> None:
        return None


class Zmq:
    """PUB/SUB over ipc, acknowledgements by PUSH/PULL."""

    def __init__(self, readers: int) -> None:
        self._readers = readers
        self._directory = tempfile.TemporaryDirectory(prefix="xs-bench-")

    def _address(self, which: str) -> str:
        return f"ipc://{self._directory.name}/{which}"

    def writer_end(self, lines: Sequence[Connection]) -> WriterEnd:
        import zmq

        context = zmq.Context()
        out, back = context.socket(zmq.XPUB), context.socket(zmq.PULL)
        out.setsockopt(zmq.SNDHWM, 0)
        out.setsockopt(zmq.XPUB_VERBOSE, 1)  # one subscription of each reader, though they are equal
        out.bind(self._address("down"))
        back.bind(self._address("up"))
        for line in lines:
            line.send("bound")
        for _ in lines:
            out.recv()  # a subscription

        def send(number: int, payload: Any) -> None:
            out.send(pickle.dumps((number, payload), 5), copy=False)

        def collect() -> None:
            for _ in range(self._readers):
                pickle.loads(back.recv())

        return send, collect

    def reader_end(self, rank: int, line: Connection) -> ReaderEnd:
        import zmq

        del rank
        line.recv()
        context = zmq.Context()
        down, up = context.socket(zmq.SUB), context.socket(zmq.PUSH)
        down.setsockopt(zmq.RCVHWM, 0)
        down.connect(self._address("down"))
        down.setsockopt(zmq.SUBSCRIBE, b"")
        up.connect(self._address("up"))
        return lambda: pickle.loads(down.recv())[1], lambda number: up.send(pickle.dumps((number,), 5))

    def memory(self) -> None:
        return None

    def close(self) -> None:
        self._directory.cleanup()


KINDS: dict[str, Callable[[int], Transport]] = {"xserve": Ours, "vllm": Vllm, "pipe": Pipes, "zmq": Zmq}
