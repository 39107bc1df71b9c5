"""What the README shows is what there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from launcher.cli.flags import LAUNCH
from launcher.worker.faults import KINDS
from tests.conftest import eventually

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def section(name: str) -> str:
    match = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", README, re.DOTALL)
    assert match is not None
    return match[1]


def flag_table() -> str:
    rows = ["| flag | default | what it does |", "|---|---|---|"]
    for flag in LAUNCH:
        names = ", ".join(f"`{name}`" for name in flag.spellings)
        rows.append(f"| {names} {flag.metavar} | {flag.default} | {flag.help} |")
    return "\n" + "\n".join(rows) + "\n\n"


def fault_table() -> str:
    rows = ["| kind | seconds | the worker |", "|---|---|---|"]
    rows += [f"| `{n}` | {'' if k.seconds is None else f'{k.seconds:g}'} | {k.doc} |" for n, k in KINDS.items()]
    return "\n" + "\n".join(rows) + "\n\n"


def test_the_table_of_flags_is_that_of_the_command_line() -> None:
    assert section("flags") == flag_table()


def test_the_table_of_faults_is_that_of_the_worker() -> None:
    assert section("faults") == fault_table()


def test_every_flag_in_an_example_exists() -> None:
    known = {spelling for flag in LAUNCH for spelling in flag.spellings} | {"--name", "--json", "--timeout", "--once"}
    commands = re.findall(r"^(?:.*\$ |\S*=\S* )?(?:xserve|scripts/run) .*$", README, re.MULTILINE)
    used = {word for line in commands for word in line.partition("#")[0].split() if word.startswith("--")}
    assert used
    assert used <= known


@pytest.fixture
def private_runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="xs-", dir="/tmp") as folder, monkeypatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        patch.delenv("RUNTIME_DIRECTORY", raising=False)
        yield Path(folder)


def test_the_workers_example_answers_as_the_readme_says(private_runtime: Path) -> None:
    code = section("example").removeprefix("```python\n").removesuffix("```\n")
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    (private_runtime / "echo_worker.py").write_text(code)
    socket = private_runtime / "api.sock"
    command = [sys.executable, "-m", "launcher.cli", "launch", "--worker", "echo_worker:EchoWorker", "--tp", "2"]
    environment = {**os.environ, "PYTHONPATH": f".:{ROOT}"}
    with (private_runtime / "log").open("w") as log:
        launch = subprocess.Popen(
            [*command, "--uds", str(socket)], cwd=private_runtime, env=environment, stdout=log, stderr=log
        )
        try:
            _wait_ready(launch, private_runtime / "log")
            transport = httpx.HTTPTransport(uds=str(socket))
            with httpx.Client(transport=transport, base_url="http://x", timeout=30, trust_env=False) as http:
                body = {"model": "EchoWorker", "prompt": "Hi", "max_tokens": 4}
                answer = http.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                text = answer.json()["choices"][0]["text"]
        finally:
            launch.terminate()
            code_at_end = launch.wait(30)
    assert text.strip() == "72 105 72 105"
    assert f"the answer is `{text.strip()}`" in " ".join(README.split())
    assert code_at_end == 0


def _wait_ready(launch: subprocess.Popen[bytes], log: Path) -> None:
    """Until the launch says so itself."""

    def is_ready() -> bool:
        assert launch.poll() is None, log.read_text()
        return "  ready: " in log.read_text()

    eventually(is_ready, 60, "ready")
