"""`xserve launch` and `xserve plan`: the same flags, one starts, the other shows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from launcher.cli.instance import console_for
from launcher.cli.launch_config import launch_config

if TYPE_CHECKING:
    from launcher.plan.plan import LaunchPlan


def launch(given: dict[str, Any]) -> int:
    """Start, serve, stop. `ChildFailedError` when the tree failed."""
    config = launch_config(given)
    see_working_directory()
    from launcher.cli.report import failure_text
    from launcher.cli.screen import StartScreen
    from launcher.serve import serve

    return serve(config, StartScreen, failure_text)


def see_working_directory() -> None:
    """``--worker my_worker:MyWorker`` is to be found where the user stands; last, so that it shadows nothing."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


def plan(given: dict[str, Any]) -> int:
    """Print the processes that a launch would start."""
    as_json = given.pop("json")
    config = launch_config(given)
    see_working_directory()
    from launcher.host import read_host
    from launcher.plan import show
    from launcher.plan.plan import make_plan

    name = config.name or "default"
    # Nothing is claimed: a plan may be looked at while the instance runs.
    made = make_plan(config, read_host(), run_dir=Path("/run/xserve") / name, launch_id="0" * 12, name=name)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(show.to_json(made))).decode() + "\n")
        return 0
    _print_plan(made)
    return 0


def _print_plan(made: LaunchPlan) -> None:
    from launcher.plan import show

    _print_table(show.rows(made), ["title", "method"])
    for note in made.notes:
        sys.stdout.write(f"{note}\n")
    tables = {"DECIDED": made.decisions, "PORTS": made.ports, "LIMITS": made.limits, "SETTINGS": made.settings}
    for heading, decisions in tables.items():
        if decisions:
            sys.stdout.write(f"\n{heading}\n")
            _print_table(decisions, [], heading=False)
    if made.firewall is not None:
        sys.stdout.write(f"\nFIREWALL between the nodes: one of\n  {made.firewall.nft}\n  {made.firewall.iptables}\n")
    for titles, env in show.environments(made):
        sys.stdout.write(f"\nENVIRONMENT of {titles}\n")
        for name, value in sorted(env.items()):
            sys.stdout.write(f"  {name}={value}\n")


def _print_table(rows: Sequence[Any], always: Sequence[str], *, heading: bool = True) -> None:
    """Rows are tuples or structs of text; a column without any is left out."""
    from rich.table import Table

    names = getattr(rows[0], "_fields", None) or rows[0].__struct_fields__
    columns = [name for name in names if name in always or any(getattr(row, name) for row in rows)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=heading)
    for name in columns:
        table.add_column(name.upper(), no_wrap=True)
    for row in rows:
        table.add_row(*(getattr(row, name) for name in columns))
    console_for(sys.stdout).print(table)
