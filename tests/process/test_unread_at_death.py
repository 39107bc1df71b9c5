"""A process that dies with unread messages in its socket has still said what it said."""

from __future__ import annotations

import pytest

from launcher.process import channel
from launcher.process.reports import Goodbye, Handover, Step, StepReport


def test_reports_are_read_before_the_reset() -> None:
    ours, theirs = channel.pair()
    parent, child = channel.parent_end(ours), channel.child_end(theirs)
    try:
        parent.send(Handover("queues", b"never read"))
        child.send(StepReport(step=Step.IMPORT))
        child.send(Goodbye())
        child.close()
        assert parent.recv_nowait() == (StepReport(step=Step.IMPORT), [])
        assert parent.recv_nowait() == (Goodbye(), [])
        with pytest.raises(EOFError):
            parent.recv_nowait()
    finally:
        parent.close()
        child.close()
