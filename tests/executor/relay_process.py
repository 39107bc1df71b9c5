"""A node without an agent, for tests: workers and a relay. ``python -m tests.executor.relay_process NODE SPECS``.

Reads one line from its standard input, an `OpenGroup` in hexadecimal; ends as the relay ends, with a word on how.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from launcher.clock import Deadline
from launcher.config import NodeSettings
from launcher.errors import ChildFailedError, NodeLostError
from launcher.executor.data_link import NodeLink
from launcher.executor.local_group import LocalGroup
from launcher.executor.relay import GroupEnded, Relay
from launcher.nodes.messages import Hello, OpenGroup
from launcher.nodes.secure import Security
from launcher.process.spec import ProcessSpec
from launcher.worker.rpc import GroupPlace


def main() -> None:
    node, specs, settings = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    nodes = msgspec.msgpack.decode(settings.read_bytes(), type=NodeSettings)
    children = msgspec.msgpack.decode(specs.read_bytes(), type=tuple[ProcessSpec, ...])
    group = LocalGroup(children, "spawn", ring_bytes=1 << 20)
    relay = None
    try:
        print("pids", *(child.pid for child in group.children), flush=True)
        word = msgspec.msgpack.decode(bytes.fromhex(sys.stdin.readline()), type=OpenGroup)
        hello = Hello(word.token, word.generation, node)
        relay = Relay(group, NodeLink(word.endpoint, Security.of(nodes), hello), node=node, host="far.example")
        group.hand_over_group(GroupPlace("tcp://127.0.0.1:1", word.generation, {"GLOO_SOCKET_IFNAME": "lo"}))
        while True:
            relay.pump()
            relay.wait(Deadline.after(None))
    except GroupEnded as ended:
        print("ended", "orderly" if ended.end.orderly else "failed", ended.end.reason, flush=True)
    except (ChildFailedError, NodeLostError) as error:
        print(type(error).__name__, error, flush=True)
    finally:
        if relay is not None:
            relay.close()
        group.stop(1)


if __name__ == "__main__":
    main()
