"""`xserve doctor`: what of this machine stands in the way of a launch, and what mends it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from launcher.cli.checks import Check, host_checks
from launcher.cli.checks_nodes import node_checks
from launcher.cli.instance import console_for
from launcher.cli.launch import see_working_directory
from launcher.cli.launch_config import launch_config
from launcher.config import LaunchConfig
from launcher.errors import UsageError, XserveError
from launcher.host import HostFacts, read_host
from launcher.plan.model_source import is_local
from launcher.plan.plan import make_plan
from launcher.process import listen

FAILED = 2


def doctor(given: dict[str, Any]) -> int:
    """Print every verdict; 2 when one of them is a failure."""
    as_json = given.pop("json")
    facts = read_host()
    checks = [*host_checks(facts), *launch_checks(given, facts)]
    if as_json:
        shown = {"checks": msgspec.to_builtins(checks), "ok": not any(c.verdict == "fail" for c in checks)}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(shown)).decode() + "\n")
    else:
        _print(checks)
    return FAILED if any(check.verdict == "fail" for check in checks) else 0


def launch_checks(given: dict[str, Any], facts: HostFacts) -> Iterator[Check]:
    """The launch with these flags: its port, its way to other nodes, its plan, its model's files."""
    try:
        config = launch_config(given)
    except UsageError as error:
        yield Check("flags", "fail", str(error), "see xserve launch --help")
        return
    if config.node_rank == 0:  # nobody else serves HTTP
        yield _port(config)
    yield from node_checks(config, facts)
    if config.model is not None and not is_local(config.model):
        text = f"{config.model} is no directory here: the launch would ask Hugging Face for it"
        yield Check("model", "warn", text, f"hf download {config.model}")
        return
    see_working_directory()
    name = config.name or "default"
    try:
        made = make_plan(config, facts, run_dir=Path("/run/xserve") / name, launch_id="0" * 12, name=name)
    except XserveError as error:
        yield Check("launch", "fail", str(error))
        return
    if config.model is not None:
        memory = next(d for d in made.decisions if d.name == "memory of a worker")
        yield Check("model", "pass", f"files are readable and complete; a worker holds {memory.value}")
    count = 1 + len(made.processes) + sum(len(spec.children) for spec in made.processes) + (made.helper is not None)
    yield Check("launch", "pass", f"{count} processes, start method {made.start_method}; xserve plan shows all")


def _port(config: LaunchConfig) -> Check:
    """Bound and let go at once: what is free now can be taken before a launch binds it, which then says so."""
    what = f"--uds {config.uds}" if config.uds else f"{config.host} port {config.port}"
    if config.uds:
        return Check("port", "pass", f"listens on {what}")
    try:
        listen.listen_tcp(config.host, config.port).close()
    except XserveError as error:
        # Nobody has asked for the default port; a launch that does without --port would fail all the same.
        return Check("port", "fail" if config.origins else "warn", str(error), "--port 0 takes any free one")
    return Check("port", "pass", f"{what} is free")


def _print(checks: list[Check]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for check in checks:
        table.add_row(check.verdict, check.name, check.text)
        if check.mend:
            table.add_row("", "", f"→ {check.mend}")
    console_for(sys.stdout).print(table)
    counts = {verdict: sum(c.verdict == verdict for c in checks) for verdict in ("pass", "warn", "fail")}
    sys.stdout.write(", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + "\n")
