"""Where this node listens, and the firewall rule that lets the nodes speak to each other. Pure."""

from __future__ import annotations

import msgspec

from launcher.config import LaunchConfig
from launcher.errors import UsageError
from launcher.nodes import addresses
from launcher.plan.front import HttpBinding
from launcher.plan.network import NodeAddress
from launcher.plan.resolved import Decision

_EPHEMERAL = "ephemeral"
_EVERYWHERE = ("0.0.0.0", "::", "")  # noqa: S104 compared only


class Firewall(msgspec.Struct, frozen=True):
    """The same rule for either tool."""

    nft: str
    iptables: str


def check_ports(config: LaunchConfig, http: HttpBinding, at: NodeAddress | None) -> None:
    """Refuse HTTP at the master port of the same address."""
    if at is None or http.uds or http.port != config.master_port:
        return
    host = http.host
    same = host in _EVERYWHERE or (addresses.is_literal(host) and addresses.same_address(host, at.address))
    if same or not addresses.is_literal(host):
        raise UsageError(
            f"--port {http.port} is the --master-port too, on the same address: give one of them another number"
        )


def ports(config: LaunchConfig, http: HttpBinding | None, at: NodeAddress | None) -> tuple[Decision, ...]:
    """(what, where, who comes)"""
    rows = []
    if http is not None:
        where = f"unix:{http.uds}" if http.uds else addresses.host_port(http.host, http.port)
        rows.append(Decision("HTTP", where, "clients"))
    if at is None:
        return tuple(rows)
    where = at.iface or "the interface that leads to node 0"
    if config.node_rank == 0:
        rows += [
            Decision("master port", f"TCP {addresses.host_port(at.address, config.master_port)}", "node agents"),
            Decision("engine core data", f"TCP {_EPHEMERAL} on {where}", "node agents"),
            Decision("TCPStore", f"TCP {_EPHEMERAL} on {where}", "workers of all nodes"),
        ]
    rows.append(Decision("gloo, NCCL", f"TCP {_EPHEMERAL} on {where}", "workers of the other nodes"))
    return tuple(rows)


def firewall(at: NodeAddress) -> Firewall:
    """All TCP between the nodes: gloo, NCCL and the store take ports as they come."""
    six = ":" in at.network
    net = at.network or "<the nodes' network>"
    iface = at.iface or "<interface>"
    what = f"{'ip6' if six else 'ip'} saddr {net} meta l4proto tcp"
    nft = f'nft insert rule inet filter input iifname "{iface}" {what} accept'
    tables = f"{'ip6tables' if six else 'iptables'} -I INPUT -i {iface} -s {net} -p tcp -j ACCEPT"
    return Firewall(nft, tables)
