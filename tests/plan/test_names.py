"""Titles and comms: unique, and short enough for the kernel, for every rank up to 128."""

from __future__ import annotations

import pytest

from launcher.parallel.ranks import Coordinates
from launcher.plan import names


@pytest.mark.parametrize("dp", [0, 7, 63])
@pytest.mark.parametrize("pp", [1, 2, 16])
def test_workers(dp: int, pp: int) -> None:
    tp = 128 // pp
    comms = set()
    for rank in range(128):
        title, comm = names.worker(rank, Coordinates(0, dp, rank // tp, 0, rank % tp))
        assert title == f"Worker_DP{dp}_PP{rank // tp}_TP{rank % tp}"
        assert len(comm.encode()) <= names.COMM_BYTES
        assert comm.startswith(f"xs:w{rank}.d{dp}")
        comms.add(comm)
    assert len(comms) == 128


@pytest.mark.parametrize(
    ("rank", "at", "comm"),
    [
        (0, (0, 0, 0, 0, 0), "xs:w0.d0p0t0"),
        (3, (0, 0, 0, 0, 3), "xs:w3.d0p0t3"),
        (99, (0, 0, 0, 0, 99), "xs:w99.d0p0t99"),
        (127, (0, 0, 0, 0, 127), "xs:w127.d0t127"),
        (1000, (0, 100, 0, 0, 1000), "xs:w1000.d100"),
        (1000, (0, 100000000, 0, 0, 1000), "xs:w1000"),
    ],
)
def test_the_most_telling_form_that_fits(rank: int, at: tuple[int, int, int, int, int], comm: str) -> None:
    assert names.worker(rank, Coordinates(*at))[1] == comm


def test_others() -> None:
    assert names.api_server(0) == ("APIServer_0", "xs:api0")
    assert names.engine_core(12) == ("EngineCore_DP12", "xs:core.dp12")
    for comm in (names.SUPERVISOR_COMM, names.FORKSERVER_COMM, names.GUARD_COMM, names.COORDINATOR_COMM):
        assert len(comm) <= names.COMM_BYTES
