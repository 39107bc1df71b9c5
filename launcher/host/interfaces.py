"""Network interfaces of this machine, the one that a packet would leave by, and names turned into addresses.

Asking for a route sends nothing: a UDP socket is connected, which is a look into the routing table. Only a launch over
several nodes comes here; one machine is served without a network.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from launcher import envs
from launcher.host.files import ROOT, read_text

_UP_OR_REJECT = 0x201
"""Flags of a route (RTF_UP, RTF_REJECT): one that is up and lets packets through."""
_ANY_PORT = 9
_RESOLVE = """
import socket, sys
try:
    found = socket.getaddrinfo(sys.argv[1], None, type=socket.SOCK_STREAM)
except OSError as error:
    print(error.strerror or error)
    sys.exit(3)
for each in dict.fromkeys(entry[4][0] for entry in found):
    print(each)
"""


class Address(msgspec.Struct, frozen=True):
    """Of an interface."""

    literal: str
    """Link-local IPv6 with its zone: ``fe80::1%eth0``."""
    network: str = ""
    """The net that it lies in, ``10.0.0.0/24``; empty: not told."""

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        return ipaddress.ip_address(self.literal.partition("%")[0])


class Interface(msgspec.Struct, frozen=True):
    name: str
    addresses: tuple[Address, ...] = ()
    up: bool = True
    loopback: bool = False

    def best(self, version: int | None = None) -> Address | None:
        """The address that others would use first: IPv4, then IPv6, link-local ones last. `version`: 4 or 6 only."""
        found = [a for a in self.addresses if version in (None, a.ip.version)]
        return min(found, key=lambda a: (a.ip.is_link_local, a.ip.version), default=None)


class Route(msgspec.Struct, frozen=True):
    """How packets leave."""

    iface: str
    address: str
    """The literal that they carry as their source."""


def read_interfaces() -> tuple[Interface, ...]:
    """All of them in the kernel's order, with IPv4 and IPv6 addresses."""
    import psutil  # only several nodes need it

    stats = psutil.net_if_stats()
    found: dict[str, list[Address]] = {name: [] for name in stats}
    for label, entries in psutil.net_if_addrs().items():
        name = label.partition(":")[0]  # eth0:1 is a second address of eth0
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                found.setdefault(name, []).append(_address(entry.address, entry.netmask))
    return tuple(
        Interface(
            name,
            tuple(addresses),
            up=bool(stats[name].isup) if name in stats else True,
            loopback=name == "lo" or (bool(addresses) and all(a.ip.is_loopback for a in addresses)),
        )
        for name, addresses in found.items()
    )


def _address(literal: str, netmask: str | None) -> Address:
    plain = literal.partition("%")[0]
    if not netmask:
        return Address(literal)
    bits = int(ipaddress.ip_address(netmask)).bit_count()
    return Address(literal, str(ipaddress.ip_network(f"{plain}/{bits}", strict=False)))


def route_to(literal: str, interfaces: Iterable[Interface] | None = None) -> Route | None:
    """The interface and the own address by which `literal` (with a zone if link-local) is reached; None: by none."""
    plain, _, zone = literal.partition("%")
    family = socket.AF_INET6 if ":" in plain else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        if family == socket.AF_INET6:
            probe.connect((plain, _ANY_PORT, 0, socket.if_nametoindex(zone) if zone else 0))
        else:
            probe.connect((plain, _ANY_PORT))
        own = str(probe.getsockname()[0]).partition("%")[0]
        known = tuple(read_interfaces() if interfaces is None else interfaces)
        return next((route for route in _bearers(own, known) if not zone or route.iface == zone), None)
    return None


def _bearers(own: str, interfaces: Iterable[Interface]) -> list[Route]:
    ip = ipaddress.ip_address(own)
    return [Route(i.name, a.literal) for i in interfaces for a in i.addresses if a.ip == ip]


def default_route(interfaces: Iterable[Interface] | None = None, root: Path = ROOT) -> Route | None:
    """The interface of the default route, with the address that others would use first; None: there is none."""
    known = {i.name: i for i in (read_interfaces() if interfaces is None else interfaces)}
    for version, names in ((4, _default_v4(root)), (6, _default_v6(root))):
        for name in names:
            best = known[name].best(version) if name in known else None
            if best is not None:
                return Route(name, best.literal)
    return None


def _default_v4(root: Path) -> list[str]:
    """Interfaces of IPv4's default routes, the one that is taken first."""
    rows = [line.split() for line in read_text(root / "proc/net/route").splitlines()[1:]]
    good = [r for r in rows if len(r) > 7 and r[1] == r[7] == "00000000" and int(r[3], 16) & _UP_OR_REJECT == 1]
    return [row[0] for row in sorted(good, key=lambda row: int(row[6]))]


def _default_v6(root: Path) -> list[str]:
    rows = [line.split() for line in read_text(root / "proc/net/ipv6_route").splitlines()]
    good = [
        r for r in rows if len(r) > 9 and set(r[0]) == {"0"} and r[1] == "00" and int(r[8], 16) & _UP_OR_REJECT == 1
    ]
    return [row[9] for row in sorted(good, key=lambda row: int(row[5], 16))]


class Resolved(msgspec.Struct, frozen=True):
    """What a name means."""

    literals: tuple[str, ...] = ()
    fault: str = ""
    """Why there are none, as the end of a sentence."""


def resolve(name: str, seconds: float) -> Resolved:
    """Ask the system's resolver, for `seconds` at most.

    In a process of its own: the resolver has no deadline, and a thread that waits for it would make this process unsafe
    to fork from.
    """
    command = [sys.executable, "-I", "-S", "-c", _RESOLVE, name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=envs.child_environment(), check=False
        )
    except subprocess.TimeoutExpired:
        return Resolved(fault=f"the resolver has not answered within {seconds:g} s")
    except OSError as error:
        return Resolved(fault=f"the resolver cannot be asked: {error.strerror}")
    lines = tuple(line.strip() for line in done.stdout.splitlines() if line.strip())
    if done.returncode:
        return Resolved(fault=lines[-1] if lines else f"the resolver ended with code {done.returncode}")
    return Resolved(lines)
