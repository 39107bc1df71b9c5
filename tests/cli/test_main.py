"""The command as people run it: a process of its own."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import __version__
from launcher.cli.flags import COMMANDS, LAUNCH

# The command's own entry point, whether or not the package's script is on PATH.
ENTRY = "import sys; from launcher.cli.main import run; sys.argv[0] = 'xserve'; run()"


@pytest.fixture(autouse=True)
def private_runtime(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="xs-", dir="/tmp") as folder, monkeypatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        patch.delenv("RUNTIME_DIRECTORY", raising=False)
        yield


def xserve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ENTRY, *arguments], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    probe = (
        "import sys; sys.argv = ['xserve', '--help']\n"
        "from launcher.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'zmq', 'transformers', 'rich', 'fastapi', 'numpy', 'psutil'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else code)"
    )
    best = 9.9
    for _ in range(5):  # CPU seconds, and the best of some runs: the machine may be busy with others
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert (done.returncode, done.stderr) == (0, "")
        if best < 0.3:
            break
    assert best < 0.3
    assert all(name in done.stdout for name in COMMANDS)


def test_help_of_a_command_lists_its_flags() -> None:
    done = xserve("launch", "--help")
    assert done.returncode == 0
    for flag in LAUNCH:
        for spelling in flag.spellings:
            assert spelling in done.stdout
    assert "XSERVE_<FLAG>" in done.stdout


def test_version() -> None:
    assert xserve("--version").stdout == f"xserve {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("launch --tp 0", 2, "xserve: --tp 0 is out of range: give 1 or more"),
        ("launch --port 99999", 2, "xserve: --port 99999 is out of range: give 0 to 65535"),
        ("launch --tpp 2", 2, "xserve: unknown flag --tpp: did you mean --tp?"),
        ("launch --kv-cache-memory lots", 2, "xserve: --kv-cache-memory lots is not a size"),
        ("launch --model /nonexistent/model", 2, "/nonexistent/model"),
        ("launch --backend nonexistent.module:Class", 2, "nonexistent"),
        ("launch --worker nonexistent.module:Class", 2, "nonexistent"),
        ("launch --api-key a --api-key-file b", 2, "exclude each other"),
        ("plan --tp 0", 2, "xserve: --tp 0 is out of range"),
        ("", 2, "no command given"),
        ("lunch", 2, "did you mean launch?"),
        # Always with a name: without one these would find, and stop, whatever runs on this machine.
        ("status --name no-such-one", 3, "xserve: no instance 'no-such-one' is running"),
        ("stop --name no-such-one", 3, "xserve: no instance 'no-such-one' is running"),
        ("stop --name no-such-one --timeout soon", 2, "--timeout soon is not a number of seconds"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(arguments: str, code: int, message: str) -> None:
    began = time.monotonic()
    done = xserve(*arguments.split())
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert time.monotonic() - began < 10


def test_a_key_is_not_repeated() -> None:
    done = xserve("launch", "--api-key", "very secret", "--tp", "0")
    assert "very secret" not in done.stderr


def test_plan_as_table_and_as_json() -> None:
    done = xserve("plan", "--tp", "2", "--api-key", "hide-this-key")
    assert done.returncode == 0, done.stderr
    assert "Worker_DP0_PP0_TP1" in done.stdout
    assert "hide-this-key" not in done.stdout
    plan = json.loads(xserve("plan", "--tp", "2", "--json", "--api-key", "hide-this-key").stdout)
    assert {p["role"] for p in plan["processes"]} == {"api_server", "engine_core"}


def test_output_into_a_closed_pipe_is_no_traceback() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-c", ENTRY, "plan", "--json"]
    with os.fdopen(write_end, "w") as stdout:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_installed_command_is_this_one() -> None:
    script = Path(sys.executable).parent / "xserve"
    if not script.exists():
        pytest.skip("not installed")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"xserve {__version__}\n"
