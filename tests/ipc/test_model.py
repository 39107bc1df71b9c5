"""Ring and arena against a list, by a state machine: whatever readers do, each gets what was sent, in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from launcher.errors import DeadlineError
from launcher.ipc import EMPTY, QueueReader, layout
from tests.ipc.conftest import CODEC, Note, Queue

READERS = 3
indexes = st.integers(0, READERS - 1)


class QueueMachine(RuleBasedStateMachine):
    """The model: all that was sent; for each reader the number it reads next, or None when it is away."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        # Small zones and limits, so that a few messages fill them.
        self.patch.setattr("launcher.ipc.layout.HOT_BYTES", 1024)
        self.patch.setattr("launcher.ipc.layout.HOT_RECORDS", 1)
        self.patch.setattr("launcher.ipc.writer.VIEW_BYTES", 2048)
        self.patch.setattr("launcher.ipc.writer.IN_FLIGHT_BYTES", 256 << 10)
        self.patch.setattr("launcher.ipc.arena.WARM_BYTES", 128 << 10)
        self.queue = Queue(READERS, 8192)
        self.sent: list[Any] = []
        self.at: list[int | None] = [0] * READERS
        self.held: list[tuple[int, Any, Any]] = []
        """Arrays that readers keep, and what must be in them."""

    def send(self, obj: Any) -> None:
        """A full queue refuses, and stays as it was."""
        try:
            self.queue.send(obj, seconds=0)
        except DeadlineError:
            behind = [at for at in self.at if at is not None]
            assert behind
            assert min(behind) < len(self.sent), "only an unread message can be in the way"
        else:
            self.sent.append(obj)

    @rule(size=st.one_of(st.integers(0, 300), st.integers(0, 2040), st.integers(2040, 60_000)))
    def send_bytes(self, size: int) -> None:
        self.send(bytes([len(self.sent) % 251]) * size)

    @rule(text=st.text(max_size=20))
    def send_struct(self, text: str) -> None:
        self.send(Note(len(self.sent), text))

    @rule(count=st.sampled_from([0, 3, 400, 5000]))
    def send_array(self, count: int) -> None:
        array = np.full(count, len(self.sent), np.int32)
        kept = array.copy()
        self.send(array)
        array[:] = -1  # the sender may use it again at once
        if self.sent and self.sent[-1] is array:
            self.sent[-1] = kept

    @rule(index=indexes, keep=st.booleans())
    def read(self, index: int, keep: bool) -> None:
        at = self.at[index]
        if at is None:
            return
        message = self.queue.readers[index].try_dequeue()
        if message is EMPTY:
            assert at == len(self.sent)
            return
        wanted = self.sent[at]
        assert type(message) is type(wanted)
        assert np.array_equal(message, wanted) if isinstance(wanted, np.ndarray) else message == wanted
        self.at[index] = at + 1
        if keep and isinstance(wanted, np.ndarray):
            message += index  # its own memory: the other readers must not see it
            self.held.append((index, message, wanted + index))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))

    @rule(index=indexes)
    def leave(self, index: int) -> None:
        self.queue.readers[index].close()
        self.at[index] = None

    @rule(index=indexes)
    def join(self, index: int) -> None:
        if self.at[index] is None:
            # What an old reader keeps stands in the way of a new one in its place.
            self.held = [kept for kept in self.held if kept[0] != index]
            assert self.queue.writer.admit(index) == len(self.sent)
            ring = self.queue.ring
            self.queue.readers[index] = QueueReader(*ring.reader_handle(index), codec=CODEC, own_fds=False)
            self.at[index] = len(self.sent)

    @invariant()
    def what_is_kept_stays(self) -> None:
        for _, array, wanted in self.held:
            assert np.array_equal(array, wanted)

    def teardown(self) -> None:
        try:
            self.held.clear()
            for index, at in enumerate(self.at):
                for _ in range(len(self.sent) if at is None else at, len(self.sent)):
                    self.read(index, keep=False)
            self.queue.writer._strike_leavers()
            self.queue.writer._arena.reclaim()
            assert not self.queue.writer._arena.regions, "every region came back"
            assert self.queue.writer._arena.spare_slots == layout.SLOTS
        finally:
            self.queue.close()
            self.patch.undo()


TestQueueModel = QueueMachine.TestCase
TestQueueModel.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
