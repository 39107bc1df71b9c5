"""Who may speak on our network sockets: nobody without the cluster key, or (without a key) everybody.

From the one secret each node's CURVE key pair is derived by its rank. A server socket has node 0's pair; a client has
its own pair and knows the server's public key, which is as secret as the rest: who lacks the key fails at the first
word of the handshake. Behind that stands the `launcher.nodes.gate.Gate`, which lets in exactly the nodes' public keys.

Three facts of libzmq that this rests on (each has a test): a CURVE server without ZAP lets every client in that knows
its public key; with a ZAP domain but no handler it *still* does, unless ZMQ_ZAP_ENFORCE_DOMAIN is set; a handler is
asked once a connection, not once a message.
"""

from __future__ import annotations

import hashlib
from typing import Self

import zmq
from zmq.utils import z85

from launcher.config import NodeSettings
from launcher.errors import HostError

DOMAIN = b"xserve-nodes"
"""Of our requests to the gate; another domain is not ours to allow."""


class Security:
    """The keys of one node. Its repr holds none of them."""

    __slots__ = ("_keys", "nnodes", "node_rank")

    def __init__(self, secret: bytes, nnodes: int, node_rank: int) -> None:
        """`secret` empty: no keys. `HostError` if libzmq was built without CURVE."""
        self.nnodes = nnodes
        self.node_rank = node_rank
        if secret and not zmq.has("curve"):
            raise HostError(
                f"--cluster-key-file needs libzmq with CURVE, which this one ({zmq.zmq_version()}) has not: "
                "install pyzmq from a wheel, or build it with libsodium"
            )
        self._keys = [_pair(secret, rank) for rank in range(nnodes)] if secret else []

    @classmethod
    def of(cls, nodes: NodeSettings) -> Self:
        return cls(nodes.key, nodes.nnodes, nodes.node_rank)

    @property
    def is_open(self) -> bool:
        """No key: everybody who can reach the port may join."""
        return not self._keys

    def rank_of(self, public: bytes) -> int | None:
        """Whose public key (32 bytes, as ZAP carries it) this is; None: nobody's."""
        # Not a dict: its answer's time would depend on the bytes. There are few nodes, and one look a connection.
        for rank, (theirs, _) in enumerate(self._keys):
            if len(public) == 32 and public == z85.decode(theirs):
                return rank
        return None

    def server(self, socket: zmq.Socket[bytes]) -> None:
        """Before `bind`. With a key nobody gets in unless a `Gate` of the same context says so."""
        if self._keys:
            socket.curve_server = True
            _, socket.curve_secretkey = self._keys[0]
            socket.zap_domain = DOMAIN
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def client(self, socket: zmq.Socket[bytes]) -> None:
        """Before `connect`."""
        if self._keys:
            socket.curve_serverkey, _ = self._keys[0]
            socket.curve_publickey, socket.curve_secretkey = self._keys[self.node_rank]

    def as_stranger(self, socket: zmq.Socket[bytes]) -> None:
        """A client that has learned the server's public key, and has a random pair of its own: for the self-test."""
        socket.curve_serverkey, _ = self._keys[0]
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()

    def __repr__(self) -> str:
        return f"Security({'open' if self.is_open else 'CURVE'}, node {self.node_rank} of {self.nnodes})"


def _pair(secret: bytes, rank: int) -> tuple[bytes, bytes]:
    """Public and secret key of a node, in Z85 as ZMQ takes them. Every 32 bytes are a secret key (libsodium clamps)."""
    digest = hashlib.blake2b(f"node {rank}".encode(), key=secret, digest_size=32, person=b"xserve curve v1").digest()
    private = z85.encode(digest)
    return zmq.curve_public(private), private
