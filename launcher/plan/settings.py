"""Every setting with its value and origin, and every limit that will be in force. Pure; no secret gets out."""

from __future__ import annotations

from typing import Any

import msgspec

from launcher.config import LaunchConfig
from launcher.host import HostFacts
from launcher.host.files import shown_list
from launcher.plan.budget import size
from launcher.plan.resolved import Decision

HIDDEN = "***"
SECRET_ENDINGS = ("key", "token", "secret", "password", "credential", "credentials")
"""Of a name: ``hf_token`` is hidden, ``max_tokens`` and ``TOKENIZERS_PARALLELISM`` are not."""
_LEAST, _MARGIN = 600.0, 60.0
_A_DAY = 86_400.0
"""As good as no limit."""


def without_secrets(values: dict[str, str]) -> dict[str, str]:
    return {name: HIDDEN if name.lower().endswith(SECRET_ENDINGS) else value for name, value in values.items()}


def settings(config: LaunchConfig) -> tuple[Decision, ...]:
    """By the flags' names, in the order of `LaunchConfig`."""
    found = []
    for field in msgspec.structs.fields(LaunchConfig):
        if field.name == "origins":
            continue
        value = getattr(config, field.name)
        text = HIDDEN if field.name == "api_key" and value is not None else _shown(field.name, value)
        found.append(Decision(f"--{field.name.replace('_', '-')}", text, config.origins.get(field.name, "default")))
    return tuple(found)


def _shown(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{key}={one}" for key, one in without_secrets(value).items())
    if name == "numa_bind_cpus":
        return "/".join(shown_list(cpus) for cpus in value)
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def group_timeout(config: LaunchConfig) -> float:
    """For the timers of the libraries that ranks talk through. They can't tell who is late, so ours are to fire first;
    where a hang is not to end anything, nor are they."""
    return max(_LEAST, config.ready_timeout, config.watchdog_timeout or _A_DAY) + _MARGIN


def limits(config: LaunchConfig, facts: HostFacts) -> tuple[Decision, ...]:
    """What can end or bound something, ours and the system's."""

    def ours(field: str) -> str:
        return config.origins.get(field, "default")

    quota = "" if facts.cpu_quota is None else f", quota {facts.cpu_quota:g}"
    return (
        Decision("start without progress", f"{config.ready_timeout:g} s", f"--ready-timeout, {ours('ready_timeout')}"),
        Decision("stop", f"{config.shutdown_timeout:g} s", f"--shutdown-timeout, {ours('shutdown_timeout')}"),
        Decision("no answer", f"{config.watchdog_timeout:g} s", f"--watchdog-timeout, {ours('watchdog_timeout')}"),
        Decision("a collective", f"{group_timeout(config):g} s", "after the two limits that name who is late"),
        Decision(
            "restarts",
            f"{config.max_restarts} in {config.restart_window:g} s" if config.restart != "never" else "none",
            f"--restart {config.restart}, {ours('restart')}",
        ),
        Decision("open files", str(facts.nofile_hard), f"hard limit; the soft one was {facts.nofile_soft}"),
        Decision("memory", size(facts.memory_free), f"free now: {facts.memory_origin}"),
        Decision("CPUs", f"{facts.cpus}{quota}", f"affinity mask {shown_list(facts.cpu_ids)}".rstrip()),
        Decision(
            "processes and threads",
            "not limited" if facts.processes_free is None else str(facts.processes_free),
            "pids controller and RLIMIT_NPROC",
        ),
    )
