"""Millions of small messages to many readers, with checksums; memory and descriptors must stay as they are."""

from __future__ import annotations

import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import _figures
import msgspec

from launcher.clock import Deadline
from launcher.errors import DeadlineError
from launcher.ipc import Codec, QueueReader, QueueWriter, Ring, Watched

READERS = 8
_NEVER = Deadline.after(None)


class Item(msgspec.Struct, frozen=True, array_like=True):
    number: int
    checksum: int
    data: bytes


_CODEC = Codec({1: Item}, trusted=False)


def footprint() -> tuple[int, int]:
    """Resident bytes that are this process's own, and descriptors."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024, len(os.listdir("/proc/self/fd"))
    raise RuntimeError("no RssAnon in /proc/self/status")


def read(ring: Ring, index: int, count: int) -> dict[str, Any]:
    """Every number once and in order, each with its checksum; footprints after a tenth and at the end."""
    reader = QueueReader(*ring.reader_handle(index), codec=_CODEC, own_fds=False)
    reader.watch(Watched(os.pidfd_open(os.getppid()), "Writer", None, os.getppid()))
    early = (0, 0)
    for number in range(count):
        item = reader.dequeue(deadline=_NEVER)
        if item.number != number or zlib.crc32(item.data) != item.checksum:
            raise SystemExit(f"reader {index}: record {number} is wrong: {item}")
        if number == count // 10:
            early = footprint()
    late = footprint()
    return {"grown_bytes": late[0] - early[0], "grown_descriptors": late[1] - early[1]}


def fork_reader(ring: Ring, index: int, count: int, go: tuple[int, int]) -> tuple[int, int]:
    answer, end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(end)
        return pid, answer
    code = 1
    try:
        os.close(go[1])
        os.read(go[0], 1)  # until the writer closes its end
        os.write(end, msgspec.json.encode(read(ring, index, count)))
        code = 0
    finally:
        os._exit(code)


def soak(count: int) -> dict[str, Any]:
    host = _figures.facts()
    ring = Ring.create("soak", READERS)
    go = os.pipe()
    children = [fork_reader(ring, index, count, go) for index in range(READERS)]
    writer = QueueWriter(*ring.writer_handle(), codec=_CODEC, own_fds=False)
    for index, (pid, _) in enumerate(children):
        writer.watch(index, Watched(os.pidfd_open(pid), "Reader", index, pid))
    payloads = [os.urandom(16 + number * 37 % 400) for number in range(1000)]
    checksums = [zlib.crc32(data) for data in payloads]
    start, early = time.monotonic(), (0, 0)
    for number in range(count):
        place = number % 1000
        item = Item(number, checksums[place], payloads[place])
        try:
            writer.enqueue(item, deadline=_NEVER if early[1] else Deadline.after(0.05))
        except DeadlineError:
            # The ring is full, for nobody reads yet. Now that this process has slept once, it has all that it needs.
            early = footprint()
            for end in go:
                os.close(end)
            writer.enqueue(item, deadline=_NEVER)
        if number % max(1, count // 20) == 0:
            print(f"  {number} of {count}, {time.monotonic() - start:.0f} s", file=sys.stderr)
    if not early[1]:
        raise SystemExit(f"{count} messages do not fill the ring; give more")
    late = footprint()
    found = [{"grown_bytes": late[0] - early[0], "grown_descriptors": late[1] - early[1] + len(go)}]
    wrong = 0
    for pid, answer in children:
        with open(answer, "rb") as pipe:
            text = pipe.read()
        wrong += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
        found += [msgspec.json.decode(text)] if text else []
    seconds = time.monotonic() - start
    there = os.fstat(ring.writer_handle()[1][0]).st_blocks * 512
    print(f"{count} messages to {READERS} readers in {seconds:.0f} s, {count / seconds:.0f}/s")
    return {
        "goals": [
            _figures.goal("readers that missed or mistook a message", wrong, 0),
            _figures.goal("MiB that any process grew by", max(f["grown_bytes"] for f in found) / 2**20, 1.0),
            _figures.goal("descriptors that any process gained", max(f["grown_descriptors"] for f in found), 0),
            _figures.goal("MiB of shared memory in use", there / 2**20, 17.0),
        ],
        "host": host,
        "messages": count,
        "readers": READERS,
        "seconds": seconds,
    }
