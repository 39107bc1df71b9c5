"""House rules about the sources that no linter knows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).resolve().parents[1] / "launcher"
SOURCES = sorted(LAUNCHER.rglob("*.py"))
MAY_USE_ENVIRON = {"envs.py", "process/child.py"}


def _uses_environ(tree: ast.AST) -> bool:
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    return any(isinstance(node, ast.Attribute) and node.attr in names for node in ast.walk(tree)) or any(
        isinstance(node, ast.ImportFrom) and node.module == "os" and names & {alias.name for alias in node.names}
        for node in ast.walk(tree)
    )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(LAUNCHER)))
def test_the_environment_has_one_reader_and_one_writer(path: Path) -> None:
    if str(path.relative_to(LAUNCHER)) not in MAY_USE_ENVIRON:
        assert not _uses_environ(ast.parse(path.read_text()))


def test_no_room_for_what_has_no_name() -> None:
    assert not {"utils", "util", "common", "helpers", "misc"} & {path.stem for path in LAUNCHER.rglob("*")}


def test_every_room_has_its_design_page() -> None:
    for page in LAUNCHER.rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(page.read_text())) or ""
        assert len(text) > 200, f"{page.parent.name} has no design page"


def test_every_test_that_the_table_of_faults_names_is_there() -> None:
    tests = LAUNCHER.parent / "tests"
    for line in (tests / "field.md").read_text().splitlines():
        for path, name in re.findall(r"`([a-z0-9_]+/test_\w+\.py)(?:::(\w+))?`", line):
            assert f"def {name}" in (tests / path).read_text(), f"{path} has no {name}"
