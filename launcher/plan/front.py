"""The front of a launch: where it listens, who may speak to it, and the sockets inside the run directory."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from launcher.config import LaunchConfig
from launcher.errors import HostError, UsageError

SOCKET_PATH_BYTES = 107
"""What a Unix socket's address holds, without its closing NUL."""
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104
"""Addresses to listen at → one to connect to."""


class HttpBinding(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor binds and hands to the API servers. With `uds`, host and port are not used."""

    host: str
    port: int
    """0: any free one; the plan's url then lacks it, see `url`."""
    uds: str | None = None
    tls: bool = False

    def url(self, port: int | None = None) -> str:
        """For people and clients on this machine; `port` is the one that was bound."""
        if self.uds:
            return f"unix:{self.uds}"
        host = _EVERYWHERE.get(self.host, self.host)
        host = f"[{host}]" if ":" in host else host
        return f"http{'s' * self.tls}://{host}:{self.port if port is None else port}"


def choose_binding(config: LaunchConfig) -> HttpBinding:
    if config.uds is None:
        return HttpBinding(host=config.host, port=config.port, tls=bool(config.ssl_certfile))
    path = Path(config.uds).absolute()
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        raise UsageError(
            f"--uds {path} is {len(os.fsencode(path))} bytes long: a Unix socket's path holds {SOCKET_PATH_BYTES}"
        )
    if not path.parent.is_dir():
        raise UsageError(f"--uds {path}: there is no directory {path.parent}")
    return HttpBinding(host=config.host, port=config.port, uds=str(path), tls=bool(config.ssl_certfile))


def read_api_keys(config: LaunchConfig) -> tuple[str, ...]:
    """The keys that clients may use; none: everybody may. A file holds one a line, ``#`` starts a comment line."""
    if config.api_key is not None and config.api_key_file is not None:
        raise UsageError("--api-key and --api-key-file are both given: give one of them")
    if config.api_key is not None:
        if not config.api_key.strip():
            raise UsageError("--api-key is empty: give a key, or leave the flag out to let everybody in")
        return (config.api_key,)
    if config.api_key_file is None:
        return ()
    try:
        lines = [line.strip() for line in Path(config.api_key_file).expanduser().read_text().splitlines()]
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file {config.api_key_file} cannot be read: {_reason(error)}") from error
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise UsageError(f"--api-key-file {config.api_key_file} holds no key: write one a line")
    return keys


def check_tls(config: LaunchConfig) -> None:
    """Both files or none, and readable: a server that finds out later has loaded its weights for nothing."""
    given = {"--ssl-keyfile": config.ssl_keyfile, "--ssl-certfile": config.ssl_certfile}
    if not any(given.values()):
        return
    for flag, value in given.items():
        if not value:
            raise UsageError(f"{flag} is missing: TLS needs both --ssl-keyfile and --ssl-certfile")
        try:
            Path(value).read_bytes()
        except OSError as error:
            raise UsageError(f"{flag} {value} cannot be read: {_reason(error)}") from error


def engine_address(run_dir: Path, dp: int) -> str:
    """Where an engine core listens for API servers."""
    return _ipc(run_dir / f"core{dp}.sock")


def _ipc(path: Path) -> str:
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_BYTES:
        raise HostError(
            f"run directory {path.parent} is too long: {path.name} in it has {length} bytes, a Unix socket's path holds"
            f" {SOCKET_PATH_BYTES}; set XDG_RUNTIME_DIR to a shorter directory"
        )
    return f"ipc://{path}"


def agent_address(run_dir: Path) -> str:
    """Where node 0's agent listens for the engine core."""
    return _ipc(run_dir / "agent.sock")


def rendezvous(run_dir: Path, launch_id: str, dp: int, generation: int) -> str:
    """Where the ranks of one engine core meet. Each life meets in a file of its own: a store that a dead group left
    would tell the next one lies."""
    return (run_dir.absolute() / f"rendezvous-{launch_id}-{dp}-{generation}").as_uri()


def rendezvous_of_generation(address: str, generation: int) -> str:
    """The address of another life of the same engine core."""
    return f"{address.rpartition('-')[0]}-{generation}" if address else ""


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "there is no home directory for ~"
