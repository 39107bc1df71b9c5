"""Facts read from made-up machines: trees with the files that the kernel would show."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher import host
from launcher.host.visible import read_visible

GIB = 1 << 30
V2_MOUNT = "30 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def tree(root: Path, files: dict[str, object]) -> Path:
    """Files below `root`; a path that ends in / is a directory."""
    for name, content in files.items():
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def machine(root: Path, available_kib: int, files: dict[str, object]) -> Path:
    meminfo = f"MemTotal:       99999999 kB\nMemFree:  1 kB\nMemAvailable:   {available_kib} kB\nCached: 5 kB"
    return tree(root, {"proc/meminfo": meminfo, **files})


def v1_mount(controller: str, root: str = "/") -> str:
    return f"35 31 0:32 {root} /sys/fs/cgroup/{controller} rw - cgroup cgroup rw,{controller}\n"


# --- this machine --------------------------------------------------------------------------------------------------


def test_this_machine() -> None:
    facts = host.read_host()
    assert facts.cpus == len(os.sched_getaffinity(0))
    assert facts.uid == os.getuid()
    assert facts.memory_free > 0
    assert facts.memory_origin
    assert facts.hostname
    assert 0 < facts.nofile_soft <= facts.nofile_hard
    assert facts.pidfd
    assert facts.memfd
    assert facts.gpus <= facts.gpus_present or facts.gpus_present == 0


def test_a_machine_that_shows_nothing(tmp_path: Path) -> None:
    facts = host.read_host(tmp_path)
    assert facts.memory_free > 0
    assert facts.cpu_quota is None
    assert facts.gpus_present == 0


# --- memory --------------------------------------------------------------------------------------------------------


def test_memory_without_control_groups(tmp_path: Path) -> None:
    assert host.memory_headroom_of(machine(tmp_path, 1024, {})) == (1 << 20, "MemAvailable")


def v2_group(path: str, limit: object, current: int, inactive: int = 0, high: object = "max") -> dict[str, object]:
    base = f"sys/fs/cgroup{path}"
    return {
        f"{base}/memory.max": limit,
        f"{base}/memory.high": high,
        f"{base}/memory.current": current,
        f"{base}/memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file 7",
    }


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        (("max", 1), ("max", 1), (8 * GIB, "MemAvailable")),
        ((4 * GIB, GIB), ("max", 1), (3 * GIB, "control group /a/b")),
        (("max", GIB), (2 * GIB, GIB), (GIB, "control group /a")),
        ((4 * GIB, GIB), (2 * GIB, GIB), (GIB, "control group /a")),
        ((64 * GIB, GIB), (64 * GIB, GIB), (8 * GIB, "MemAvailable")),
        # Page cache that can be dropped is free.
        ((4 * GIB, 4 * GIB, GIB), ("max", 1), (GIB, "control group /a/b")),
        # Over its limit (it was lowered): nothing, not less than nothing.
        ((GIB, 2 * GIB), ("max", 1), (0, "control group /a/b")),
        # memory.high throttles: it is a limit to us.
        ((4 * GIB, GIB, 0, 2 * GIB), ("max", 1), (GIB, "control group /a/b")),
    ],
)
def test_memory_under_version_2(
    tmp_path: Path, inner: tuple[object, int], outer: tuple[object, int], expected: tuple[int, str]
) -> None:
    root = machine(
        tmp_path,
        8 * GIB // 1024,
        {
            "proc/self/cgroup": "0::/a/b",
            "proc/self/mountinfo": V2_MOUNT,
            **v2_group("/a/b", *inner),
            **v2_group("/a", *outer),
        },
    )
    assert host.memory_headroom_of(root) == expected
    assert host.memory_headroom(root) == expected[0]


def v1_group(path: str, limit: int, usage: int, inactive: int = 0) -> dict[str, object]:
    base = f"sys/fs/cgroup/memory{path}"
    return {
        f"{base}/memory.limit_in_bytes": limit,
        f"{base}/memory.usage_in_bytes": usage,
        f"{base}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}",
    }


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({"/x": (9223372036854771712, 1)}, (8 * GIB, "MemAvailable")),
        ({"/x": (2 * GIB, GIB)}, (GIB, "control group /x")),
        ({"/x": (2 * GIB, 2 * GIB, GIB // 2)}, (GIB // 2, "control group /x")),
        ({"/x": (9223372036854771712, 1), "": (3 * GIB, GIB)}, (2 * GIB, "control group /")),
    ],
)
def test_memory_under_version_1(tmp_path: Path, groups: dict[str, tuple[int, int]], expected: tuple[int, str]) -> None:
    files: dict[str, object] = {
        "proc/self/cgroup": "4:memory:/x\n1:cpu,cpuacct:/y\n0::/",
        "proc/self/mountinfo": v1_mount("cpu") + v1_mount("memory") + "31 23 0:28 / /sys rw - sysfs sysfs rw\n",
    }
    for path, numbers in groups.items():
        files |= v1_group(path, *numbers)
    assert host.memory_headroom_of(machine(tmp_path, 8 * GIB // 1024, files)) == expected


def test_a_container_without_a_namespace_sees_its_path_from_the_machines_root(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        8 * GIB // 1024,
        {
            "proc/self/cgroup": "4:memory:/docker/c1/inner",
            "proc/self/mountinfo": v1_mount("memory", "/docker/c1"),
            **v1_group("/inner", 3 * GIB, GIB),
            **v1_group("", 2 * GIB, GIB),
        },
    )
    assert host.memory_headroom_of(root) == (GIB, "control group /")


def test_a_group_outside_the_namespace_is_read_at_the_mount(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        8 * GIB // 1024,
        {"proc/self/cgroup": "0::/../other", "proc/self/mountinfo": V2_MOUNT, **v2_group("", 2 * GIB, GIB)},
    )
    assert host.memory_headroom_of(root) == (GIB, "control group /")


def test_a_mount_point_with_a_blank(tmp_path: Path) -> None:
    mount = "30 23 0:28 / /sys/fs/my\\040groups rw - cgroup2 none rw\n"
    files = {f"sys/fs/my groups/{n}": v for n, v in (("memory.max", 2 * GIB), ("memory.current", GIB))}
    root = machine(tmp_path, 8 * GIB // 1024, {"proc/self/cgroup": "0::/", "proc/self/mountinfo": mount, **files})
    assert host.memory_headroom(root) == GIB


@pytest.mark.parametrize("content", ["", "garbage", "-5", "1 2"])
def test_a_limit_that_is_no_number_is_no_limit(tmp_path: Path, content: str) -> None:
    root = machine(
        tmp_path,
        1024,
        {"proc/self/cgroup": "0::/", "proc/self/mountinfo": V2_MOUNT, **v2_group("", content, 1)},
    )
    assert host.memory_headroom(root) == 1 << 20


# --- CPU quota, processes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        ("max 100000", "max 100000", None),
        ("400000 100000", "max 100000", 4.0),
        ("400000 100000", "150000 100000", 1.5),
        ("50000 100000", "150000 100000", 0.5),
        ("", "150000 100000", 1.5),
        ("0 100000", "nonsense", None),
    ],
)
def test_cpu_quota_version_2(tmp_path: Path, inner: str, outer: str, expected: float | None) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/a/b/cpu.max": inner,
            "sys/fs/cgroup/a/cpu.max": outer,
        },
    )
    assert host.cpu_quota(root) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", None), ("250000", 2.5), ("", None)])
def test_cpu_quota_version_1(tmp_path: Path, quota: str, expected: float | None) -> None:
    mount = "35 31 0:32 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "1:cpu,cpuacct:/a",
            "proc/self/mountinfo": mount,
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": quota,
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000",
        },
    )
    assert host.cpu_quota(root) == expected


@pytest.mark.skipif(os.getuid() != 0, reason="others have RLIMIT_NPROC as a second bound")
@pytest.mark.parametrize(("limit", "used", "expected"), [("max", 3, None), (100, 30, 70), (10, 30, 0)])
def test_processes_free(tmp_path: Path, limit: object, used: int, expected: int | None) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/a/pids.max": limit,
            "sys/fs/cgroup/a/pids.current": used,
        },
    )
    assert host.processes_free(root) == expected


# --- GPUs ----------------------------------------------------------------------------------------------------------

PROC_GPUS: dict[str, object] = {f"proc/driver/nvidia/gpus/0000:0{i}:00.0/information": "Model: x" for i in range(4)}


def test_gpus_are_counted_by_device_node(tmp_path: Path) -> None:
    nodes: dict[str, object] = {f"dev/{n}": "" for n in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "null")}
    assert host.gpus_present(tree(tmp_path, {**nodes, **PROC_GPUS})) == 2


def test_a_container_without_nodes_has_no_gpu_whatever_the_driver_lists(tmp_path: Path) -> None:
    assert host.gpus_present(tree(tmp_path, PROC_GPUS)) == 0


def test_a_machine_whose_nodes_are_yet_to_be_made(tmp_path: Path) -> None:
    assert host.gpus_present(tree(tmp_path, {**PROC_GPUS, "usr/bin/nvidia-modprobe": ""})) == 4


@pytest.mark.parametrize(
    ("value", "present", "count", "note"),
    [
        (None, 4, 4, ""),
        ("0", 4, 1, ""),
        ("2,3", 4, 2, ""),
        (" 2 , 3 ", 4, 2, ""),
        ("3,2,1,0", 4, 4, ""),
        ("GPU-8e5f", 4, 1, ""),
        ("GPU-8e5f,GPU-11aa", 4, 2, ""),
        ("MIG-8e5f", 1, 1, ""),
        ("", 4, 0, "hides all 4"),
        ("  ", 4, 0, "hides all 4"),
        ("-1", 4, 0, "hides all 4"),
        ("-1,0", 4, 0, "hides all 4"),
        ("0,0", 4, 0, "twice"),
        ("0,1,0", 4, 0, "twice"),
        ("7", 4, 0, "'7' is out of range: there are 4 NVIDIA GPUs, 0 to 3"),
        ("0,-1,1", 4, 1, "'-1' is none"),
        ("0,,1", 4, 1, "'' is none"),
        ("all", 4, 0, "'all' is none"),
        ("0,1,4", 4, 2, "sees 2"),
        # On a machine without GPUs the variable changes nothing, and nothing is said about it.
        ("0", 0, 0, ""),
        ("", 0, 0, ""),
    ],
)
def test_visible_gpus(value: str | None, present: int, count: int, note: str) -> None:
    entries, line = read_visible(value, present)
    assert len(entries) == count
    assert note in line
    assert bool(note) == bool(line)
    assert "\n" not in line


def test_read_host_honours_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tree(tmp_path, {f"dev/nvidia{i}": "" for i in range(4)})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    facts = host.read_host(tmp_path)
    assert (facts.gpus, facts.gpus_present, facts.omp_num_threads) == (2, 4, 3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", None),
        ("__version__ = '2.13.0+cu128'\ncuda: Optional[str] = '12.8'\nhip = None\n", "12.8"),
        ("cuda = '11.8'\n", "11.8"),
        ("", None),
    ],
)
def test_torch_cuda_is_read_without_importing_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, expected: str | None
) -> None:
    import importlib.machinery
    import importlib.util

    tree(tmp_path, {"torch/__init__.py": "raise AssertionError('imported')", "torch/version.py": text})
    spec = importlib.machinery.PathFinder.find_spec("torch", [str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert host.torch_cuda() == expected


def test_torch_cuda_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert host.torch_cuda() is None
