from __future__ import annotations

import os
import threading

import pytest

from launcher.clock import Deadline
from launcher.errors import DeadlineError
from launcher.process import channel
from launcher.process.reports import Handover, ReadyReport


@pytest.fixture
def ends():
    ours, theirs = channel.pair()
    parent, child = channel.parent_end(ours), channel.child_end(theirs)
    yield parent, child
    parent.close()
    child.close()


def test_messages_keep_order_and_borders(ends) -> None:
    parent, child = ends
    for number in range(20):
        child.send(ReadyReport(info={"n": number}))
    got = [parent.recv(Deadline.after(1))[0].info["n"] for _ in range(20)]
    assert got == list(range(20))
    assert parent.recv_nowait() is None


@pytest.mark.parametrize("size", [0, 1, 65_000, 66_000, 5_000_000])
def test_any_size_with_descriptors(ends, size: int) -> None:
    parent, child = ends
    read, write = os.pipe()
    parent.send(Handover(name="x", payload=b"p" * size), [read])
    message, fds = child.recv(Deadline.after(5))
    assert (message.name, len(message.payload), len(fds)) == ("x", size, 1)
    assert not os.get_inheritable(fds[0])
    os.write(write, b"hello")
    assert os.read(fds[0], 10) == b"hello"
    for fd in (read, write, *fds):
        os.close(fd)


def test_end_of_file_comes_after_the_last_message(ends) -> None:
    parent, child = ends
    child.send(ReadyReport())
    child.close()
    assert isinstance(parent.recv(Deadline.after(1))[0], ReadyReport)
    with pytest.raises(EOFError):
        parent.recv(Deadline.after(1))
    with pytest.raises(BrokenPipeError):
        parent.send(Handover(name="x"))


def test_unread_messages_of_ours_are_still_an_end_of_file(ends) -> None:
    parent, child = ends
    parent.send(Handover(name="never read"))
    child.close()
    with pytest.raises(EOFError):
        parent.recv(Deadline.after(1))


def test_deadlines(ends) -> None:
    parent, child = ends
    with pytest.raises(DeadlineError):
        parent.recv(Deadline.after(0.05))

    def fill() -> None:
        while True:
            child.send(ReadyReport(info={"x": "y" * 60_000}), deadline=Deadline.after(0.05))

    with pytest.raises(DeadlineError, match="has not read"):
        fill()


def test_a_waiting_sender_goes_on_when_read(ends) -> None:
    parent, child = ends
    total = 50
    thread = threading.Thread(
        target=lambda: [child.send(ReadyReport(info={"x": "y" * 60_000, "n": n})) for n in range(total)]
    )
    thread.start()
    assert [parent.recv(Deadline.after(5))[0].info["n"] for _ in range(total)] == list(range(total))
    thread.join()


def test_too_many_descriptors(ends) -> None:
    parent, _ = ends
    with pytest.raises(ValueError, match="at most 250"):
        parent.send(Handover(name="x"), [0] * 251)
