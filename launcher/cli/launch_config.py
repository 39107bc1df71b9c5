"""Flag > XSERVE_<FLAG> > default, checked: the `LaunchConfig` of a command line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import msgspec

from launcher import envs
from launcher.cli import values
from launcher.cli.flags import LAUNCH, Flag
from launcher.config import LaunchConfig
from launcher.errors import UsageError
from launcher.logs import SECRETS

Given = Mapping[str, str | list[str] | None]


def launch_config(given: Given) -> LaunchConfig:
    """`given`: a flag's field → its text (a list for a repeated one), None when it is not on the command line.

    API keys are made known to the redactor here, before anything is printed. Raises `UsageError`.
    """
    sources = _sources(given)
    _check_together(sources)
    found = {flag.field: _value(flag, *sources[flag.field]) for flag in LAUNCH if flag.field in sources}
    for key in _keys(found):
        SECRETS.add(key)
    _check_certificate(found)
    return msgspec.convert(found, LaunchConfig, strict=True)


def read_flag(flag: Flag, text: str | None) -> Any:
    """One flag's checked value: from the command line, else the environment, else None."""
    source = _source(flag, text)
    return None if source is None else _value(flag, *source)


def _sources(given: Given) -> dict[str, tuple[str, list[str]]]:
    """field → (what to call the source in a message, its texts)."""
    found = {}
    for flag in LAUNCH:
        source = _source(flag, given.get(flag.field))
        if source is not None:
            found[flag.field] = source
    return found


def _source(flag: Flag, text: str | list[str] | None) -> tuple[str, list[str]] | None:
    if text:
        return flag.name, text if isinstance(text, list) else [text]
    if text == "":
        return flag.name, [""]
    value = envs.flag_from_environment(flag.field)
    if value is None:
        return None
    variable = f"XSERVE_{flag.field.upper()}"
    return variable, value.split(",") if flag.kind == "repeated" else [value]


def _value(flag: Flag, source: str, texts: list[str]) -> Any:
    parsed = []
    for text in texts:
        try:
            parsed.append(flag.parse(text))
        except UsageError as error:
            joint = "=" if source.startswith("XSERVE_") else " "
            shown = "***" if flag.parse is values.secret else shlex.quote(text)
            raise UsageError(f"{source}{joint}{shown} {error}") from None
    return dict(parsed) if flag.kind == "repeated" else parsed[-1]


def _check_together(sources: dict[str, tuple[str, list[str]]]) -> None:
    """Drops an environment variable that a flag excludes; two equally strong ones are an error."""
    pair = ("api_key", "api_key_file")
    if all(field in sources for field in pair):
        names = [sources[field][0] for field in pair]
        from_environment = [name.startswith("XSERVE_") for name in names]
        if from_environment[0] == from_environment[1]:
            raise UsageError(f"{names[0]} and {names[1]} exclude each other: give one of them")
        del sources[pair[from_environment.index(True)]]
    for one, other in (("ssl_keyfile", "ssl_certfile"), ("ssl_certfile", "ssl_keyfile")):
        if one in sources and other not in sources:
            missing = f"--{other.replace('_', '-')}"
            raise UsageError(f"{sources[one][0]} is given without {missing}: HTTPS needs both")


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
