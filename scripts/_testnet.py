"""Hosts of our own on one machine: network namespaces on the ports of a bridge, each with a host name. Needs root.

::

    node0 ── eth0 ══ 0e0 ┐
                         ├─ bridge "eth0"      in the namespace …-hub
    node1 ── eth0 ══ 1e0 ┘
    (and the same with eth1 on a second bridge, where a second interface is wanted)

Node k has 10.77.0.(k+1) and fd00::(k+1) on eth0, 10.78.0.(k+1) and fd01::(k+1) on eth1, a link-local address on both,
and no route to anywhere else. Host names (node0, …) do not resolve, as on many a cluster.

A net carries the pid and start time of who made it in its namespaces' names, or a name that was given. What a dead
maker left is found by that and removed with all its processes, before the next net is made.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from launcher.process import procfs

_RUN = Path("/run/netns")
_OWNED = re.compile(r"xs-p(\d+)-(\d+)(?:\.\d+)?-(?:hub|\d+)")
_CLONE_NEWNET = 0x40000000
_made = 0
_DROP, _PASS = "6 0 0 2", "6 0 0 4294967295"  # TC_ACT_SHOT, TC_ACT_UNSPEC


class NoNet(Exception):
    """Namespaces cannot be had here; the text says why."""


def _run(*command: str, text: str = "", check: bool = True) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)
    if check and done.returncode:
        raise NoNet(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def namespaces() -> list[str]:
    return sorted(path.name for path in _RUN.glob("xs-*"))


def remove(names: Sequence[str]) -> None:
    """Namespaces of ours with every process in them."""
    for name in names:
        end = time.monotonic() + 5
        while (pids := _run("ip", "netns", "pids", name, check=False).split()) and time.monotonic() < end:
            for pid in map(int, pids):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL if pid != os.getpid() else 0)
            time.sleep(0.02)  # the kernel's time to end them
        _run("ip", "netns", "del", name, check=False)


def remove_stale() -> list[str]:
    """What dead makers left; their namespaces' names."""
    stale = []
    for name in namespaces():
        owner = _OWNED.fullmatch(name)
        if owner and procfs.start_time(int(owner[1])) != int(owner[2]):
            stale.append(name)
    remove(stale)
    return stale


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread's new sockets, and nobody else's, belong to that network."""
    with open("/proc/thread-self/ns/net") as here, (_RUN / namespace).open() as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(here.fileno())


def _enter(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise NoNet(f"cannot enter a network namespace: {os.strerror(number)}")


class Testnet:
    """As a context manager: made at its beginning, gone at its end. `NoNet` says why it cannot be had."""

    __test__ = False  # no test, whatever pytest thinks of the name

    def __init__(
        self, nodes: int = 2, *, name: str = "", ipv4: bool = True, ipv6: bool = False, second: bool = False
    ) -> None:
        """`name`: it outlives this process, until `attach(name).close()`. `second`: an eth1 on each node."""
        global _made
        if os.geteuid() != 0:
            raise NoNet("network namespaces need root")
        if shutil.which("ip") is None:
            raise NoNet("there is no ip command (Debian: apt-get install iproute2)")
        remove_stale()
        me = os.getpid()
        self.prefix = f"xs-{name}" if name else f"xs-p{me}-{procfs.start_time(me)}.{_made}"
        _made += 1
        if self.hub in namespaces():
            raise NoNet(f"there is a net named {name} already: take it down first, or give another name")
        self.nodes = nodes
        self.interfaces = ("eth0", "eth1") if second else ("eth0",)
        try:
            self._make(ipv4, ipv6)
        except BaseException:
            self.close()
            raise

    @classmethod
    def attach(cls, name: str) -> Testnet:
        """One that was made before with that name."""
        found = [one for one in namespaces() if re.fullmatch(rf"xs-{re.escape(name)}-\d+", one)]
        if not found:
            raise NoNet(f"there is no net named {name}: make it with scripts/testnet up")
        net = cls.__new__(cls)
        net.prefix, net.nodes = f"xs-{name}", len(found)
        net.interfaces = tuple(one for one in ("eth0", "eth1") if net._has(one))
        return net

    def __enter__(self) -> Testnet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        remove([name for name in namespaces() if name.startswith(f"{self.prefix}-")])

    # --- names

    @property
    def hub(self) -> str:
        return f"{self.prefix}-hub"

    def namespace(self, node: int) -> str:
        return f"{self.prefix}-{node}"

    def ipv4(self, node: int, interface: str = "eth0") -> str:
        return f"10.{77 + self.interfaces.index(interface)}.0.{node + 1}"

    def ipv6(self, node: int, interface: str = "eth0") -> str:
        return f"fd0{self.interfaces.index(interface)}::{node + 1:x}"

    def link_local(self, node: int, interface: str = "eth0") -> str:
        """Without a zone."""
        [info] = json.loads(self.ip(node, "-6", "-j", "addr", "show", "dev", interface, "scope", "link"))
        return next(str(one["local"]) for one in info["addr_info"] if one)  # the filtered ones are empty

    # --- do things in a node

    def command(self, node: int, *command: str) -> list[str]:
        """What executes `command` as that host: its network, its host name. The pid stays the same throughout."""
        rename = f'echo node{node} >/proc/sys/kernel/hostname; exec "$@"'
        return ["ip", "netns", "exec", self.namespace(node), "unshare", "--uts", "sh", "-c", rename, "sh", *command]

    def inside(self, node: int) -> contextlib.AbstractContextManager[None]:
        return inside(self.namespace(node))

    def ip(self, node: int, *command: str) -> str:
        return _run("ip", "-n", self.namespace(node), *command)

    def pids(self, node: int) -> list[int]:
        return [int(pid) for pid in _run("ip", "netns", "pids", self.namespace(node)).split()]

    # --- what befalls networks

    def cable(self, node: int, *, there: bool, interface: str = "eth0") -> None:
        """Take a node's cable out, or put it back: it loses its carrier and keeps its addresses."""
        port = f"{node}e{interface.removeprefix('eth')}"
        _run("ip", "-n", self.hub, "link", "set", port, "up" if there else "down")

    def drop(self, node: int, port: int | None = None, interface: str = "eth0") -> None:
        """A firewall on that node: TCP that comes in there for `port` (None: for any) is dropped without a word."""
        rule = f"tc -n {self.namespace(node)}"
        try:
            _run(*rule.split(), "qdisc", "add", "dev", interface, "clsact", check=False)  # it may have one already
            _run(*rule.split(), *f"filter add dev {interface} ingress bpf da bytecode".split(), _bytecode(port))
        except NoNet as tc_failed:
            match = ["-p", "tcp", *(["--dport", str(port)] if port else []), "-i", interface, "-j", "DROP"]
            for tables in ("iptables", "ip6tables"):
                if shutil.which(tables) is None:
                    raise NoNet(f"nothing here can drop packets: {tc_failed}; no iptables") from tc_failed
                _run("ip", "netns", "exec", self.namespace(node), tables, "-A", "INPUT", *match)

    def admit(self, node: int, interface: str = "eth0") -> None:
        """No firewall on that node any more."""
        _run("tc", "-n", self.namespace(node), "qdisc", "del", "dev", interface, "clsact", check=False)
        for tables in ("iptables", "ip6tables"):
            if shutil.which(tables):
                _run("ip", "netns", "exec", self.namespace(node), tables, "-F", "INPUT", check=False)

    def sent(self, node: int, interface: str = "eth0") -> int:
        """Bytes that the node has sent over that interface."""
        [info] = json.loads(self.ip(node, "-j", "-s", "link", "show", "dev", interface))
        return int(info["stats64"]["tx"]["bytes"])

    # --- make it

    def _has(self, interface: str) -> bool:
        return f"{interface}@" in self.ip(0, "-br", "link")

    def _make(self, ipv4: bool, ipv6: bool) -> None:
        everybody = [self.namespace(node) for node in range(self.nodes)]
        _batch(f"netns add {name}" for name in (self.hub, *everybody))
        for name in (self.hub, *everybody):
            with inside(name), contextlib.suppress(OSError):
                # Addresses are there at once: nobody else can have them.
                Path("/proc/sys/net/ipv6/conf/default/accept_dad").write_text("0")
        _batch([f"link add {name} type bridge" for name in self.interfaces], namespace=self.hub)
        _batch(
            f"link add {interface} netns {self.namespace(node)} type veth peer name {node}e{number} netns {self.hub}"
            for number, interface in enumerate(self.interfaces)
            for node in range(self.nodes)
        )
        ports = [(f"{node}e{n}", one) for n, one in enumerate(self.interfaces) for node in range(self.nodes)]
        _batch(
            (
                *(f"link set {port} master {bridge} up" for port, bridge in ports),
                *(f"link set {name} up" for name in self.interfaces),
            ),
            namespace=self.hub,
        )
        for node in range(self.nodes):
            _batch(self._addresses(node, ipv4, ipv6), namespace=self.namespace(node))

    def _addresses(self, node: int, ipv4: bool, ipv6: bool) -> Iterator[str]:
        yield "link set lo up"
        for interface in self.interfaces:
            yield f"link set {interface} up"
            if ipv4:
                yield f"addr add {self.ipv4(node, interface)}/24 dev {interface}"
            if ipv6:
                yield f"addr add {self.ipv6(node, interface)}/64 dev {interface} nodad"


def _batch(lines: Iterable[str], namespace: str = "") -> None:
    _run("ip", *(["-n", namespace] if namespace else []), "-batch", "-", text="\n".join(lines) + "\n")


def _bytecode(port: int | None) -> str:
    """A classic BPF program over an Ethernet frame: TCP for `port` (None: any) is dropped. IPv4 options are not met."""
    other = 1 if port is not None else 0  # where a port that is another one leads to: past the drop, or to it
    program = (
        "40 0 0 12",  # EtherType
        "21 0 4 2048",  # IPv4: go on, else to A
        "48 0 0 23",  # protocol
        f"21 0 8 {socket.IPPROTO_TCP}",
        "40 0 0 36",  # destination port
        f"21 5 {5 + other} {port or 0}",
        "21 0 5 34525",  # A: IPv6
        "48 0 0 20",
        f"21 0 3 {socket.IPPROTO_TCP}",
        "40 0 0 56",
        f"21 0 {other} {port or 0}",
        _DROP,
        _PASS,
    )
    return ",".join((str(len(program)), *program))
