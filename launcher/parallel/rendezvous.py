"""From the rendezvous URL that a worker is handed to the store its groups meet at. Never env://.

``file:///run/…/rendezvous-3``: one machine; the file must not exist before this start (its maker, the plan or the
engine core, gives each life of the group a name of its own, and removes it with the run directory).

``tcp://host:port[/prefix][?fd=N]``: several machines. IPv6 addresses in brackets, a zone behind ``%25``. Rank 0 serves
the store: on descriptor N, a listening socket that it was handed, or else on a socket of its own at that port. Each
life of the group has a prefix of its own, for a client that is late may reach the next life's store.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from launcher.errors import HostError, UsageError


class Rendezvous(NamedTuple):
    """A parsed URL: either `path`, or the rest."""

    path: Path | None = None
    host: str = ""
    """A name or a literal, without brackets, a zone behind ``%``."""
    port: int = 0
    prefix: str = ""
    listening: int | None = None
    """A descriptor of this process; it stays its owner's."""


def parse(url: str) -> Rendezvous:
    """Raises UsageError on anything but ``file:///path`` and ``tcp://host:port[/prefix][?fd=N]``."""
    parts = urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return Rendezvous(path=Path(unquote(parts.path)))
    if parts.scheme == "tcp":
        try:
            port = parts.port
            query = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
            listening = int(query.pop("fd")) if "fd" in query else None
        except ValueError:
            port, query, listening = None, {}, None
        # Not `parts.hostname`, which writes all in lower case: a zone is an interface's name.
        host = unquote(parts.netloc.rpartition(":")[0]).removeprefix("[").removesuffix("]")
        if host and port and not query and "@" not in host:
            return Rendezvous(host=host, port=port, prefix=parts.path.strip("/"), listening=listening)
    raise UsageError(f"rendezvous {url!r} is neither file:///absolute/path nor tcp://host:port")


def open_store(url: str, *, rank: int, world_size: int, timeout: float) -> Store:
    """The store behind `url`, for `world_size` ranks; reads and writes in it fail after `timeout` seconds.

    Raises UsageError (the URL), HostError (the place it names cannot be used).
    """
    where = parse(url)
    limit = timedelta(seconds=timeout)
    try:
        if where.path is not None:
            where.path.parent.stat()
            store: Store = FileStore(str(where.path), world_size)
            store.set_timeout(limit)
            return store
        return _open_tcp(where, rank, world_size, limit)
    except (OSError, RuntimeError) as error:
        raise HostError(f"rendezvous {url} cannot be used by rank {rank}: {str(error).splitlines()[0]}") from error


def _open_tcp(where: Rendezvous, rank: int, world_size: int, limit: timedelta) -> Store:
    # The store closes what it is given. Who waits for whom is for the collectives: the store waits for nobody.
    mine = os.dup(where.listening) if rank == 0 and where.listening is not None else None
    store: Store = TCPStore(
        where.host,
        where.port,
        world_size,
        is_master=rank == 0,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=mine,
    )
    return PrefixStore(where.prefix, store) if where.prefix else store
