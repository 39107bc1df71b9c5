"""`xserve launch` and `xserve plan`: the same flags, one starts, the other shows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from launcher.cli.instance import console_for
from launcher.cli.launch_config import launch_config


def launch(given: dict[str, Any]) -> int:
    """Start, serve, stop. `ChildFailedError` when the tree failed."""
    config = launch_config(given)
    _see_working_directory()
    from launcher.cli.report import failure_text
    from launcher.cli.screen import StartScreen
    from launcher.serve import serve

    return serve(config, StartScreen, failure_text)


def _see_working_directory() -> None:
    """``--worker my_worker:MyWorker`` is to be found where the user stands; last, so that it shadows nothing."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


def plan(given: dict[str, Any]) -> int:
    """Print the processes that a launch would start."""
    as_json = given.pop("json")
    config = launch_config(given)
    _see_working_directory()
    from launcher.host import read_host
    from launcher.plan import show
    from launcher.plan.plan import make_plan

    name = config.name or "default"
    # Nothing is claimed: a plan may be looked at while the instance runs.
    made = make_plan(config, read_host(), run_dir=Path("/run/xserve") / name, launch_id="0" * 12, name=name)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(show.to_json(made))).decode() + "\n")
        return 0
    _print_table(show.rows(made))
    for note in made.notes:
        sys.stdout.write(f"{note}\n")
    return 0


def _print_table(rows: list[Any]) -> None:
    from rich.table import Table

    columns = [name for name in rows[0]._fields if any(getattr(row, name) for row in rows)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name.upper(), no_wrap=True)
    for row in rows:
        table.add_row(*(getattr(row, name) for name in columns))
    console_for(sys.stdout).print(table)
