"""A helper that is stopped, hung or dead holds nobody up: it is replaced, and who needed it is forked from the next."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from launcher.errors import Failure, ForkerLostError
from launcher.process import channel, kernel, procfs
from launcher.process.child import run_child
from launcher.process.helper import HelperSettings
from launcher.process.helper_client import Helper, helper_spec
from launcher.process.nursery import Nursery
from launcher.process.wires import Wires
from tests.conftest import eventually
from tests.process.conftest import LAUNCH_ID, is_alive, spec
from tests.process.test_clean_fork import Silent

_SUBREAPER = 36
Make = Callable[..., Helper]


@pytest.fixture
def make() -> Iterator[Make]:
    """A helper with the given preload, and `Helper`'s options; `wait_ready` has it up."""
    kernel.become_subreaper()
    wires = Wires(Silent(), lambda _: 0)
    made: list[Helper] = []

    def start(*preload: str, retry: bool = False) -> Helper:
        settings = HelperSettings(preload=preload, launch_id=LAUNCH_ID)
        made.append(Helper(helper_spec("forkserver", settings, dict(os.environ)), wires, None, retry=retry))
        made[-1].start()
        return made[-1]

    yield start
    for each in made:
        each.close()
    wires.close()
    kernel._prctl(_SUBREAPER, 0)


def wait_ready(helper: Helper) -> None:
    def ready() -> bool:
        helper.pump()
        return helper.is_ready

    eventually(ready, 20, "the helper")


def replaced(helper: Helper, old: int) -> None:
    def other() -> bool:
        helper.pump()
        return helper.is_ready and helper.pid != old

    eventually(other, 20, "another helper")


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_fork_that_does_not_come_is_told_and_hurts_nobody_else(make: Make, number: signal.Signals) -> None:
    helper = make()
    deaths: list[Failure] = []
    helper.on_death = deaths.append
    wait_ready(helper)
    nursery = Nursery("forkserver", forker=helper)
    try:
        [first] = nursery.start_all([spec("good", 0)])
        nursery.wait_ready(10)
        old = helper.pid
        os.kill(old, number)
        eventually(lambda: (stat := procfs.read_stat(old)) and stat.state in "TZ", 5)
        with pytest.raises(ForkerLostError, match=r"cannot fork: in state [TZ]"):
            nursery.start_all([spec("good", 1)])
        helper.replace("the helper cannot fork")
        assert not helper.is_ready, "nobody asks it again"
        assert is_alive(first.pid)
        replaced(helper, old)
        assert [(failure.title, failure.pid) for failure in deaths] == [("Forkserver", old)]
        assert not is_alive(old)
        nursery.start_all([spec("good", 1)])
        nursery.wait_ready(10)
        assert nursery.stop(10) == []
    finally:
        nursery.close()


def test_it_answers_pings(make: Make) -> None:
    helper = make()
    answers: list[int] = []
    helper.on_pong = lambda: answers.append(1)
    wait_ready(helper)
    helper.ping(1)

    def answered() -> bool:
        helper.pump()
        return bool(answers)

    eventually(answered, 5)


def test_a_first_start_is_not_repeated_unless_asked(make: Make) -> None:
    helper = make("no_such_module_anywhere")

    def failed() -> bool:
        helper.pump()
        return helper.failure is not None

    eventually(failed, 20)
    assert "no_such_module_anywhere" in str(helper.failure)


def test_one_that_never_comes_up_is_given_up_and_only_guards(make: Make) -> None:
    deaths: list[Failure] = []
    helper = make("no_such_module_anywhere", retry=True)
    helper.on_death = deaths.append
    wait_ready(helper)
    assert len(deaths) == 3
    assert not helper.warm
    assert helper.failure is None


def test_how_long_a_start_makes_no_progress(make: Make) -> None:
    helper = make("tests.process.sleepy")
    eventually(lambda: (helper.pump(), helper.idle_start > 0.3)[1], 10)
    helper.replace("not ready: too slow")
    eventually(lambda: (helper.pump(), helper.failure)[1], 10)
    assert helper.failure is not None
    assert helper.failure.headline == "not ready: too slow"
    assert helper.idle_start == 0


def test_a_fork_whose_parent_died_meanwhile_leaves_at_once() -> None:
    ours, theirs = channel.pair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        run_child(theirs, 2**22 + 1, arm=True, wait_for_parent=True)  # nobody has this pid
    theirs.close()
    ours.close()
    assert eventually(lambda: os.waitpid(pid, os.WNOHANG)[0], 2, "gone")
