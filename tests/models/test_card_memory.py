"""What of a card goes to the KV cache, as a table; and the words when it is too little."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from launcher.host.card_holders import Holder, card_holders
from launcher.models.card_memory import Card, kv_room, no_room_for_weights, shortage

GIB = 1 << 30


@pytest.mark.parametrize(
    ("card", "utilization", "room"),
    [
        # total, in use, own, peak, ranks
        (Card(80 * GIB, 10 * GIB, 8 * GIB, 2 * GIB), 0.9, 60 * GIB),
        (Card(80 * GIB, 10 * GIB, 8 * GIB, 2 * GIB), 1.0, 68 * GIB),
        (Card(80 * GIB, 10 * GIB, 8 * GIB, 0), 0.5, 30 * GIB),
        # somebody else's 40 GiB count against our share
        (Card(80 * GIB, 50 * GIB, 8 * GIB, 2 * GIB), 0.9, 20 * GIB),
        (Card(80 * GIB, 75 * GIB, 8 * GIB, 2 * GIB), 0.9, -5 * GIB),
        # two ranks: the weights of both are in use, the peaks of both are to come
        (Card(80 * GIB, 20 * GIB, 8 * GIB, 2 * GIB, 2), 0.9, 24 * GIB),
        (Card(80 * GIB, 70 * GIB, 8 * GIB, 2 * GIB, 2), 0.9, -1 * GIB),
    ],
)
def test_the_room(card: Card, utilization: float, room: int) -> None:
    assert kv_room(card, utilization) == room


def test_ranks_on_one_card_never_take_more_than_the_share() -> None:
    for ranks in range(1, 9):
        for peak in (0, 1, GIB + 7):
            card = Card(80 * GIB, 17 * GIB + 3, GIB, peak, ranks)
            assert ranks * (kv_room(card, 0.9) + peak) + card.in_use <= int(80 * GIB * 0.9)


def test_too_little_is_one_line_with_the_whole_sum() -> None:
    card = Card(80 * GIB, 75 * GIB, 8 * GIB, 2 * GIB)
    holders = [Holder(17, "python train.py", 66 * GIB), Holder(18, "", None)]
    text = shortage(card, 0.9, name="cuda:0", batch=2048, least=GIB, length=4096, holders=holders)
    assert "\n" not in text
    for words in (
        "on cuda:0: 0.9 x 80.00 GiB - 75.00 GiB in use (this rank's weights 8.00 GiB, all else 67.00 GiB)",
        "- 2.00 GiB for a step of 2048 tokens = -5.00 GiB, but one sequence of 4096 tokens takes 1.00 GiB",
        "on that card: pid 17 (python train.py) 66.00 GiB, pid 18 (not shown here) an unknown part",
        "raise --gpu-memory-utilization",
    ):
        assert words in text


def test_ranks_on_one_card_are_in_the_sum() -> None:
    card = Card(80 * GIB, 70 * GIB, 8 * GIB, 2 * GIB, 2)
    text = shortage(card, 0.9, name="cuda:0", batch=64, least=GIB, length=9, holders="nobody knows")
    assert "- 2 x 2.00 GiB for a step of 64 tokens, over 2 ranks on it = -1.00 GiB" in text
    assert "; nobody knows; " in text


def test_a_full_card() -> None:
    text = no_room_for_weights(80 * GIB, GIB, name="cuda:1", holders=[])
    assert "does not fit on cuda:1: 1.00 GiB of 80.00 GiB are free; the driver names nobody" in text


class _Broken(Exception):
    pass


def library(**changes: Any) -> Any:
    processes = [SimpleNamespace(pid=1, usedGpuMemory=5), SimpleNamespace(pid=2, usedGpuMemory=None)]
    processes.append(SimpleNamespace(pid=3, usedGpuMemory=9))
    made = {
        "NVMLError": _Broken,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetComputeRunningProcesses": lambda _card: processes,
    }
    return SimpleNamespace(**(made | changes))


def test_holders_are_named_greatest_first(tmp_path: Any) -> None:
    (tmp_path / "proc/3").mkdir(parents=True)
    (tmp_path / "proc/3/cmdline").write_bytes(b"python\0train.py\0")
    assert card_holders("GPU-1", library(), tmp_path) == [
        Holder(3, "python train.py", 9),
        Holder(1, "", 5),
        Holder(2, "", None),
    ]


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetComputeRunningProcesses"])
def test_a_driver_that_does_not_answer(name: str) -> None:
    def fail(*_: object) -> None:
        raise _Broken("Driver Not Loaded")

    assert card_holders("GPU-1", library(**{name: fail})) == (
        "who else holds memory there is not known: Driver Not Loaded"
    )
