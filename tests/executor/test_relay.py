"""The relay between a core link of the test and real workers."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launcher.config import NodeSettings
from launcher.executor.core_link import CoreLink
from launcher.executor.frames import Lost, Whole
from launcher.nodes.messages import EndGroup, GroupReady, OpenGroup, Places
from launcher.nodes.secure import Security
from launcher.worker.rpc import ALL_RANKS, NameCall, PlainCall, PlainReply, ShutdownCall, make_codec
from tests.conftest import eventually
from tests.executor.nodes_rig import Node
from tests.executor.rig import settings_of, specs_of

TOKEN, GENERATION = b"t" * 16, 3


class Rig:
    """A core without workers, and node 1 with ranks 2 and 3 of 4."""

    def __init__(self, tmp: Path) -> None:
        nodes = NodeSettings(nnodes=2, node_rank=0, ranks_per_node=2, master_addr="127.0.0.1")
        self.codec = make_codec(trusted=False)
        self.link = CoreLink("127.0.0.1", Security(b"", 2, 0), generation=GENERATION, token=TOKEN, nodes=(1,))
        self.node = Node(1, tmp, specs_of(settings_of(4, awaits_group=True))[2:], nodes)
        self.node.go(OpenGroup(GENERATION, TOKEN, self.link.endpoint, "127.0.0.1", 1))
        self.answers: list[Whole] = []
        self.words: list[object] = []
        self.hear(lambda: GroupReady() in self.words, 30)

    def hear(self, condition: object, timeout: float = 20) -> None:
        def look() -> bool:
            while (got := self.link.read()) is not None:
                item = got[1]
                (self.answers if isinstance(item, Whole) else self.words).append(item)  # type: ignore[arg-type]
            return bool(condition())  # type: ignore[operator]

        eventually(look, timeout)

    def send(self, call: object) -> None:
        self.link.send(self.link.cut(self.codec.encode(call)))

    def close(self) -> None:
        self.link.close()
        self.node.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def test_a_full_ring_makes_nobody_deaf(rig: Rig) -> None:
    """Rank 2 is busy, and more is sent than ring and sockets hold."""
    rig.send(PlainCall(1, ALL_RANKS, "nap", (2, 2.0)))
    filler = bytes(1 << 20)
    sent, held = 1, 0
    while held < 20 and sent < 600:
        if rig.link.flush():
            sent += 1
            rig.send(PlainCall(sent, 2, "echo", (filler,)))
            held = 0
        else:
            held += 1
            select.select([], [], [], 0.01)
    assert 100 < sent < 600
    memory = psutil.Process(rig.node.process.pid).memory_info().rss
    assert memory < 600 << 20
    # Rank 3 has answered the first call meanwhile, and its place is told.
    rig.hear(lambda: [answer.rank for answer in rig.answers][:1] == [3])
    rig.hear(lambda: any(isinstance(word, Places) for word in rig.words))
    # All arrive, in order.
    rig.hear(lambda: (rig.link.flush(), len(rig.answers) == sent + 1)[1], 60)
    numbers = [rig.codec.decode(a.tag, a.head, a.buffers).call_id for a in rig.answers if a.rank == 2]
    assert numbers == list(range(1, sent + 1))


def test_the_core_goes_while_the_ring_is_full(rig: Rig) -> None:
    rig.send(PlainCall(1, ALL_RANKS, "nap", (2, 30.0)))
    for number in range(2, 30):
        rig.send(PlainCall(number, 2, "echo", (bytes(1 << 20),)))
    eventually(rig.link.flush)
    begin = time.monotonic()
    rig.link.say(EndGroup("", GENERATION, "the core ends"))
    rig.link.close()
    assert "ended failed the core ends" in rig.node.last_words()
    assert time.monotonic() - begin < 5


def test_a_killed_core(rig: Rig) -> None:
    os.kill(rig.node.process.pid, signal.SIGSTOP)  # nothing is said in order
    rig.link.close()
    os.kill(rig.node.process.pid, signal.SIGCONT)
    assert "NodeLostError node 0's engine core is gone (tcp://127.0.0.1:" in rig.node.last_words()


def test_an_orderly_end(rig: Rig) -> None:
    rig.send(NameCall(1, ALL_RANKS, "check_health"))
    rig.hear(lambda: len(rig.answers) == 2)
    decoded = [rig.codec.decode(a.tag, a.head, a.buffers) for a in rig.answers]
    assert decoded == [PlainReply(1, "ok")] * 2
    rig.hear(lambda: any(isinstance(w, Places) and all(not p.busy_for for p in w.places) for w in rig.words))
    rig.send(ShutdownCall(2))
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in rig.node.pids))
    assert rig.node.process.poll() is None  # the workers' end was wanted
    rig.link.say(EndGroup("", GENERATION, "done", orderly=True))
    assert "ended orderly done" in rig.node.last_words()


@pytest.mark.parametrize("message", [(0, b"\x80\x05.", []), (6, b"junk", []), (4, b"\x91\x01", [])])
def test_a_call_that_is_none_ends_the_link(rig: Rig, message: tuple[int, bytes, list[memoryview]]) -> None:
    """A pickle, bytes, an answer: neither reaches a worker."""
    rig.link.send(rig.link.cut(message))
    assert "its data link is broken: a call came that is none of ours, or not the next one" in rig.node.last_words()
    rig.hear(lambda: Lost("its connection was closed") in rig.words)


def test_numbers_are_without_gaps(rig: Rig) -> None:
    rig.send(NameCall(2, ALL_RANKS, "check_health"))
    assert "not the next one" in rig.node.last_words()
