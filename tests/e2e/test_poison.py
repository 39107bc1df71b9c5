"""A request that kills every engine core it is given to, against the restarts that a launch is allowed."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.conftest import eventually
from tests.e2e.launch import Launch
from tests.e2e.test_faults import expected

Start = Callable[..., Launch]
POISON = "!"
NEEDED = 4
"""Restarts until one poison in company is found: two deaths in company, two alone."""


def served(launch: Start, restarts: int) -> tuple[Launch, Future[str], list[Future[str]]]:
    """A launch whose engine has been given poison, and others with it."""
    launched = launch(
        "--tp", "1", "--restart-backoff", "0", "--max-restarts", str(restarts),
        "--worker-config", "step_ms=5", "--worker-config", f"poison_token={ord(POISON)}",
    )  # fmt: skip
    launched.wait_ready()
    threads = ThreadPoolExecutor(4)
    good = [threads.submit(launched.complete, f"good {i}", 200, 60) for i in range(3)]
    eventually(lambda: "xserve_requests_in_flight 3" in launched.get("/metrics")[1], what="they run")
    poison = threads.submit(launched.complete, f"bad {POISON}", 5, 60)
    threads.shutdown(wait=False)
    return launched, poison, good


def error_of(future: Future[str]) -> dict[str, str]:
    with pytest.raises(urllib.error.HTTPError) as refused:
        future.result(60)
    with refused.value as answer:
        found: dict[str, str] = json.load(answer)["error"]
        return found


def test_it_is_found_and_the_others_are_answered(launch: Start) -> None:
    launched, poison, good = served(launch, NEEDED)
    assert error_of(poison)["code"] == "poison_request"
    for number, future in enumerate(good):
        assert future.result(60) == expected(f"good {number}", 200)
    assert f"restart {NEEDED} of {NEEDED} within 600 s" in launched.output
    assert launched.stop() == 0
    launched.assert_nothing_left()


def test_with_too_few_restarts_the_tree_ends_and_nobody_is_called_poison(launch: Start) -> None:
    launched, poison, good = served(launch, NEEDED - 1)
    for future in (poison, *good):
        error = error_of(future)
        assert error["code"] == "engine_dead", error
        assert "its restarts are used up" in error["message"], error
    assert launched.wait_exit() == 125, launched.output
    assert f"not started again: {NEEDED - 1} restarts within 600 s are all that --max-" in launched.output
    launched.assert_nothing_left()
