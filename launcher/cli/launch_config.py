"""The `LaunchConfig` of a command line, with where each of its settings came from (`sources`)."""

from __future__ import annotations

from typing import Any

import msgspec

from launcher.cli import values
from launcher.cli.flags import LAUNCH
from launcher.cli.sources import Given, Source, find_sources, keep_the_stronger, parse, read_flag
from launcher.config import LaunchConfig
from launcher.errors import UsageError
from launcher.logs import SECRETS

_DIST_INIT_ADDR = next(flag for flag in LAUNCH if flag.field == "dist_init_addr")

__all__ = ["launch_config", "read_flag"]


def launch_config(given: Given) -> LaunchConfig:
    """`given`: see `launcher.cli.sources`.

    API keys are made known to the redactor here, before anything is printed. Raises `UsageError`.
    """
    sources = find_sources(LAUNCH, given)
    _split_master(sources)
    _check_together(sources)
    found = {flag.field: parse(flag, sources[flag.field]) for flag in LAUNCH if flag.field in sources}
    for key in _keys(found):
        SECRETS.add(key)
    _check_certificate(found)
    origins = {field: source.name for field, source in sources.items()}
    return msgspec.convert(found | {"origins": origins}, LaunchConfig, strict=True)


def _split_master(sources: dict[str, Source]) -> None:
    """--dist-init-addr is --master-addr and --master-port, from where it came."""
    both = sources.pop("dist_init_addr", None)
    if both is None:
        return
    host, port = parse(_DIST_INIT_ADDR, both)
    for field, text in (("master_addr", host), ("master_port", str(port))):
        other = sources.get(field)
        if other is not None and other.strength == both.strength:
            raise UsageError(f"{both.name} and {other.name} exclude each other: give one of them")
        if other is None or other.strength < both.strength:
            sources[field] = both._replace(texts=[text])


def _check_together(sources: dict[str, Source]) -> None:
    keep_the_stronger(sources, ("api_key", "api_key_file"))
    for one, other in (("ssl_keyfile", "ssl_certfile"), ("ssl_certfile", "ssl_keyfile")):
        if one in sources and other not in sources:
            missing = f"--{other.replace('_', '-')}"
            raise UsageError(f"{sources[one].name} is given without {missing}: HTTPS needs both")


def _check_certificate(found: dict[str, Any]) -> None:
    key, chain = found.get("ssl_keyfile"), found.get("ssl_certfile")
    if not key or not chain:
        return
    import ssl

    try:
        # An empty pass phrase, since an encrypted key would make OpenSSL ask for one on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise UsageError(
            f"--ssl-certfile {chain} and --ssl-keyfile {key} do not work together ({why}): "
            "give a PEM certificate and its unencrypted private key"
        ) from None


def _keys(found: dict[str, Any]) -> tuple[str, ...]:
    if found.get("api_key"):
        return (found["api_key"],)
    return values.read_keys(found["api_key_file"]) if found.get("api_key_file") else ()
