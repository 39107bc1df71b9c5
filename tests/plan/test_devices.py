"""Device lists in every form that drivers take, each mistake in words of its own."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.config import LaunchConfig
from launcher.errors import UsageError
from launcher.host import Gpu, HostFacts
from launcher.host.visible import DIALECTS, Dialect, read_visible
from launcher.plan.devices import place_devices, through_host
from tests.plan.made_facts import gpu_machine, machine

UUIDS = ("GPU-8932f937-aaaa", "GPU-8932f937-bbbb", "GPU-0c11d2e3-cccc", "GPU-ffff0000-dddd")
BY_NAME = {dialect.variable: dialect for dialect in DIALECTS}


def facts_of(value: str | None = None, **changes: Any) -> HostFacts:
    visible = read_visible(value, len(UUIDS), UUIDS)
    devices = tuple(Gpu(uuid=uuid) for uuid in UUIDS)
    return gpu_machine(
        gpus=len(visible.entries), gpus_present=4, gpu_devices=devices, gpu_entries=visible.entries, **changes
    )


@pytest.mark.parametrize(
    ("value", "entries"),
    [
        (None, ("0", "1", "2", "3")),
        ("2,3", ("2", "3")),
        (" 2 , 3 ", ("2", "3")),
        ("GPU-0c11d2e3-cccc", ("GPU-0c11d2e3-cccc",)),
        ("GPU-0c11", ("GPU-0c11d2e3-cccc",)),
        ("GPU-0C11", ("GPU-0c11d2e3-cccc",)),
        ("GPU-0c11,GPU-ffff", ("GPU-0c11d2e3-cccc", "GPU-ffff0000-dddd")),
        ("MIG-1f2e3d4c-5b6a", ("MIG-1f2e3d4c-5b6a",)),
        ("MIG-GPU-0c11d2e3-cccc/1/0", ("MIG-GPU-0c11d2e3-cccc/1/0",)),
        ("MIG-GPU-0c11d2e3-cccc/1/0,MIG-GPU-0c11d2e3-cccc/2/0", 2),
    ],
)
def test_forms(value: str | None, entries: object) -> None:
    found = read_visible(value, 4, UUIDS)
    assert found.fault == ""
    assert (len(found.entries) if isinstance(entries, int) else found.entries) == entries


@pytest.mark.parametrize(
    ("value", "left", "words"),
    [
        ("", 0, "is set but empty: it hides all 4 NVIDIA GPUs: unset it to use them"),
        ("  ", 0, "is set but empty"),
        ("-1", 0, "hides all 4 NVIDIA GPUs"),
        ("0,0", 0, "names 0 twice"),
        ("2,GPU-0c11", 0, "names GPU-0c11 twice"),
        ("GPU-0c11,2", 0, "names 2 twice"),
        ("7", 0, "'7' is out of range: there are 4 NVIDIA GPUs, 0 to 3"),
        ("0,7", 1, "the driver stops there and sees 1"),
        ("GPU-8932", 0, "is the beginning of 2 UUIDs (GPU-8932f937-aaaa, GPU-8932f937-bbbb): give more of it"),
        ("GPU-dead", 0, f"is none of the 4 NVIDIA GPUs here: there are {', '.join(UUIDS)}"),
        ("MIG-GPU-dead/1/0", 0, f"there are {', '.join(UUIDS)}"),
        ("gpu0", 0, "give a number or GPU-<uuid> or MIG-<uuid>"),
    ],
)
def test_faults(value: str, left: int, words: str) -> None:
    found = read_visible(value, 4, UUIDS)
    assert len(found.entries) == left
    assert words in found.fault
    assert found.fault.startswith(f"CUDA_VISIBLE_DEVICES={value!r}")
    assert "\n" not in found.fault


def test_a_single_gpu_is_called_so() -> None:
    assert "hides the only NVIDIA GPU:" in read_visible("", 1).fault


@pytest.mark.parametrize(
    ("variable", "value", "good"),
    [
        ("HIP_VISIBLE_DEVICES", "0,2", True),
        ("HIP_VISIBLE_DEVICES", "GPU-0c11", False),
        ("ROCR_VISIBLE_DEVICES", "0,GPU-365628c172834d70", True),
        ("ZE_AFFINITY_MASK", "0.1,2", True),
        ("ZE_AFFINITY_MASK", "9.0", False),
        ("ASCEND_RT_VISIBLE_DEVICES", "1,3", True),
        ("ASCEND_RT_VISIBLE_DEVICES", "0.1", False),
        ("CUDA_VISIBLE_DEVICES", "0.1", False),
    ],
)
def test_dialects(variable: str, value: str, good: bool) -> None:
    found = read_visible(value, 4, (), BY_NAME[variable])
    assert bool(found.fault) is not good
    assert good or variable in found.fault


# --- to workers ----------------------------------------------------------------------------------------------------


def test_without_ids_the_visible_ones_in_order() -> None:
    made = place_devices(LaunchConfig(tp=2), facts_of("2,3"), "cuda", 2)
    assert [(d.number, d.name, d.gpu, d.env) for d in made] == [(0, "2", 2, {}), (1, "3", 3, {})]


def test_ids_are_shown_to_the_workers_alone() -> None:
    made = place_devices(LaunchConfig(tp=2, device_ids=("3", "GPU-8932f937-a")), facts_of(), "cuda", 2)
    env = {"CUDA_VISIBLE_DEVICES": "3,GPU-8932f937-aaaa"}
    assert [(d.number, d.gpu, d.env) for d in made] == [(0, 3, env), (1, 0, env)]


def test_only_as_many_as_there_are_workers() -> None:
    [made] = place_devices(LaunchConfig(device_ids=("3", "2")), facts_of(), "cuda", 1)
    assert made.env == {"CUDA_VISIBLE_DEVICES": "3"}


def test_each_slice_is_shown_to_one_worker() -> None:
    """A process sees the first MIG slice of its list only."""
    slices = "MIG-GPU-0c11d2e3-cccc/1/0,MIG-GPU-0c11d2e3-cccc/2/0"
    made = place_devices(LaunchConfig(tp=2), facts_of(slices), "cuda", 2)
    assert [(d.number, d.env["CUDA_VISIBLE_DEVICES"], d.gpu) for d in made] == [
        (0, "MIG-GPU-0c11d2e3-cccc/1/0", 2),
        (0, "MIG-GPU-0c11d2e3-cccc/2/0", 2),
    ]


@pytest.mark.parametrize(
    ("ids", "shown", "numbers", "workers"),
    [
        (("0", "0"), "0", [0, 0], [2, 2]),
        (("2", "0", "2"), "2,0", [0, 1, 0], [2, 1, 2]),
        (("2", "GPU-0c11"), "2", [0, 0], [2, 2]),  # its two names
        (("GPU-0c11", "2"), "GPU-0c11d2e3-cccc", [0, 0], [2, 2]),
    ],
)
def test_several_workers_on_one_device(
    ids: tuple[str, ...], shown: str, numbers: list[int], workers: list[int]
) -> None:
    """The variable itself must not name a device twice: the driver would see none."""
    made = place_devices(LaunchConfig(tp=len(ids), device_ids=ids), facts_of(), "cuda", len(ids))
    assert [d.number for d in made] == numbers
    assert [d.workers for d in made] == workers
    assert {d.env["CUDA_VISIBLE_DEVICES"] for d in made} == {shown}


@pytest.mark.parametrize(
    ("ids", "expected"),
    [(("0", "1"), False), (("3", "GPU-8932f937-a"), False), (("0", "0"), True), (("2", "GPU-0c11"), True)],
)
def test_cards_that_are_shared_sum_in_host_memory(ids: tuple[str, ...], expected: bool) -> None:
    assert through_host(place_devices(LaunchConfig(tp=2, device_ids=ids), facts_of(), "cuda", 2)) is expected


def test_slices_sum_in_host_memory() -> None:
    """NCCL refuses two slices of a card, and none reaches another card."""
    slices = "MIG-GPU-0c11d2e3-cccc/1/0,MIG-GPU-0c11d2e3-cccc/2/0"
    assert through_host(place_devices(LaunchConfig(tp=2), facts_of(slices), "cuda", 2))
    assert not through_host(place_devices(LaunchConfig(tp=2), facts_of(), "cpu", 2))


def test_a_slice_may_be_shared_too() -> None:
    made = place_devices(LaunchConfig(tp=2, device_ids=("MIG-1f2e", "MIG-1f2e")), facts_of("MIG-1f2e"), "cuda", 2)
    assert [(d.number, d.workers, d.env) for d in made] == [(0, 2, {"CUDA_VISIBLE_DEVICES": "MIG-1f2e"})] * 2


@pytest.mark.parametrize(
    ("ids", "value", "words"),
    [
        (("7",), None, "--device-ids 7: '7' is out of range"),
        (("GPU-dead",), None, "there are GPU-8932f937-aaaa"),
        (("0", "2"), "2,3", "0 is not among what CUDA_VISIBLE_DEVICES leaves (2,3)"),
        (("2",), None, "names 1 devices, but --tp 2 needs 2"),
    ],
)
def test_ids_refused(ids: tuple[str, ...], value: str | None, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        place_devices(LaunchConfig(tp=2, device_ids=ids), facts_of(value), "cuda", 2)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_uuid_may_name_what_the_variable_numbers() -> None:
    [made] = place_devices(LaunchConfig(device_ids=("GPU-0c11",)), facts_of("2,3"), "cuda", 1)
    assert made.gpu == 2


def test_ids_on_the_cpu_are_refused() -> None:
    with pytest.raises(UsageError, match="--device-ids 0: this launch runs on the CPU"):
        place_devices(LaunchConfig(device_ids=("0",)), machine(), "cpu", 1)


@pytest.mark.parametrize("dialect", [d for d in DIALECTS if d.variable != "CUDA_VISIBLE_DEVICES"])
def test_another_accelerators_variable(dialect: Dialect) -> None:
    made = place_devices(LaunchConfig(tp=2, device_ids=("1", "3")), machine(accelerator=dialect), "cpu", 2)
    assert [d.env for d in made] == [{dialect.variable: "1,3"}] * 2
    with pytest.raises(UsageError, match="not what"):
        place_devices(LaunchConfig(device_ids=("x",)), machine(accelerator=dialect), "cpu", 1)
