"""From the rendezvous URL that a worker is handed to the store its groups meet at. Never env://.

``file:///run/…/rendezvous-3``: one machine; the file must not exist before this start (its maker, the plan or the
engine core, gives each life of the group a name of its own, and removes it with the run directory).
``tcp://host:port``: rank 0 listens there; IPv6 addresses in brackets.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from launcher.errors import HostError, UsageError


class Rendezvous(NamedTuple):
    """A parsed URL: either `path`, or `host` and `port`."""

    path: Path | None = None
    host: str = ""
    port: int = 0


def parse(url: str) -> Rendezvous:
    """Raises UsageError on anything that is neither ``file:///path`` nor ``tcp://host:port``."""
    parts = urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return Rendezvous(path=Path(unquote(parts.path)))
    if parts.scheme == "tcp":
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if host and port:
            return Rendezvous(host=host, port=port)
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
        return TCPStore(where.host, where.port, world_size, is_master=rank == 0, timeout=limit)
    except (OSError, RuntimeError) as error:
        raise HostError(f"rendezvous {url} cannot be used by rank {rank}: {str(error).splitlines()[0]}") from error
