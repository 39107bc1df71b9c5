"""What the doctor finds on machines that are well, and on those that are not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import checks
from launcher.cli.argv import normalise
from launcher.cli.checks import Check, host_checks
from launcher.cli.doctor import launch_checks
from launcher.cli.flags import LAUNCH
from launcher.cli.main import _given, main
from launcher.nodes.key_file import write_key
from tests.plan.made_facts import gpu_machine, machine
from tests.plan.model_files import write_model


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))


def found(name: str, **changes: Any) -> Check:
    return next(check for check in host_checks(machine(**changes)) if check.name == name)


def test_a_machine_that_is_well() -> None:
    made = list(host_checks(machine(nofile_soft=65536, nofile_hard=65536)))
    assert not [check for check in made if check.verdict == "fail"]
    assert {"kernel: pidfd", "memory", "open files", "NUMA", "run directory", "clock"} <= {check.name for check in made}


@pytest.mark.parametrize(
    ("name", "changes", "verdict", "mend"),
    [
        ("kernel: pidfd", {"pidfd": False}, "fail", "run on Linux 5.3 or later"),
        ("kernel: memfd", {"memfd": False}, "fail", "run on Linux 3.17 or later"),
        ("memory", {"memory_free": 1 << 30}, "warn", "docker run --memory"),
        ("open files", {"nofile_soft": 256, "nofile_hard": 256}, "warn", "LimitNOFILE=65536"),
        ("CPU quota", {"cpu_quota": 0.5}, "warn", "docker run --cpus"),
        ("processes and threads", {"processes_free": 100}, "warn", "docker run --pids-limit"),
        ("HIP_VISIBLE_DEVICES", {"hiding": (("HIP_VISIBLE_DEVICES", "a"),)}, "warn", "unset HIP_VISIBLE_DEVICES"),
    ],
)
def test_what_is_wrong_and_what_mends_it(name: str, changes: dict[str, Any], verdict: str, mend: str) -> None:
    check = found(name, **changes)
    assert check.verdict == verdict
    assert mend in check.mend
    assert "\n" not in check.text + check.mend


def test_numa_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.process.numa.denied", lambda: ("memory",))
    check = found("NUMA")
    assert (check.verdict, "binding memory is forbidden" in check.text) == ("warn", True)
    assert "--cap-add SYS_NICE" in check.mend


def write_smi(directory: Path, script: str) -> None:
    (directory / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (directory / "nvidia-smi").chmod(0o755)


SMI = """case "$1" in
--query-gpu=*) echo "0, GPU-1, NVIDIA X, 90000, 141000, 580.1, Disabled";;
*) echo "PID, 88000, GPU-1, python";; esac"""


def test_who_holds_a_gpus_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_smi(tmp_path, SMI.replace("PID", str(os.getpid())))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    made = {check.name: check for check in host_checks(gpu_machine(1, gpu_entries=("0",)))}
    assert "driver 580.1, 90000 of 141000 MiB in use" in made["GPU 0"].text
    assert made["GPU memory"].verdict == "warn"
    assert f"pid {os.getpid()} (" in made["GPU memory"].text
    assert made["GPU memory"].mend == f"if it is a leftover: kill {os.getpid()}"


@pytest.mark.parametrize(
    "script", ["echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "exit 9"]
)
def test_a_driver_that_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    write_smi(tmp_path, script)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    made = {check.name: check for check in host_checks(gpu_machine(1))}
    assert made["driver"].verdict == "fail"


def test_gpus_hidden_or_of_no_use_to_torch() -> None:
    made = {c.name: c for c in host_checks(gpu_machine(0, gpus_present=8, gpu_note="… hides all 8", torch_cuda=None))}
    assert (made["GPUs"].verdict, made["torch"].verdict) == ("fail", "fail")


def test_a_check_that_breaks_is_a_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from launcher.errors import HostError

    def broken() -> Path:
        raise HostError("cannot make the run directory /x: set XDG_RUNTIME_DIR")

    monkeypatch.setattr(checks.places, "base_for_new", broken)
    check = found("run directory")
    assert (check.verdict, check.text) == ("fail", "cannot make the run directory /x: set XDG_RUNTIME_DIR")


# --- a launch ------------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    code = main(["doctor", "--json", *arguments])
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] is (code == 0)
    return code, {check["name"]: check for check in shown["checks"]}


def test_a_good_launch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    code, made = run(capsys, "--model", str(write_model(model)), "--tp", "2", "--port", "0", "--device", "cpu")
    assert made["launch"]["text"].startswith("6 processes, start method forkserver")
    assert made["model"]["verdict"] == "pass"
    assert code == 0


@pytest.mark.parametrize(
    ("arguments", "name", "words"),
    [
        (["--tp", "0"], "flags", "--tp 0 is out of range"),
        (["--worker", "no_such_module_at_all:X", "--port", "0"], "launch", "no module 'no_such_module_at_all'"),
        (["--model", "/no/such/model", "--port", "0"], "launch", "no such directory"),
        (["--host", "203.0.113.7", "--port", "0"], "port", "is no address of this machine"),
    ],
)
def test_a_launch_that_will_not_work(
    capsys: pytest.CaptureFixture[str], arguments: list[str], name: str, words: str
) -> None:
    code, made = run(capsys, *arguments)
    assert code == 2
    assert made[name]["verdict"] == "fail"
    assert words in made[name]["text"]


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        code, made = run(capsys, "--port", str(sock.getsockname()[1]))
    assert code == 2
    assert f"by pid {os.getpid()}" in made["port"]["text"]
    assert made["port"]["mend"]


def test_a_model_that_would_be_downloaded_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    code, made = run(capsys, "--model", "nobody/nothing", "--port", "0")
    assert (code, made["model"]["verdict"], made["model"]["mend"]) == (0, "warn", "hf download nobody/nothing")


def test_the_table() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli", "doctor", "--port", "0"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass  kernel: pidfd" in done.stdout
    assert done.stdout.strip().splitlines()[-1].endswith("0 fail")


# --- several nodes


def node_checks(*flags: str) -> dict[str, Check]:
    given = _given(LAUNCH, normalise(["doctor", "--nnodes", "2", "--tp", "2", *flags])[1:])
    return {check.name: check for check in launch_checks(given, machine())}


def test_node_0_of_several(tmp_path: Path) -> None:
    write_key(tmp_path / "key")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    at = ("--master-addr", "127.0.0.1", "--master-port", port, "--port", "0")
    made = node_checks(*at, "--cluster-key-file", str(tmp_path / "key"))
    assert {name: check.verdict for name, check in made.items()} == dict.fromkeys(
        ("port", "address", "master port", "interface", "cluster key", "launch"), "pass"
    )
    assert node_checks(*at)["cluster key"].verdict == "warn"
    (tmp_path / "key").chmod(0o644)
    assert node_checks(*at, "--cluster-key-file", str(tmp_path / "key"))["cluster key"].verdict == "fail"
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", int(port)))
        holder.listen()
        taken = node_checks(*at)["master port"]
    assert (taken.verdict, f"127.0.0.1:{port}" in taken.text) == ("fail", True)
    assert "ss -ltnp" in taken.mend
    assert node_checks("--master-addr", "203.0.113.7", "--port", "0")["address"].verdict == "fail"
    assert node_checks("--iface", "nosuch0", "--port", "0")["address"].verdict == "fail"


def test_another_node() -> None:
    made = node_checks("--node-rank", "1", "--master-addr", "127.0.0.1")
    assert "port" not in made, "it serves no HTTP"
    assert made["master address"].text == "127.0.0.1 is reached by lo, as 127.0.0.1"
    assert made["interface"].text.startswith("lo is up: 127.0.0.1")
    assert made["launch"].verdict == "pass"
    named = node_checks("--node-rank", "1", "--master-addr", "localhost")["master address"]
    assert named.verdict == "pass"
    unknown = node_checks("--node-rank", "1", "--master-addr", "no-such-host.invalid")["master address"]
    assert unknown.verdict == "fail"
    assert "no-such-host.invalid" in unknown.text
    assert node_checks("--node-rank", "1")["address"].verdict == "fail"


def test_one_node_is_asked_nothing_of_the_kind() -> None:
    given = _given(LAUNCH, ["--port=0"])
    assert {check.name for check in launch_checks(given, machine())} == {"port", "launch"}
