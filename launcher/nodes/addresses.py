"""Addresses as people, sockets, ZMQ and URLs write them. Pure.

======================  ==========================  ================================  ==========================
                        IPv4 or a name              IPv6                              link-local IPv6
======================  ==========================  ================================  ==========================
literal (ours)          ``10.0.0.1``                ``fd00::1``                       ``fe80::1%eth0``
people, with a port     ``10.0.0.1:29501``          ``[fd00::1]:29501``               ``[fe80::1%eth0]:29501``
`zmq_endpoint`          ``tcp://10.0.0.1:29501``    ``tcp://[fd00::1]:29501``         ``tcp://[fe80::1%eth0]:29501``
`url_host`              ``10.0.0.1``                ``[fd00::1]``                     ``[fe80::1%25eth0]``
======================  ==========================  ================================  ==========================

A *zone* is the interface that a link-local address belongs to; it has a meaning on this machine only.
"""

from __future__ import annotations

import ipaddress
import re
import socket

from launcher.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_NUMERIC = re.compile(r"[0-9.]+")
_ZONE = re.compile(r"[^\s/%\[\]]{1,15}")
_MAX_NAME = 253


def split_host_port(text: str, default_port: int | None = None) -> tuple[str, int]:
    """``h:1``, ``[fd00::1]:1``, ``fd00::1`` → (host, port); the host without brackets. `default_port`: for a text
    without one; None: the port must be there.

    `UsageError` ends a sentence that begins with the flag and the text.
    """
    host, colon, port = text.rpartition(":")
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        colon, port = rest[:1], rest[1:]
        if not bracket or (rest and colon != ":"):
            raise UsageError("has a bracket that does not close: write for example [fd00::1]:29501")
        if not is_literal(host) or family_of(host) != socket.AF_INET6:
            raise UsageError("has brackets around what is no IPv6 address: write for example [fd00::1]:29501")
    elif text.count(":") > 1:  # IPv6 without brackets: no port can be told from it
        host, colon, port = text, "", ""
        if not is_literal(text):
            raise UsageError("is no IP address (IPv6 has brackets before a port): write for example [fd00::1]:29501")
    elif not colon:
        host, port = text, ""
    if not colon:
        if default_port is None:
            raise UsageError("has no port: write for example 10.0.0.1:29501 or [fd00::1]:29501")
        return check_host(host), default_port
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) <= 65535):
        raise UsageError("has no port from 1 to 65535 behind the colon: write for example 10.0.0.1:29501")
    return check_host(host), int(port)


def check_host(text: str) -> str:
    """A name or a literal, brackets taken off. `UsageError` as `split_host_port`'s."""
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if is_literal(host):
        return host
    if ":" in host or "%" in host or "[" in host or _NUMERIC.fullmatch(host):
        raise UsageError("is no IP address: write for example 10.0.0.1, fd00::1 or fe80::1%eth0")
    if len(host) > _MAX_NAME or _NAME.fullmatch(host) is None:
        raise UsageError("is neither an address nor a host's name: write for example 10.0.0.1, fd00::1 or node0")
    return host


def is_literal(text: str) -> bool:
    """An address in numbers, without brackets; a zone only behind IPv6."""
    address, percent, zone = text.partition("%")
    if percent and _ZONE.fullmatch(zone) is None:
        return False
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return not percent or found.version == 6


def family_of(literal: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in literal else socket.AF_INET


def zone_of(literal: str) -> str:
    """The interface behind ``%``; empty: none."""
    return literal.partition("%")[2]


def without_zone(literal: str) -> str:
    return literal.partition("%")[0]


def is_link_local(literal: str) -> bool:
    """Whether it has a meaning only together with an interface. IPv4's (169.254/16) need no zone."""
    return family_of(literal) == socket.AF_INET6 and ipaddress.ip_address(without_zone(literal)).is_link_local


def same_address(one: str, other: str) -> bool:
    """Two spellings of one address; a zone counts only where both have one."""
    if ipaddress.ip_address(without_zone(one)) != ipaddress.ip_address(without_zone(other)):
        return False
    return not (zone_of(one) and zone_of(other)) or zone_of(one) == zone_of(other)


def bracketed(literal: str) -> str:
    """For people, before a colon and a port. Names and IPv4 stay as they are."""
    return f"[{literal}]" if ":" in literal else literal


def host_port(literal: str, port: int) -> str:
    """``10.0.0.1:29501``, ``[fd00::1]:29501``."""
    return f"{bracketed(literal)}:{port}"


def zmq_endpoint(literal: str, port: int) -> str:
    """ZMQ takes the zone inside the brackets; the socket needs IPV6=1."""
    return f"tcp://{host_port(literal, port)}"


def interface_environment(iface: str, literal: str) -> dict[str, str]:
    """Variables that have gloo and NCCL (and torch's own RPC) use the interface of `literal`, as we do."""
    env = {
        "GLOO_SOCKET_IFNAME": iface,
        "NCCL_SOCKET_IFNAME": f"={iface}",  # without "=" it is the beginning of a name: eth1 would mean eth10 too
        "TP_SOCKET_IFNAME": iface,
    }
    if family_of(literal) == socket.AF_INET6:
        env["NCCL_SOCKET_FAMILY"] = "AF_INET6"  # of an interface with both it would take IPv4
    return env


def url_host(literal: str) -> str:
    """The host of a URL: brackets, and a zone behind ``%25`` (RFC 6874)."""
    return bracketed(literal.replace("%", "%25"))
