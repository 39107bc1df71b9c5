"""NVML as the second witness of where a GPU is: a made-up library, since this may run where there is none."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.host.gpus import Gpu, _ask_driver
from launcher.host.numa import NumaNode
from launcher.host.nvml import nodes_of_gpus


class Library:
    NVML_AFFINITY_SCOPE_NODE = 0

    class NVMLError(Exception):
        pass

    def __init__(self, words: dict[str, list[int]], *, broken: bool = False) -> None:
        self._words, self._broken, self.open = words, broken, 0

    def nvmlInit(self) -> None:
        if self._broken:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self._words:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetMemoryAffinity(self, card: str, size: int, scope: int) -> list[int]:
        return (self._words[card] + [0] * size)[:size]


@pytest.mark.parametrize(
    ("words", "nodes"), [([0b1], (0,)), ([0b110], (1, 2)), ([0, 0b1], (64,)), ([1 << 63], (63,)), ([], None)]
)
def test_bits_are_nodes(words: list[int], nodes: tuple[int, ...] | None) -> None:
    library = Library({"GPU-a": words})
    assert nodes_of_gpus(["GPU-a", "GPU-unknown"], library) == ({"GPU-a": nodes} if nodes else {})
    assert library.open == 0


def test_no_driver_is_no_error() -> None:
    assert nodes_of_gpus(["GPU-a"], Library({}, broken=True)) == {}


def made_node(number: int) -> NumaNode:
    fields: dict[str, Any] = {"id": number, "cpus": (number,)}
    return NumaNode(**fields)


def test_the_driver_is_asked_for_what_the_bus_does_not_say() -> None:
    gpus = [Gpu(uuid="GPU-a"), Gpu(uuid="GPU-b", nodes=(0,)), Gpu(uuid="GPU-c"), Gpu()]
    library = Library({"GPU-a": [0b10], "GPU-b": [0b10], "GPU-c": [0b100]})
    two = (made_node(0), made_node(1))
    asked = _ask_driver(gpus, two, library)
    assert [gpu.nodes for gpu in asked] == [(1,), (0,), (), ()], "a node that this machine has not is not believed"
    assert _ask_driver(gpus, two[:1], library) == tuple(gpus), "one node: no question"
