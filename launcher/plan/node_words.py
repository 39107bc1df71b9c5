"""What a launch over several nodes says at its start: how the others are started, and who could join unasked."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import msgspec

from launcher import envs
from launcher.config import MASTER_PORT, LaunchConfig
from launcher.host.files import shown_list
from launcher.nodes.addresses import host_port, is_link_local, without_zone
from launcher.plan.network import NodeAddress
from launcher.plan.settings import HIDDEN, SECRET_ENDINGS

_DEFAULT_KEY = "cluster.key"
_OWN = frozenset(
    """nnodes node_rank master_addr master_port iface name served_model_name host port uds api_key api_key_file
    ssl_keyfile ssl_certfile device_ids numa_bind numa_bind_nodes numa_bind_cpus log_level origins""".split()  # noqa: SIM905
)
"""Fields that each node has for itself, or that are said apart."""
_OF_SEVERAL = ("master_addr", "master_port", "iface", "join_timeout", "cluster_key_file")


def key_path(config: LaunchConfig) -> Path | None:
    """The file of the cluster key: as given, else systemd's credential of that name, if it is there."""
    if config.cluster_key_file is not None:
        return Path(config.cluster_key_file)
    directory = envs.credentials_directory()
    if directory is not None and (directory / _DEFAULT_KEY).exists():
        return directory / _DEFAULT_KEY
    return None


def node_notes(config: LaunchConfig, at: NodeAddress | None, *, keyed: bool) -> tuple[str, ...]:
    """Lines for the start of the log."""
    if at is None:
        return _on_one_machine(config)
    place, where = f"node {config.node_rank} of {config.nnodes}", host_port(at.master, config.master_port)
    by = f" by {at.iface}" + (f", as {at.address}" if at.address else "") if at.iface else ""
    if config.node_rank:
        return (f"{place}: joins node 0 at {where}{by}", *_warning(config, at, keyed), *at.notes)
    who = "other nodes" if config.nnodes == 2 else f"other nodes (--node-rank 1 to {config.nnodes - 1})"
    here = f"{place}: the others join at {where}, interface {at.iface} ({at.origin})"
    return (here, f"{who}: {follower_command(config, at)}", *_warning(config, at, keyed), *at.notes)


def _on_one_machine(config: LaunchConfig) -> tuple[str, ...]:
    """Flags that mean something on several only: was --nnodes forgotten?"""
    idle = [f"--{field.replace('_', '-')}" for field in _OF_SEVERAL if field in config.origins]
    return (f"WARNING: {' and '.join(idle)}: not used without --nnodes 2 or more",) if idle else ()


def _warning(config: LaunchConfig, at: NodeAddress, keyed: bool) -> tuple[str, ...]:
    if keyed:
        return ()
    # A follower is not listened to by strangers, but it obeys whoever answers there.
    can = "can join this launch, or stop it" if config.node_rank == 0 else "can give this node its work"
    whoever = "whoever can reach" if config.node_rank == 0 else "whoever answers at"
    return (
        f"WARNING: no --cluster-key-file: {whoever} {host_port(at.master, config.master_port)} {can};"
        " xserve keygen FILE makes a key",
    )


def follower_command(config: LaunchConfig, at: NodeAddress) -> str:
    """The command line of node 1, with all that must be equal. Secrets are left for its reader to fill in."""
    words = ["xserve", "launch"]
    for field in msgspec.structs.fields(LaunchConfig):
        if field.name not in _OWN and field.name in config.origins:
            words += _words(field.name, getattr(config, field.name))
    words += ["--nnodes", str(config.nnodes), "--node-rank", "1", "--master-addr", _master(at)]
    if config.master_port != MASTER_PORT:
        words += ["--master-port", str(config.master_port)]
    return shlex.join(words)


def _master(at: NodeAddress) -> str:
    """A zone is the name of the other node's own interface."""
    return f"{without_zone(at.master)}%INTERFACE" if is_link_local(at.master) else at.master


def _words(field: str, value: Any) -> list[str]:
    name = "--" + field.replace("_", "-")
    if isinstance(value, bool):
        return [name] if value else []
    if isinstance(value, dict):
        pairs = ((key, HIDDEN if key.lower().endswith(SECRET_ENDINGS) else one) for key, one in value.items())
        return [word for key, one in pairs for word in (name, f"{key}={one}")]
    return [] if value is None else [name, f"{value:g}" if isinstance(value, float) else str(value)]


def serves(config: LaunchConfig, at: NodeAddress, ranks: range) -> str:
    """``ranks 4-7 of 8 serve node 0 at 10.0.0.1:29501``"""
    one = len(ranks) == 1
    return (
        f"rank{'s'[: not one]} {shown_list(ranks)} of {config.tp} serve{'s'[:one]} node 0 at"
        f" {host_port(at.master, config.master_port)}"
    )
