"""What `xserve doctor` looks at for a launch over several nodes: this machine's side of the network, and the key."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from launcher.cli.checks import Check
from launcher.config import LaunchConfig
from launcher.errors import XserveError
from launcher.host import HostFacts
from launcher.host.interfaces import resolve, route_to
from launcher.nodes import addresses
from launcher.nodes.key_file import read_key
from launcher.plan.network import RESOLVE_SECONDS, Network, NodeAddress, choose_address, read_network
from launcher.plan.node_words import key_path


def node_checks(config: LaunchConfig, facts: HostFacts) -> Iterator[Check]:
    """None for one machine."""
    if config.nnodes == 1:
        return
    network = read_network(config, facts.hostname)
    try:
        at = choose_address(config, network)
    except XserveError as error:
        yield Check("address", "fail", str(error))
    else:
        yield from _address(config, network, at)
    yield _key(config)


def _address(config: LaunchConfig, network: Network, at: NodeAddress) -> Iterator[Check]:
    iface = at.iface
    if config.node_rank == 0:
        yield Check("address", "pass", f"{at.address} ({at.origin})")
        yield _master_port(config, at)
    else:
        check, iface = _way_to_master(network, at)
        yield check
    found = next((i for i in network.interfaces if i.name == iface), None)
    if found is not None:
        shown = ", ".join(a.literal for a in found.addresses)
        mend = "" if found.up else f"ip link set {iface} up"
        yield Check(
            "interface", "pass" if found.up else "fail", f"{iface} is {'up' if found.up else 'down'}: {shown}", mend
        )


def _master_port(config: LaunchConfig, at: NodeAddress) -> Check:
    """Bound and let go at once, as the HTTP port is."""
    where = addresses.host_port(at.address, config.master_port)
    try:
        family = addresses.family_of(at.address)
        with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(socket.getaddrinfo(at.address, config.master_port, family, socket.SOCK_STREAM)[0][4])
    except OSError as error:
        mend = f"ss -ltnp 'sport = :{config.master_port}' names who has it; or another --master-port, on every node"
        return Check("master port", "fail", f"cannot listen at {where}: {error.strerror or error}", mend)
    return Check("master port", "pass", f"{where} is free")


def _way_to_master(network: Network, at: NodeAddress) -> tuple[Check, str]:
    """(verdict, the interface that leads there)"""
    literals: tuple[str, ...] = (at.master,)
    shown = at.master
    if not addresses.is_literal(at.master):
        found = resolve(at.master, RESOLVE_SECONDS)
        if found.fault:
            text = f"--master-addr {at.master}: {found.fault}"
            return Check("master address", "fail", text, "give node 0's address in numbers"), at.iface
        literals, shown = found.literals, f"{at.master} ({', '.join(found.literals)})"
    for literal in literals:
        if (route := route_to(literal, network.interfaces)) is not None:
            return Check(
                "master address", "pass", f"{shown} is reached by {route.iface}, as {route.address}"
            ), route.iface
    mend = "ip route get " + literals[0].partition("%")[0]
    return Check("master address", "fail", f"no route leads to {shown}", mend), at.iface


def _key(config: LaunchConfig) -> Check:
    path = key_path(config)
    if path is None:
        text = "no --cluster-key-file: whoever can reach the master port can join"
        return Check("cluster key", "warn", text, "xserve keygen cluster.key, and the same file on every node")
    try:
        read_key(path)
    except XserveError as error:
        return Check("cluster key", "fail", str(error))
    return Check("cluster key", "pass", f"{path} is readable and private")
