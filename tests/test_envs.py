"""The environment's table and its readers."""

from __future__ import annotations

import os
import pwd
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher import envs
from launcher.errors import UsageError


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in envs.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def test_every_row_of_the_table_is_explained_and_named_once() -> None:
    names = [variable.name for variable in envs.VARIABLES]
    assert len(names) == len(set(names))
    assert all(variable.doc and variable.name == variable.name.strip() for variable in envs.VARIABLES)


def test_nobody_else_reads_the_environment() -> None:
    root = Path(envs.__file__).parent
    found = subprocess.run(["grep", "-rlE", r"os\.(environ|getenv)", "--include=*.py", root], stdout=subprocess.PIPE)
    files = {str(Path(line).relative_to(root)) for line in found.stdout.decode().split()}
    assert files <= {"envs.py", "process/child.py"}, files


# --- cache_dir: each source in turn --------------------------------------------------------------------------------


def test_cache_dir_by_our_own_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    monkeypatch.setenv("XSERVE_CACHE_DIR", str(tmp_path))
    assert envs.cache_dir() == tmp_path


def test_cache_dir_may_be_relative(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XSERVE_CACHE_DIR", "cache")
    assert envs.cache_dir() == tmp_path / "cache"


@pytest.mark.parametrize(
    ("xdg", "home", "expected"),
    [
        ("/xdg", "/home/a", "/xdg/xserve"),
        ("relative", "/home/a", "/home/a/.cache/xserve"),  # the specification has it ignored
        ("", "/home/a", "/home/a/.cache/xserve"),
        (None, "/home/a", "/home/a/.cache/xserve"),
    ],
)
def test_cache_dir_by_xdg_and_home(monkeypatch: pytest.MonkeyPatch, xdg: str | None, home: str, expected: str) -> None:
    monkeypatch.setenv("HOME", home)
    if xdg is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert envs.cache_dir() == Path(expected)


@pytest.mark.parametrize("home", [None, "", "not/absolute"])
def test_cache_dir_by_the_passwd_entry(monkeypatch: pytest.MonkeyPatch, home: str | None) -> None:
    if home is not None:
        monkeypatch.setenv("HOME", home)
    assert envs.cache_dir() == Path(pwd.getpwuid(os.getuid()).pw_dir) / ".cache" / "xserve"


def test_cache_dir_without_home_and_passwd_entry_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 987654)
    assert envs.cache_dir() == Path(tempfile.gettempdir()) / "xserve-987654" / "cache"


# --- the other readers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["max-num-seqs", "--max-num-seqs", "max_num_seqs", "MAX_NUM_SEQS"])
def test_a_flags_variable(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    assert envs.flag_from_environment(flag) is None
    monkeypatch.setenv("XSERVE_MAX_NUM_SEQS", "8")
    assert envs.flag_from_environment(flag) == "8"


@pytest.mark.parametrize(
    ("reader", "name", "text", "expected"),
    [
        (envs.fault_text, "XSERVE_FAULT", None, ""),
        (envs.fault_text, "XSERVE_FAULT", "oom:1", "oom:1"),
        (envs.launch_id, "XSERVE_LAUNCH_ID", None, None),
        (envs.launch_id, "XSERVE_LAUNCH_ID", "ab12", "ab12"),
        (envs.runtime_directory, "RUNTIME_DIRECTORY", None, None),
        (envs.runtime_directory, "RUNTIME_DIRECTORY", "", None),
        (envs.runtime_directory, "RUNTIME_DIRECTORY", "/run/a", Path("/run/a")),
        (envs.runtime_directory, "RUNTIME_DIRECTORY", "/run/a:/run/b", Path("/run/a")),
        (envs.xdg_runtime_dir, "XDG_RUNTIME_DIR", "/run/user/1", Path("/run/user/1")),
        (envs.xdg_runtime_dir, "XDG_RUNTIME_DIR", "run", None),
        (envs.xdg_runtime_dir, "XDG_RUNTIME_DIR", None, None),
        (envs.credentials_directory, "CREDENTIALS_DIRECTORY", "/run/credentials/x", Path("/run/credentials/x")),
        (envs.credentials_directory, "CREDENTIALS_DIRECTORY", None, None),
        (envs.notify_socket, "NOTIFY_SOCKET", None, None),
        (envs.notify_socket, "NOTIFY_SOCKET", "/run/systemd/notify", "/run/systemd/notify"),
        (envs.notify_socket, "NOTIFY_SOCKET", "@abstract", "@abstract"),
        (envs.omp_num_threads, "OMP_NUM_THREADS", None, None),
        (envs.omp_num_threads, "OMP_NUM_THREADS", "", None),
        (envs.omp_num_threads, "OMP_NUM_THREADS", "4", 4),
        (envs.omp_num_threads, "OMP_NUM_THREADS", " 4,2", 4),
        (envs.cuda_visible_devices, "CUDA_VISIBLE_DEVICES", None, None),
        (envs.cuda_visible_devices, "CUDA_VISIBLE_DEVICES", "", ""),
        (envs.cuda_visible_devices, "CUDA_VISIBLE_DEVICES", "1,0", "1,0"),
        (envs.hf_hub_offline, "HF_HUB_OFFLINE", None, False),
        (envs.hf_hub_offline, "HF_HUB_OFFLINE", "0", False),
        (envs.hf_hub_offline, "HF_HUB_OFFLINE", "True", True),
        (envs.no_color, "NO_COLOR", None, False),
        (envs.no_color, "NO_COLOR", "", False),
        (envs.no_color, "NO_COLOR", "0", True),
    ],
)
def test_readers(
    monkeypatch: pytest.MonkeyPatch, reader: Callable[[], object], name: str, text: str | None, expected: object
) -> None:
    if text is not None:
        monkeypatch.setenv(name, text)
    assert reader() == expected


@pytest.mark.parametrize(
    ("reader", "name", "text"),
    [
        (envs.omp_num_threads, "OMP_NUM_THREADS", "many"),
        (envs.omp_num_threads, "OMP_NUM_THREADS", "0"),
        (envs.omp_num_threads, "OMP_NUM_THREADS", "-2"),
        (envs.omp_num_threads, "OMP_NUM_THREADS", "²"),
        (envs.omp_num_threads, "OMP_NUM_THREADS", ",4"),
        (envs.runtime_directory, "RUNTIME_DIRECTORY", "run/a"),
        (envs.credentials_directory, "CREDENTIALS_DIRECTORY", "creds"),
        (envs.notify_socket, "NOTIFY_SOCKET", "notify"),
        (envs.hf_hub_offline, "HF_HUB_OFFLINE", "perhaps"),
    ],
)
def test_a_bad_value_is_named(
    monkeypatch: pytest.MonkeyPatch, reader: Callable[[], object], name: str, text: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(UsageError) as caught:
        reader()
    assert name in str(caught.value)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(envs.not_inherited()))
def test_what_is_the_supervisors_alone_reaches_no_child(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    child = envs.child_environment()
    assert name not in child
    assert child["NCCL_DEBUG"] == "INFO"
    assert os.environ[name] == "1"
    child["NCCL_DEBUG"] = "changed"
    assert os.environ["NCCL_DEBUG"] == "INFO"


def test_systemds_variables_are_among_them() -> None:
    wanted = {"NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"}
    assert wanted <= envs.not_inherited()
