"""A plan for people and programs: `to_json` for ``xserve plan --json``, `rows` for its table. No secret gets out."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from launcher.config import AgentSettings, ApiSettings, EngineSettings, WorkerSettings
from launcher.host.files import shown_list
from launcher.host.visible import CUDA
from launcher.nodes.addresses import host_port
from launcher.plan.plan import LaunchPlan
from launcher.plan.processes import Settings, settings_of
from launcher.plan.settings import HIDDEN, without_secrets
from launcher.process.spec import ChildMethod, ProcessSpec, comes_by_exec

__all__ = ["HIDDEN", "Row", "environments", "redacted", "rows", "to_json"]


_EXEC_WHY = "it is wanted from the first second on, and has no use for what the helper imports"


class Row(NamedTuple):
    """One process of the table. Everything is text; empty: does not apply."""

    title: str
    comm: str
    role: str
    rank: str
    parent: str
    method: str
    device: str
    node: str
    """NUMA nodes that its memory is bound to."""
    cpus: str
    """CPUs that it is bound to."""
    threads: str
    memory: str
    """What it will hold at least, as far as that is known."""
    listens: str


def rows(plan: LaunchPlan) -> list[Row]:
    """All processes, parents before their children."""
    found = []
    if plan.helper is not None:
        threads = plan.helper.env.get("OMP_NUM_THREADS", "")
        helper = plan.helper
        found.append(
            Row(helper.title, helper.comm, "forkserver", "", "Supervisor", "spawn", "", "", "", threads, "", "")
        )
    for spec in plan.processes:
        found.append(_row(plan, spec, "Supervisor", plan.method_of(spec)))
        found.extend(_row(plan, child, spec.title, spec.child_method) for child in spec.children)
    return found


def to_json(plan: LaunchPlan) -> dict[str, Any]:
    """Plain data, ready for ``json.dumps``; payloads are shown decoded."""
    shown: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(plan, processes=()))
    if plan.helper is not None:
        shown["helper"]["env"] = without_secrets(plan.helper.env)
    why = next((decision.origin for decision in plan.decisions if decision.name == "start method"), "")
    shown["processes"] = [
        _process(spec, plan.method_of(spec), _EXEC_WHY if comes_by_exec(spec) else why) for spec in plan.processes
    ]
    return shown


def _process(spec: ProcessSpec, method: ChildMethod, why: str) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(spec, payload=b"", children=()))
    del shown["payload"]
    shown["start_method"] = method
    shown["start_method_why"] = why
    forks = spec.child_method == "fork"
    shown["env"] = without_secrets(spec.env)
    shown["settings"] = redacted(settings_of(spec))
    shown["children"] = [
        _process(
            child,
            spec.child_method,
            f"its {spec.role.replace('_', ' ')} forks before it has a thread" if forks else why,
        )
        for child in spec.children
    ]
    return shown


def redacted(settings: Settings) -> dict[str, Any]:
    """Settings as plain data. Keys, and worker options whose name sounds like a secret, are hidden."""
    shown: dict[str, Any] = msgspec.to_builtins(settings)
    for holder in (shown, shown.get("worker")):
        if isinstance(holder, dict) and "worker_config" in holder:
            holder["worker_config"] = without_secrets(holder["worker_config"])
    if nodes := shown.get("nodes"):
        nodes["key"] = HIDDEN if nodes["key"] else ""
    if "api_keys" in shown:
        shown["api_keys"] = [HIDDEN for _ in shown["api_keys"]]
    return shown


def _row(plan: LaunchPlan, spec: ProcessSpec, parent: str, method: ChildMethod) -> Row:
    settings = settings_of(spec)
    device = threads = listens = ""
    if isinstance(settings, ApiSettings):
        listens = plan.url
    elif isinstance(settings, EngineSettings):
        listens = settings.address
        if not spec.children:
            device, threads = _device(spec, settings.worker), str(settings.worker.num_threads)
    elif isinstance(settings, AgentSettings):
        nodes = settings.nodes
        listens = host_port(nodes.master_addr, nodes.master_port) if nodes.node_rank == 0 else ""
    else:
        device, threads = _device(spec, settings), str(settings.num_threads)
    works = isinstance(settings, WorkerSettings) or (isinstance(settings, EngineSettings) and not spec.children)
    memory = next((d.value for d in plan.decisions if d.name == "memory of a worker"), "") if works else ""
    return Row(
        title=spec.title,
        comm=spec.comm,
        role=spec.role,
        rank="" if spec.rank is None else str(spec.rank),
        parent=parent,
        method=method,
        device=device,
        node=shown_list(spec.memory_nodes),
        cpus=shown_list(spec.cpus),
        threads=threads,
        memory=memory if memory[:1].isdigit() else "",
        listens=listens,
    )


def _device(spec: ProcessSpec, settings: WorkerSettings) -> str:
    """``cuda:1``, and by what name when a list was given for this launch alone."""
    if settings.device != "cuda":
        return "cpu"
    given = spec.env.get(CUDA.variable, "").split(",")
    name = given[settings.device_index] if settings.device_index < len(given) else ""
    return f"cuda:{settings.device_index}" + (f" ({name})" if name else "")


def environments(plan: LaunchPlan) -> list[tuple[str, dict[str, str]]]:
    """(titles, variables) for those that get the same on top of what the launch itself has; secrets hidden."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    if plan.helper is not None:
        groups.setdefault(tuple(sorted(plan.helper.env.items())), []).append(plan.helper.title)
    for spec in (each for top in plan.processes for each in (top, *top.children)):
        groups.setdefault(tuple(sorted(spec.env.items())), []).append(spec.title)
    return [(", ".join(titles), without_secrets(dict(env))) for env, titles in groups.items()]
