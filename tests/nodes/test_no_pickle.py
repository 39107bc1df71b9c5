"""Nothing that handles bytes of the network can make objects of a sender's choice."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKS = ("frames", "data_link", "core_link", "agent_line")
FILES = sorted(
    [
        *(ROOT / "launcher" / "nodes").glob("*.py"),
        *(
            path
            for name in (*LINKS, "relay", "gather", "node_agent", "leader_agent")
            if (path := ROOT / "launcher" / "executor" / f"{name}.py").exists()
        ),
    ]
)
FORBIDDEN = {"pickle", "_pickle", "cloudpickle", "marshal", "shelve", "dill", "jsonpickle", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__", "recv_pyobj", "send_pyobj", "recv_serialized"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_import_and_no_call(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or "", *(alias.name for alias in node.names)]
        for module in modules:
            parts = set(module.split("."))
            assert not parts & FORBIDDEN, f"{path}:{node.lineno}: {module}"
            assert "pickling" not in parts, f"{path}:{node.lineno}: {module}"
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name == "compile" and isinstance(node.func, ast.Attribute):
                continue  # re.compile
            assert name not in CALLS, f"{path}:{node.lineno}: {name}()"


def test_the_key_file_and_addresses_need_no_zmq() -> None:
    """The supervisor and the command line read them."""
    code = "import sys, launcher.nodes.key_file, launcher.nodes.addresses; assert 'zmq' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=30)
