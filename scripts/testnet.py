"""Several hosts on this machine (network namespaces), to try a launch over several nodes by hand. As root.

    scripts/testnet up [--nodes 2] [--ipv6 | --ipv6-only] [--second]    make them, and show what to type
    scripts/testnet exec 1 -- COMMAND …                                 run it on node 1
    scripts/testnet cable 1 out | in                                    take node 1's cable out, put it back
    scripts/testnet drop 0 [29501] | admit 0                            a firewall on node 0, and none again
    scripts/testnet show                                                addresses, bytes sent, processes
    scripts/testnet down                                                remove all of it, processes included

``--name`` (default: lab) tells several such nets apart; it stands before the command: ``scripts/testnet --name b up``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from _testnet import NoNet, Testnet

from launcher.process import procfs

TRY = "--worker reference --tp 8 --nnodes 2"


def runtime_of(name: str, node: int) -> Path:
    """The node's XDG_RUNTIME_DIR: hosts do not share it, so instances of the same name do not meet in it."""
    return Path(f"/tmp/xs-{name}") / f"node{node}"


def up(name: str, options: argparse.Namespace) -> None:
    net = Testnet(
        options.nodes, name=name, ipv4=not options.ipv6_only, ipv6=options.ipv6 or options.ipv6_only,
        second=options.second,
    )  # fmt: skip
    master = net.ipv6(0) if options.ipv6_only else net.ipv4(0)
    given = f" --name {name}" if name != "lab" else ""
    print(f"{net.nodes} nodes are up; node 0 has {master}. A launch over two of them, each in a terminal of its own:\n")
    launch = f".venv/bin/xserve launch {TRY}"
    print(f"  scripts/testnet{given} exec 0 -- {launch} --node-rank 0 --master-addr {master}")
    print(f"  scripts/testnet{given} exec 1 -- {launch} --node-rank 1 --master-addr {master}\n")
    print("Then ask it, and see what a lost node does:\n")
    ask = """curl -H 'Content-Type: application/json' -d '{"model": "reference", "prompt": "hello", "max_tokens": 5}'"""
    print(f"  scripts/testnet{given} exec 0 -- {ask} http://127.0.0.1:8000/v1/completions")
    print(f"  scripts/testnet{given} cable 1 out")
    print(f"  scripts/testnet{given} down")


def execute(net: Testnet, name: str, node: int, command: list[str]) -> None:
    runtime = runtime_of(name, node)
    runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
    words = net.command(node, "env", f"XDG_RUNTIME_DIR={runtime}", *command)
    os.execvp(words[0], words)


def show(net: Testnet) -> None:
    for node in range(net.nodes):
        sent = ", ".join(f"{interface} {net.sent(node, interface):,}" for interface in net.interfaces)
        print(f"node{node}: {net.namespace(node)}; bytes sent: {sent}")
        print("\n".join(f"  {line}" for line in net.ip(node, "-br", "addr").splitlines()))
        for pid in net.pids(node):
            print(f"  {pid} {procfs.command_line(pid)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "testnet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default="lab", help="which net (default: lab)")
    verbs = parser.add_subparsers(dest="verb", required=True)
    make = verbs.add_parser("up", help="make the nodes")
    make.add_argument("--nodes", type=int, default=2)
    make.add_argument("--ipv6", action="store_true", help="IPv6 addresses too")
    make.add_argument("--ipv6-only", action="store_true", help="no IPv4 addresses")
    make.add_argument("--second", action="store_true", help="a second interface, eth1, on each node")
    run = verbs.add_parser("exec", help="run a command on a node")
    run.add_argument("node", type=int)
    run.add_argument("command", nargs=argparse.REMAINDER)
    cable = verbs.add_parser("cable", help="take a node's cable out, or put it back")
    cable.add_argument("node", type=int)
    cable.add_argument("place", choices=("out", "in"))
    drop = verbs.add_parser("drop", help="drop TCP that comes in for a port of a node, without a word")
    drop.add_argument("node", type=int)
    drop.add_argument("port", type=int, nargs="?", help="default: any")
    admit = verbs.add_parser("admit", help="drop nothing any more")
    admit.add_argument("node", type=int)
    verbs.add_parser("show", help="addresses, bytes sent, processes")
    verbs.add_parser("down", help="remove it all")
    return parser.parse_args()


def act(options: argparse.Namespace) -> None:
    name, verb = options.name, options.verb
    if verb == "up":
        up(name, options)
        return
    net = Testnet.attach(name)
    node = getattr(options, "node", 0)
    if not 0 <= node < net.nodes:
        raise NoNet(f"there is no node {node}: {name} has {net.nodes}")
    if verb == "exec":
        execute(net, name, node, options.command[1:] if options.command[:1] == ["--"] else options.command)
    elif verb == "cable":
        net.cable(node, there=options.place == "in")
    elif verb == "drop":
        net.drop(node, options.port)
    elif verb == "admit":
        net.admit(node)
    elif verb == "show":
        show(net)
    else:
        net.close()
        shutil.rmtree(runtime_of(name, 0).parent, ignore_errors=True)


def main() -> int:
    try:
        act(parse())
    except NoNet as error:
        print(f"testnet: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
