"""A plan for people and programs: `to_json` for ``xserve plan --json``, `rows` for its table. No secret gets out."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from launcher.config import ApiSettings, EngineSettings, WorkerSettings
from launcher.plan.plan import LaunchPlan
from launcher.plan.processes import settings_of
from launcher.process.spec import ChildMethod, ProcessSpec

HIDDEN = "***"
_SECRET_ENDINGS = ("key", "token", "secret", "password", "credential", "credentials")
"""Of an option's name: ``hf_token`` is hidden, ``max_tokens`` and ``TOKENIZERS_PARALLELISM`` are not."""


class Row(NamedTuple):
    """One process of the table. Everything is text; empty: does not apply."""

    title: str
    comm: str
    role: str
    rank: str
    parent: str
    method: str
    device: str
    threads: str
    listens: str


def rows(plan: LaunchPlan) -> list[Row]:
    """All processes, parents before their children."""
    found = []
    if plan.helper is not None:
        threads = plan.helper.env.get("OMP_NUM_THREADS", "")
        found.append(Row(plan.helper.title, plan.helper.comm, "forkserver", "", "Supervisor", "spawn", "", threads, ""))
    for spec in plan.processes:
        found.append(_row(plan, spec, "Supervisor", plan.method_of(spec)))
        found.extend(_row(plan, child, spec.title, spec.child_method) for child in spec.children)
    return found


def to_json(plan: LaunchPlan) -> dict[str, Any]:
    """Plain data, ready for ``json.dumps``; payloads are shown decoded."""
    shown: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(plan, processes=()))
    shown["processes"] = [_process(spec, plan.method_of(spec)) for spec in plan.processes]
    return shown


def _process(spec: ProcessSpec, method: ChildMethod) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(spec, payload=b"", children=()))
    del shown["payload"]
    shown["start_method"] = method
    shown["env"] = _without_secrets(spec.env)
    shown["settings"] = redacted(settings_of(spec))
    shown["children"] = [_process(child, spec.child_method) for child in spec.children]
    return shown


def redacted(settings: ApiSettings | EngineSettings | WorkerSettings) -> dict[str, Any]:
    """Settings as plain data. API keys, and worker options whose name sounds like a secret, are hidden."""
    shown: dict[str, Any] = msgspec.to_builtins(settings)
    for holder in (shown, shown.get("worker")):
        if isinstance(holder, dict) and "worker_config" in holder:
            holder["worker_config"] = _without_secrets(holder["worker_config"])
    if "api_keys" in shown:
        shown["api_keys"] = [HIDDEN for _ in shown["api_keys"]]
    return shown


def _without_secrets(values: dict[str, str]) -> dict[str, str]:
    return {name: HIDDEN if name.lower().endswith(_SECRET_ENDINGS) else value for name, value in values.items()}


def _row(plan: LaunchPlan, spec: ProcessSpec, parent: str, method: ChildMethod) -> Row:
    settings = settings_of(spec)
    device = threads = listens = ""
    if isinstance(settings, ApiSettings):
        listens = plan.url
    elif isinstance(settings, EngineSettings):
        listens = settings.address
        if not spec.children:
            device, threads = _device(settings.worker), str(settings.worker.num_threads)
    else:
        device, threads = _device(settings), str(settings.num_threads)
    rank = "" if spec.rank is None else str(spec.rank)
    return Row(spec.title, spec.comm, spec.role, rank, parent, method, device, threads, listens)


def _device(settings: WorkerSettings) -> str:
    return f"cuda:{settings.device_index}" if settings.device == "cuda" else "cpu"
