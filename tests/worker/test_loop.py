"""The busy loop on real rings, with a real process for the parent."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from launcher.clock import Deadline
from launcher.errors import InternalError
from launcher.ipc import EMPTY, QueueReader, QueueWriter, Ring, Watched
from launcher.worker.loop import Loop
from launcher.worker.rpc import (
    ALL_RANKS,
    ErrorReply,
    PlainReply,
    RpcCall,
    ShutdownCall,
    StepCall,
    StepReply,
    make_codec,
)
from launcher.worker.step import StepPlan
from tests.conftest import eventually

RANK = 1


class Work:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def execute_model(self, plan: StepPlan) -> None:
        self.seen.append(plan.step)

    def note(self, what: Any) -> Any:
        self.seen.append(what)
        return what

    def leave(self) -> None:
        raise SystemExit(3)

    def give_a_lock(self) -> Any:
        return threading.Lock()


class Rig:
    """A loop in a thread, this test as its engine core, and a sleeping process as its parent."""

    def __init__(self) -> None:
        self.rings = [Ring.create("calls", 1, 1 << 16), Ring.create("answers", 1, 1 << 16)]
        codec = make_codec()
        self.calls = QueueWriter(*self.rings[0].writer_handle(), codec=codec, own_fds=False)
        self.answers = QueueReader(*self.rings[1].reader_handle(0), codec=codec, own_fds=False)
        self.theirs = (
            QueueReader(*self.rings[0].reader_handle(0), codec=codec, own_fds=False),
            QueueWriter(*self.rings[1].writer_handle(), codec=codec, own_fds=False),
        )
        self.parent = subprocess.Popen(["sleep", "1000"])
        self.pidfd = os.pidfd_open(self.parent.pid)
        self.stop_read, self.stop_write = os.pipe()
        self.stopped = False
        self.work = Work()
        self.loop = Loop(self.work, RANK, *self.theirs)
        self.why: Any = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        peer = Watched(self.pidfd, "parent", None, self.parent.pid)
        try:
            self.why = self.loop.run(parent=peer, stop_fd=self.stop_read, stop_requested=lambda: self.stopped)
        except BaseException as error:
            self.why = error

    def send(self, call: Any) -> None:
        self.calls.enqueue(call, deadline=Deadline.after(5))

    def answer(self) -> Any:
        return self.answers.dequeue(deadline=Deadline.after(5))

    def end(self) -> Any:
        self.thread.join(5)
        assert not self.thread.is_alive()
        return self.why

    def close(self) -> None:
        self.parent.kill()
        self.parent.wait()
        self.thread.join(5)
        for end in (self.calls, self.answers, *self.theirs, *self.rings):
            end.close()
        for fd in (self.pidfd, self.stop_read, self.stop_write):
            os.close(fd)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def test_all_calls_run_and_only_the_reply_rank_answers(rig: Rig) -> None:
    rig.send(RpcCall(1, 0, "note", ("a",)))
    rig.send(RpcCall(2, RANK, "note", ("b",)))
    rig.send(RpcCall(3, 0, "note", ("c",)))
    rig.send(RpcCall(4, ALL_RANKS, "note", ("d",)))
    rig.send(StepCall(5, RANK, StepPlan(9)))
    assert [rig.answer() for _ in range(3)] == [PlainReply(2, "b"), PlainReply(4, "d"), StepReply(5, None)]
    assert rig.work.seen == ["a", "b", "c", "d", 9]
    assert rig.answers.try_dequeue() is EMPTY
    rig.send(ShutdownCall(6))
    assert rig.end() == "shutdown"


def test_errors_are_always_sent_and_the_loop_goes_on(rig: Rig) -> None:
    rig.send(RpcCall(1, 0, "no_such_method"))
    rig.send(RpcCall(2, 0, "leave"))
    rig.send(RpcCall(3, RANK, "give_a_lock"))
    rig.send(RpcCall(4, RANK, "note", ("still here",)))
    errors = [rig.answer() for _ in range(3)]
    assert all(isinstance(error, ErrorReply) for error in errors)
    assert [(e.call_id, e.type_name) for e in errors] == [(1, "UsageError"), (2, "SystemExit"), (3, "UsageError")]
    assert "in leave" in errors[1].remote_traceback
    assert rig.answer() == PlainReply(4, "still here")


class _Elsewhere:
    def __reduce__(self) -> Any:
        return __import__, ("not_there_module",)


def test_a_call_that_cannot_be_read_is_answered_under_its_number(rig: Rig) -> None:
    rig.send(RpcCall(1, RANK, "note", ("first",)))
    rig.send(RpcCall(2, 0, "note", (_Elsewhere(),)))
    rig.send(RpcCall(3, RANK, "note", ("third",)))
    assert rig.answer() == PlainReply(1, "first")
    error = rig.answer()
    assert (error.call_id, "not_there_module" in error.message) == (2, True)
    assert rig.answer() == PlainReply(3, "third")


def test_a_stop_comes_after_the_calls_that_were_sent(rig: Rig) -> None:
    rig.send(RpcCall(1, RANK, "note", (1,)))
    rig.stopped = True
    os.write(rig.stop_write, b"x")
    assert rig.end() == "stop"
    assert rig.work.seen == [1]


def test_the_death_of_the_parent_ends_it(rig: Rig) -> None:
    rig.send(RpcCall(1, RANK, "note", (1,)))
    rig.answer()
    rig.parent.kill()
    assert rig.end() == "parent gone"


def test_a_ring_that_was_shut_down_ends_it(rig: Rig) -> None:
    rig.rings[0].shutdown()
    assert rig.end() == "parent gone"


def test_a_broken_ring_is_not_asked_for_ever(rig: Rig) -> None:
    rig.send(RpcCall(1, RANK, "note", (1,)))
    rig.answer()
    calls = rig.theirs[0]
    calls._words[calls._mine + 1] += 1
    rig.send(RpcCall(2, RANK, "note", (2,)))
    assert isinstance(rig.end(), InternalError)


def test_the_mark_follows_the_calls(rig: Rig) -> None:
    gate = threading.Event()
    rig.work.wait = lambda: gate.wait(5)  # type: ignore[attr-defined]
    rig.send(RpcCall(1, 0, "wait"))
    eventually(lambda: rig.loop.mark.busy and rig.loop.mark.call_id == 1, 5, "busy with call 1")
    gate.set()
    rig.send(StepCall(2, RANK, StepPlan(1)))
    rig.answer()
    eventually(lambda: not rig.loop.mark.busy and rig.loop.mark.steps == 1, 5, "idle after one step")
