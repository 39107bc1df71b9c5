"""This machine's interfaces, routes and names."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from launcher.host import interfaces
from launcher.host.interfaces import Address, Interface, Route

ETH0 = Interface(
    "eth0", (Address("fe80::1%eth0", "fe80::/64"), Address("fd00::5", "fd00::/64"), Address("10.0.0.5", "10.0.0.0/24"))
)
ETH1 = Interface("eth1", (Address("fe80::2%eth1", "fe80::/64"), Address("fd01::5", "fd01::/64")))
LO = Interface("lo", (Address("127.0.0.1", "127.0.0.0/8"), Address("::1", "::1/128")), loopback=True)


def test_this_machine_has_loopback() -> None:
    lo = next(i for i in interfaces.read_interfaces() if i.name == "lo")
    assert lo.loopback
    assert Address("127.0.0.1", "127.0.0.0/8") in lo.addresses


def test_the_way_to_an_own_address() -> None:
    assert interfaces.route_to("127.0.0.1") == Route("lo", "127.0.0.1")
    assert interfaces.route_to("127.0.0.1", [ETH0]) is None  # no interface of these has that source
    assert interfaces.route_to("fe80::1%nosuch0") is None


def test_the_address_that_others_would_use_first() -> None:
    assert ETH0.best() == Address("10.0.0.5", "10.0.0.0/24")
    assert ETH0.best(6) == Address("fd00::5", "fd00::/64")
    assert ETH1.best(4) is None
    assert Interface("x").best() is None


V4 = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
V6 = f"{'0' * 32} 00 {'0' * 32} 00 fd010000000000000000000000000001 {{metric}} 00000001 00000000 {{flags}} {{iface}}\n"


@pytest.mark.parametrize(
    ("v4", "v6", "expected"),
    [
        ("", "", None),
        ("eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n", "", Route("eth0", "10.0.0.5")),
        ("eth0\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n", "", None),  # no default route
        ("eth0\t00000000\t0100000A\t0200\t0\t0\t100\t00000000\t0\t0\t0\n", "", None),  # one that rejects
        ("gone\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n", "", None),
        ("", V6.format(metric="00000400", flags="00000003", iface="eth1"), Route("eth1", "fd01::5")),
        ("", V6.format(metric="ffffffff", flags="00200200", iface="lo"), None),  # the kernel's own "no route"
        (
            "",
            V6.format(metric="00000400", flags="00000003", iface="eth1")
            + V6.format(metric="00000200", flags="00000003", iface="eth0"),
            Route("eth0", "fd00::5"),
        ),
    ],
)
def test_default_route(tmp_path: Path, v4: str, v6: str, expected: Route | None) -> None:
    net = tmp_path / "proc/net"
    net.mkdir(parents=True)
    (net / "route").write_text(V4 + v4)
    (net / "ipv6_route").write_text(v6)
    assert interfaces.default_route([LO, ETH0, ETH1], tmp_path) == expected


def test_a_machine_without_a_routing_table(tmp_path: Path) -> None:
    assert interfaces.default_route([LO, ETH0], tmp_path) is None


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        "127.0.0.1" in interfaces.resolve("localhost", 5).literals
        or "::1" in interfaces.resolve("localhost", 5).literals
    )
    wrong = interfaces.resolve("no-such-host.invalid", 5)
    assert wrong.fault
    assert not wrong.literals
    monkeypatch.setattr(interfaces, "_RESOLVE", "import time; time.sleep(60)")
    began = time.monotonic()
    assert interfaces.resolve("slow", 0.2).fault == "the resolver has not answered within 0.2 s"
    assert time.monotonic() - began < 3
