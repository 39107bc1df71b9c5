"""Flag > variable > file > default; each mistake in a file is one line that names file and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli.launch_config import launch_config
from launcher.config import LaunchConfig
from launcher.errors import UsageError

TOML = """
tensor-parallel-size = 3
port = 9000
max_num_seqs = 7
numa-bind = true
device-ids = [2, "GPU-abc", 5]
numa-bind-nodes = [0, 0, 1]
numa-bind-cpus = ["0-1", "2", "3"]
ready_timeout = 12.5
[worker-config]
step_ms = 5
[env]
NCCL_DEBUG = "INFO"
"""
YAML = """
tensor-parallel-size: 3
port: 9000
max_num_seqs: 7
numa-bind: true
device-ids: [2, GPU-abc, 5]
numa-bind-nodes: 0,0,1
numa-bind-cpus: [0-1, 2, 3]
ready_timeout: 12.5
worker-config: {step_ms: 5}
env: [NCCL_DEBUG=INFO]
"""


def write(tmp_path: Path, name: str, text: str) -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


@pytest.mark.parametrize(("name", "text"), [("a.toml", TOML), ("a.yaml", YAML), ("a.YML", YAML)])
def test_every_kind_of_value(tmp_path: Path, name: str, text: str) -> None:
    path = write(tmp_path, name, text)
    made = launch_config({"config": path})
    assert (made.tp, made.port, made.max_num_seqs, made.ready_timeout) == (3, 9000, 7, 12.5)
    assert made.numa_bind is True
    assert made.device_ids == ("2", "GPU-abc", "5")
    assert made.numa_bind_nodes == (0, 0, 1)
    assert made.numa_bind_cpus == ((0, 1), (2,), (3,))
    assert made.worker_config == {"step_ms": "5"}
    assert made.env == {"NCCL_DEBUG": "INFO"}
    assert made.origins["tp"] == f"{path}: tensor-parallel-size"


def test_who_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "a.toml", "tp = 2\nport = 9000\nseed = 4\n")
    monkeypatch.setenv("XSERVE_PORT", "9001")
    monkeypatch.setenv("XSERVE_SEED", "5")
    made = launch_config({"config": path, "seed": "6"})
    assert (made.tp, made.port, made.seed, made.max_num_seqs) == (2, 9001, 6, 64)
    assert made.origins == {"tp": f"{path}: tp", "port": "XSERVE_PORT", "seed": "--seed"}


def test_the_file_can_be_named_by_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XSERVE_CONFIG", write(tmp_path, "a.toml", "tp = 2"))
    assert launch_config({}).tp == 2


def test_switches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "a.toml", "numa-bind = true")
    assert launch_config({"numa_bind": False}) == LaunchConfig()
    assert launch_config({"numa_bind": True}).numa_bind
    monkeypatch.setenv("XSERVE_NUMA_BIND", "0")
    assert not launch_config({"config": path}).numa_bind
    monkeypatch.setenv("XSERVE_NUMA_BIND", "maybe")
    with pytest.raises(UsageError, match="XSERVE_NUMA_BIND=maybe is neither on nor off"):
        launch_config({})


def test_a_key_of_the_command_line_overrules_a_key_file_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("k-in-file\n")
    path = write(tmp_path, "a.toml", f'api-key-file = "{tmp_path}/keys"')
    made = launch_config({"config": path, "api_key": "k-on-line"})
    assert (made.api_key, made.api_key_file) == ("k-on-line", None)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "tp = 0", "a.toml: tp = 0 is out of range: give 1 or more"),
        (
            "a.toml",
            "max_num_seq = 1",
            "unknown key 'max_num_seq': did you mean max-num-seqs? (keys are the flags of xserve launch)",
        ),
        ("a.toml", "tp = 1\ntp-size = 2", "tp and tp-size are one setting"),
        ("a.toml", "tp = [1, 2]", "tp is a list: give one value"),
        ("a.toml", "tp =", "is no TOML"),
        ("a.toml", "config = 'b.toml'", "unknown key 'config'"),
        ("a.yaml", "- tp", "holds a list: write one key: value a line"),
        ("a.yaml", "tp: [", "is no YAML"),
        ("a.json", "{}", "has to end in .toml, .yaml or .yml"),
        ("a.toml", "api-key = 'sécret'", "a.toml: api-key = *** cannot be sent"),
    ],
)
def test_mistakes(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        launch_config({"config": write(tmp_path, name, text)})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_such_file() -> None:
    with pytest.raises(UsageError, match=r"--config /no/such\.toml cannot be read"):
        launch_config({"config": "/no/such.toml"})


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert launch_config({"config": write(tmp_path, "a.yaml", "")}) == LaunchConfig()
