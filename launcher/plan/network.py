"""Several nodes: the addresses of this one. What is read of the network, and what is decided from it.

node 0      --master-addr (must be its own)  >  address of --iface  >  of the default route  >  any that is not loopback
node k > 0  --master-addr (needed)           ;  --iface, else found by the agent: the one that leads to the master
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from launcher.config import LaunchConfig
from launcher.errors import HostError, UsageError
from launcher.host.interfaces import (
    Address,
    Interface,
    Resolved,
    Route,
    default_route,
    read_interfaces,
    resolve,
    route_to,
)
from launcher.nodes import addresses

RESOLVE_SECONDS = 5.0
_SHOWN_ADDRESSES = 12


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """What was read for a launch over several nodes."""

    hostname: str = ""
    interfaces: tuple[Interface, ...] = ()
    default: Route | None = None
    """Of the default route."""
    master: Resolved = Resolved()
    """What --master-addr means: itself if it is a literal. On node 0 only: the others' agents ask by themselves."""
    to_master: Route | None = None
    """The way to a literal --master-addr; None: there is none by now, or it is a name."""


class NodeAddress(NamedTuple):
    """How this node and the others find each other."""

    master: str
    """Node 0: its own literal. Others: as given, with a zone if one is needed and known."""
    address: str
    """This node's own literal; empty: its agent finds it."""
    iface: str
    """Empty: as `address`."""
    network: str = ""
    """The net that the nodes seem to share, for a firewall rule; empty: not known."""
    origin: str = ""
    notes: tuple[str, ...] = ()


def read_network(config: LaunchConfig, hostname: str) -> Network:
    """Within `RESOLVE_SECONDS`; sends nothing but a resolver's questions."""
    known = read_interfaces()
    given = config.master_addr
    literal = given is not None and addresses.is_literal(given)
    master = Resolved()
    if given is not None and config.node_rank == 0:
        master = Resolved((given,)) if literal else resolve(given, RESOLVE_SECONDS)
    return Network(
        hostname=hostname,
        interfaces=known,
        default=default_route(known),
        master=master,
        to_master=route_to(given, known) if given is not None and literal else None,
    )


def choose_address(config: LaunchConfig, network: Network) -> NodeAddress:
    """Raises `UsageError` (what was given cannot be) and `HostError` (this machine has no address)."""
    chosen = _interface(config, network)
    find = _own if config.node_rank == 0 else _follower
    found = find(config, network, chosen)
    if chosen is not None and not chosen.up:
        found = found._replace(notes=(f"--iface {chosen.name} is down: no other node can be reached by it",))
    return found


def _interface(config: LaunchConfig, network: Network) -> Interface | None:
    """That of --iface, which has an address."""
    if config.iface is None:
        return None
    found = next((i for i in network.interfaces if i.name == config.iface), None)
    if found is None:
        raise UsageError(f"--iface {config.iface}: there is no such interface; there are {_names(network.interfaces)}")
    if not found.addresses:
        usable = _names([i for i in network.interfaces if i.addresses])
        raise UsageError(
            f"--iface {config.iface} has no address: give it one, or take one that has: {usable or 'none'}"
        )
    return found


# --- node 0 --------------------------------------------------------------------------------------------------------


def _own(config: LaunchConfig, network: Network, chosen: Interface | None) -> NodeAddress:
    given = config.master_addr
    if given is not None and not _means_itself(given, network):
        return _given(config, network, chosen)
    if chosen is not None:
        best = chosen.best()
        assert best is not None
        return _node_zero(chosen.name, best, "--iface")
    if (route := network.default) is not None:
        return _node_zero(route.iface, _address_of(network, route), "of the default route")
    for interface in sorted(network.interfaces, key=lambda i: not i.up):
        if not interface.loopback and (best := interface.best()) is not None:
            return _node_zero(interface.name, best, "the first that is not loopback")
    raise HostError(
        "node 0 has no address but loopback, by which no other node can reach it: bring an interface up, or rehearse on"
        " one machine with --master-addr 127.0.0.1"
    )


def _means_itself(given: str, network: Network) -> bool:
    """The host's own name, which says nothing where it cannot be resolved, or only to loopback (as in /etc/hosts)."""
    if addresses.is_literal(given) or given.lower() not in (
        network.hostname.lower(),
        network.hostname.lower().split(".")[0],
    ):
        return False
    return all(_is_loopback(literal) for literal in network.master.literals)


def _given(config: LaunchConfig, network: Network, chosen: Interface | None) -> NodeAddress:
    given, own = config.master_addr, [(i, a) for i in network.interfaces for a in i.addresses]
    if network.master.fault:
        raise UsageError(
            f"--master-addr {given}: {network.master.fault}; give an address of this host: {shown_addresses(network)}"
        )
    hits = [(i, a) for literal in network.master.literals for i, a in own if addresses.same_address(a.literal, literal)]
    if not hits:
        means = "" if addresses.is_literal(str(given)) else f" ({', '.join(network.master.literals)})"
        raise UsageError(
            f"--master-addr {given}{means} is no address of this host, which is node 0: give one of"
            f" {shown_addresses(network)}, or leave it out; on the other nodes, give --node-rank"
        )
    mine = [(i, a) for i, a in hits if chosen is None or i.name == chosen.name]
    if not mine:
        assert chosen is not None
        there = ", ".join(a.literal for a in chosen.addresses)
        raise UsageError(
            f"--master-addr {given} is on {hits[0][0].name}, not on --iface {chosen.name} ({there}): change one of them"
        )
    if len({i.name for i, _ in mine}) > 1 and addresses.is_link_local(mine[0][1].literal):
        options = ", ".join(a.literal for _, a in mine)
        raise UsageError(f"--master-addr {given} is on several interfaces: say which one ({options}), or give --iface")
    interface, address = mine[0]
    return _node_zero(interface.name, address, "--master-addr")


def _node_zero(iface: str, address: Address, origin: str) -> NodeAddress:
    return NodeAddress(address.literal, address.literal, iface, address.network, origin)


# --- the others ----------------------------------------------------------------------------------------------------


def _follower(config: LaunchConfig, network: Network, chosen: Interface | None) -> NodeAddress:
    master = config.master_addr
    if master is None:
        raise UsageError(f"--node-rank {config.node_rank} needs --master-addr: node 0 prints it at its start")
    master = _with_zone(master, network, chosen)
    if chosen is None:
        route = network.to_master
        net = _address_of(network, route).network if route is not None else ""
        return NodeAddress(master, "", "", net, f"leads to {master}" + (f" (now {route.iface})" if route else ""))
    literal = addresses.is_literal(master)
    local = literal and addresses.is_link_local(master)
    version = (6 if ":" in master else 4) if literal else None
    found = [a for a in chosen.addresses if version in (None, a.ip.version)]
    if not found:
        raise UsageError(
            f"--iface {chosen.name} has no IPv{version} address, but --master-addr {master} is one: change one"
        )
    best = min(found, key=lambda a: (a.ip.is_link_local is not local, a.ip.version))
    # A name may mean either family: the agent, which asks, chooses the address to it.
    return NodeAddress(master, best.literal if literal else "", chosen.name, best.network, "--iface")


def _with_zone(master: str, network: Network, chosen: Interface | None) -> str:
    if not addresses.is_literal(master) or not addresses.is_link_local(master):
        return master
    zone = addresses.zone_of(master)
    if not zone and chosen is None:
        example = next((i.name for i in network.interfaces if not i.loopback and i.addresses), "eth0")
        raise UsageError(
            f"--master-addr {master} is link-local, so it needs this machine's interface to it:"
            f" write {master}%{example}, or give --iface"
        )
    if zone and zone not in (i.name for i in network.interfaces):
        raise UsageError(
            f"--master-addr {master}: there is no interface {zone}; there are {_names(network.interfaces)}"
        )
    if zone and chosen is not None and zone != chosen.name:
        raise UsageError(f"--master-addr {master} is behind {zone}, not --iface {chosen.name}: change one of them")
    return master if zone or chosen is None else f"{master}%{chosen.name}"


# --- words ---------------------------------------------------------------------------------------------------------


def shown_addresses(network: Network) -> str:
    """``10.0.0.1 (eth0), fd00::1 (eth0)``; loopback last."""
    each = [(i, a) for i in sorted(network.interfaces, key=lambda i: i.loopback) for a in i.addresses]
    shown = [f"{a.literal} ({i.name})" for i, a in each]
    more = f" and {len(shown) - _SHOWN_ADDRESSES} more" if len(shown) > _SHOWN_ADDRESSES else ""
    return ", ".join(shown[:_SHOWN_ADDRESSES]) + more


def _names(interfaces: Sequence[Interface]) -> str:
    return ", ".join(i.name for i in interfaces)


def _address_of(network: Network, route: Route) -> Address:
    each = (a for i in network.interfaces if i.name == route.iface for a in i.addresses)
    return next((a for a in each if a.literal == route.address), Address(route.address))


def _is_loopback(literal: str) -> bool:
    return Address(literal).ip.is_loopback
