"""Children for real: started by fork and by exec, heard, judged, stopped, reaped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from launcher.errors import ChildFailedError, UsageError
from launcher.process.nursery import Nursery
from launcher.process.reports import Handover, Step
from launcher.process.spec import ChildMethod
from tests.conftest import eventually
from tests.process.conftest import is_alive, spec

Start = Callable[..., Nursery]


def test_all_ready_then_all_gone(start: Start) -> None:
    nursery = start("good", "good", "good", "good")
    nursery.wait_ready(10)
    assert all(child.is_ready and child.step is Step.READY for child in nursery.children)
    pids = [child.pid for child in nursery.children]
    assert [child.ready_info["pid"] for child in nursery.children if child.ready_info] == pids
    assert nursery.stop(10) == []
    assert all(child.exit == (0, None) and child.failure is None for child in nursery.children)
    assert not any(is_alive(pid) for pid in pids)


def test_names_and_session(start: Start) -> None:
    nursery = start("good")
    nursery.wait_ready(10)
    [child] = nursery.children
    with open(f"/proc/{child.pid}/comm") as file:
        assert file.read().strip() == "xs:w0"
    with open(f"/proc/{child.pid}/cmdline") as file:
        assert file.read().startswith("xserve::Worker_0")
    assert child.ready_info is not None
    assert child.ready_info["sid"] == child.pid


def test_environment_of_systemd_is_not_inherited(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/nowhere")
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    nursery = start("good")
    nursery.wait_ready(10)
    info = nursery.children[0].ready_info
    assert info is not None
    assert "NOTIFY_SOCKET" not in info["environment"]
    assert "WATCHDOG_USEC" not in info["environment"]
    assert info["environment"]["XSERVE_LAUNCH_ID"]


def test_each_child_holds_its_own_line_only(start: Start) -> None:
    nursery = start("descriptors", "descriptors", "descriptors", "descriptors")
    nursery.wait_ready(10)
    sockets: list[str] = []
    for child in nursery.children:
        assert child.ready_info is not None
        fds = child.ready_info["fds"]
        mine = [target for target in fds.values() if target.startswith("socket:")]
        assert len(mine) == 1, fds
        sockets += mine
        assert fds["0"] == "/dev/null"
    assert len(set(sockets)) == 4


def test_exception_travels_with_its_traceback(start: Start) -> None:
    nursery = start("good", "raises", "good")
    with pytest.raises(ChildFailedError) as caught:
        nursery.wait_ready(10)
    cause = caught.value.cause
    assert (cause.rank, cause.kind, cause.step) == (1, "raised", "model")
    assert cause.headline == "ValueError: no such weight"
    assert "in raises" in cause.traceback
    assert str(caught.value).startswith("rank 1 (Worker_1), pid ")


@pytest.mark.parametrize(
    ("target", "words"), [("dies", "died of signal 9 (SIGKILL)"), ("crashes", "died of signal 11 (SIGSEGV)")]
)
def test_hard_death(start: Start, target: str, words: str) -> None:
    nursery = start("good", target)
    with pytest.raises(ChildFailedError) as caught:
        nursery.wait_ready(10)
    assert caught.value.cause.kind == "died"
    assert caught.value.cause.headline == words
    assert caught.value.cause.step == "device"


def test_cause_before_follow_on(start: Start) -> None:
    nursery = start("raises_late", "raises")
    with pytest.raises(ChildFailedError) as caught:
        nursery.wait_ready(10)
    assert caught.value.cause.rank == 1
    assert [f.rank for f in caught.value.follow_ons] == [0]


def test_silent_child_is_named(start: Start) -> None:
    nursery = start("good", "hangs", "good")
    with pytest.raises(ChildFailedError) as caught:
        nursery.wait_ready(2)
    assert caught.value.cause.kind == "timeout"
    assert "rank 1 (Worker_1)" in str(caught.value)
    assert "step 'device' (--ready-timeout 2)" in str(caught.value)


def test_progress_moves_the_limit(start: Start) -> None:
    nursery = start("slow_but_alive")
    nursery.wait_step(Step.MODEL, 30)  # a new interpreter may take longer than the limit, and says nothing
    nursery.wait_ready(1.0)


def test_stop_kills_the_deaf_and_says_so(start: Start) -> None:
    nursery = start("good", "hangs_deaf")
    nursery.wait_ready(10)
    begin = time.monotonic()
    assert [child.title for child in nursery.stop(0.8)] == ["Worker_1"]
    assert 0.7 < time.monotonic() - begin < 4
    assert nursery.children[1].exit == (None, signal.SIGKILL)


def test_stop_before_ready(start: Start) -> None:
    nursery = start("hangs")
    nursery.wait_step(Step.DEVICE, 10)
    begin = time.monotonic()
    assert nursery.stop(10) == []
    assert time.monotonic() - begin < 5
    assert nursery.children[0].exit == (None, signal.SIGTERM)
    assert nursery.failures() == []


def test_handover(start: Start) -> None:
    nursery = start("takes_over")
    memfd = os.memfd_create("x")
    try:
        os.write(memfd, b"content")
        nursery.send(nursery.children[0], Handover(name="queues", payload=b"payload"), [memfd])
    finally:
        os.close(memfd)
    nursery.wait_ready(10)
    assert nursery.children[0].ready_info == {"payload": "payload", "file": "content"}


def test_large_payload_in_a_spec(method: ChildMethod) -> None:
    nursery = Nursery(method)
    try:
        nursery.start_all([spec("good", payload=b"x" * 3_000_000)])
        nursery.wait_ready(10)
    finally:
        nursery.close()


def test_death_after_ready_is_an_event(start: Start) -> None:
    nursery = start("good")
    nursery.wait_ready(10)
    [child] = nursery.children
    os.kill(child.pid, signal.SIGKILL)
    seen = eventually(lambda: [e for e in nursery.poll(1) if e.message is None], 5)
    assert seen
    assert nursery.failures()[0].headline == "died of signal 9 (SIGKILL)"
    with pytest.raises(ChildFailedError):
        nursery.raise_if_failed()


def test_fork_is_refused_with_threads() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    nursery = Nursery("fork")
    try:
        with pytest.raises(UsageError, match=r"fork is not safe here: this process runs 2 threads"):
            nursery.start_all([spec("good")])
    finally:
        done.set()
        thread.join()
        nursery.close()


_PARENT = """
import sys, os
sys.path[:] = {path!r}
from launcher.process.nursery import Nursery
from tests.process.conftest import spec
nursery = Nursery({method!r})
nursery.start_all([spec({target!r}, rank) for rank in range(4)])
nursery.wait_ready(20) if {ready} else nursery.wait_step("device", 20)
print(*[child.pid for child in nursery.children], flush=True)
import time; time.sleep(60)
"""


@pytest.mark.parametrize(("target", "ready"), [("good", True), ("hangs", False)])
def test_children_die_with_their_parent(method: ChildMethod, target: str, ready: bool) -> None:
    path = [os.getcwd(), *sys.path]
    program = _PARENT.format(path=path, method=method, target=target, ready=ready)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 4
        assert all(is_alive(pid) for pid in pids)
        parent.kill()
        eventually(lambda: not any(is_alive(pid) for pid in pids), 2, "children gone within 2 s")


def test_start_from_a_thread(method: ChildMethod) -> None:
    """The parent-death signal follows the starting thread: a child started from a short-lived one must live on."""
    if method == "fork":
        pytest.skip("a process with two threads is not forked")
    nursery = Nursery(method)
    try:
        thread = threading.Thread(target=lambda: nursery.start_all([spec("good")]))
        thread.start()
        thread.join()
        nursery.wait_ready(10)
        assert is_alive(nursery.children[0].pid)
        assert nursery.stop(5) == []
    finally:
        nursery.close()
