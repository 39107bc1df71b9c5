"""What can be wrong before a launch has come together: told in words, on the nodes that it concerns, in seconds."""

from __future__ import annotations

import re
import time

import pytest
from _testnet import Testnet

from launcher import __version__
from tests.e2e_nodes.conftest import MakeNet, Start
from tests.e2e_nodes.hosts import PORT, Host, exit_codes, last_lines

REFERENCE = ("--worker", "reference", "--tp", "2", "--nnodes", "2")


def both(net: Testnet, start: Start, zero: tuple[str, ...] = (), one: tuple[str, ...] = ()) -> tuple[Host, Host]:
    flags = (*REFERENCE, "--master-addr", net.ipv4(0))
    return start(net, 0, *flags, "--node-rank", "0", *zero), start(net, 1, *flags, "--node-rank", "1", *one)


def age(host: Host) -> float:
    return time.monotonic() - host.began


# --- settings that do not fit


def test_unequal_settings_are_told_on_both_sides(net: Testnet, start: Start) -> None:
    zero, one = both(net, start, zero=("--max-model-len", "128"), one=("--max-model-len", "256"))
    assert exit_codes((zero, one), 10) == [2, 2], f"{zero.output}\n{one.output}"
    for host in (zero, one):
        words = last_lines(host)
        assert "--max-model-len" in words, words
        assert "128" in words
        assert "256" in words
        assert "Traceback" not in host.output
        assert age(host) < 10
        host.assert_nothing_left()
    assert "Worker_DP0_PP0_TP0 (pid" not in zero.output or " model" not in zero.output  # nothing was loaded for it


def test_what_need_not_be_equal(net: Testnet, start: Start) -> None:
    zero, one = both(
        net, start, zero=("--port", "8123", "--log-level", "debug"), one=("--port", "9000", "--name", "other")
    )
    zero.port = 8123
    zero.wait_node()
    one.wait_node()
    assert zero.is_right()


def test_a_duplicate_rank_is_named(make_net: MakeNet, start: Start) -> None:
    net = make_net(3)
    flags = (*REFERENCE, "--master-addr", net.ipv4(0))
    zero = start(net, 0, *flags, "--node-rank", "0")
    one = start(net, 1, *flags, "--node-rank", "1")
    zero.wait_node()
    again = start(net, 2, *flags, "--node-rank", "1")
    assert again.wait_exit(10) == 2, again.output
    words = last_lines(again)
    assert "node 1" in words or "--node-rank 1" in words, words
    assert net.ipv4(1) in words  # who has it
    zero.wait_line(rf"refused.*{re.escape(net.ipv4(2))}", 5)
    assert zero.is_right("undisturbed", 9)
    assert one.state == "ready"


def test_a_second_node_0(net: Testnet, start: Start) -> None:
    """As the newcomer types it who copies the command and forgets to change the rank."""
    flags = (*REFERENCE, "--master-addr", net.ipv4(0), "--node-rank", "0")
    start(net, 0, *flags)
    second = start(net, 1, *flags)
    assert second.wait_exit(6) == 2, second.output
    assert age(second) < 5
    words = last_lines(second)
    assert f"--master-addr {net.ipv4(0)}" in words
    assert net.ipv4(1) in words, words  # the addresses that this host has


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--nnodes", "2", "--node-rank", "5"), ["--node-rank 5", "2"]),
        (("--nnodes", "2", "--node-rank", "1"), ["--master-addr"]),
        (("--nnodes", "3", "--node-rank", "0"), ["--tp 2", "--nnodes 3"]),
        (("--nnodes", "2", "--node-rank", "0", "--iface", "eth7"), ["--iface eth7", "eth0"]),
        (("--nnodes", "2", "--node-rank", "0", "--cluster-key-file", "/nonexistent/key"), ["/nonexistent/key"]),
    ],
    ids=["rank-5-of-2", "no-master", "uneven", "no-such-interface", "no-such-key"],
)
def test_refused_by_the_command_line(net: Testnet, start: Start, flags: tuple[str, ...], words: list[str]) -> None:
    host = start(net, 0, "--worker", "reference", "--tp", "2", *flags)
    assert host.wait_exit(6) == 2, host.output
    said = last_lines(host)
    assert all(word in said for word in words), said
    assert "Traceback" not in host.output


def test_another_number_of_nodes(net: Testnet, start: Start) -> None:
    flags = ("--worker", "reference", "--tp", "6", "--master-addr", net.ipv4(0))
    zero = start(net, 0, *flags, "--nnodes", "2", "--node-rank", "0")
    one = start(net, 1, *flags, "--nnodes", "3", "--node-rank", "1")
    assert exit_codes((zero, one), 10) == [2, 2], f"{zero.output}\n{one.output}"
    for host in (zero, one):
        assert "--nnodes" in last_lines(host), last_lines(host)


# --- nobody there


def test_only_one_of_two_is_started(make_net: MakeNet, start: Start) -> None:
    """Who has joined, each ten seconds; then exit 69. On node 1: that nobody answers there, soon."""
    net = make_net(3)
    timeout = ("--join-timeout", "12")
    alone = start(net, 0, *REFERENCE, "--master-addr", net.ipv4(0), "--node-rank", "0", *timeout)
    other = start(net, 1, *REFERENCE, "--master-addr", net.ipv4(2), "--node-rank", "1", *timeout)
    alone.wait_line("waiting for node 1 of 2", 5)
    since = len(alone.output)
    other.wait_line(rf"{re.escape(net.ipv4(2))}:{PORT}.*refused", 10)
    alone.wait_line("waiting for node 1 of 2", 11, since)
    assert exit_codes((alone, other), 20) == [69, 69], f"{alone.output}\n{other.output}"
    for host in (alone, other):
        assert 11 < age(host) < 22
        assert "--join-timeout 12" in last_lines(host), last_lines(host)
        host.assert_nothing_left()
    assert "node 1" in last_lines(alone)
    assert net.ipv4(2) in last_lines(other)


def test_why_a_master_cannot_be_reached(make_net: MakeNet, start: Start) -> None:
    """Refused, no answer, no such name, something else there: told apart within 15 s, each by a node of its own."""
    net = make_net(2, ipv6=True)
    net.drop(0, 29601)
    web = start(net, 0, "--worker", "reference", "--port", "29602", "--host", net.ipv4(0), "--name", "web")
    web.wait_line("ready: ", 20)
    cases = {
        "29600": (net.ipv4(0), rf"{re.escape(net.ipv4(0))}:29600.*refused"),
        "29601": (net.ipv4(0), rf"{re.escape(net.ipv4(0))}:29601.*no answer \((a )?firewall\?"),
        "29602": (net.ipv4(0), rf"{re.escape(net.ipv4(0))}:29602.*something else answers"),
        "29603": ("no-such-host", r"no-such-host.*does not resolve"),
        "29604": ("10.99.0.1", r"10\.99\.0\.1.*(no route|unreachable)"),
        "29605": (net.ipv6(0), rf"\[{re.escape(net.ipv6(0))}\]:29605.*refused"),
    }
    hosts = {}
    for port, (address, _) in cases.items():
        flags = ("--node-rank", "1", "--master-addr", address, "--master-port", port, "--name", port)
        hosts[port] = start(net, 1, *REFERENCE, *flags)
    for port, (_, pattern) in cases.items():
        hosts[port].wait_line(pattern, 15)
        assert age(hosts[port]) < 15 + 1
    for port in cases:  # nobody has taken any of it for a reason to end
        assert hosts[port].process.poll() is None, hosts[port].output
    assert [hosts[port].stop(10) for port in cases] == [143] * len(cases)  # interrupted before it was ready


def test_the_port_of_the_master_is_taken(net: Testnet, start: Start) -> None:
    holder = start(net, 0, "--worker", "reference", "--port", str(PORT), "--host", net.ipv4(0), "--name", "holder")
    holder.wait_line("ready: ", 20)
    zero = start(net, 0, *REFERENCE, "--node-rank", "0", "--master-addr", net.ipv4(0))
    code = zero.wait_exit(10)
    assert code in (1, 2), zero.output
    words = last_lines(zero)
    assert str(PORT) in words
    assert re.search(r"pid \d+", words), words


def test_another_release_is_refused(net: Testnet, start: Start, tmp_path_factory: pytest.TempPathFactory) -> None:
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text("import launcher\nlauncher.__version__ = '9.9.9'\n")
    flags = (*REFERENCE, "--master-addr", net.ipv4(0))
    zero = start(net, 0, *flags, "--node-rank", "0")
    one = start(net, 1, *flags, "--node-rank", "1", env={"PYTHONPATH": str(site)})
    assert exit_codes((zero, one), 10) == [2, 2], f"{zero.output}\n{one.output}"
    for host in (zero, one):
        words = last_lines(host)
        assert "9.9.9" in words, words
        assert __version__ in words
