"""``--config FILE.toml|yaml``: flags written into a file. Keys are the flags' long names.

    model = "./SmolLM2"              # any spelling that the command line knows, underscores or dashes
    tp = 3
    device-ids = [2, 3, 5]           # lists and tables as the format has them
    [worker-config]
    step_ms = 5

Each value goes through the same check as the flag's own text, and an error names the file and the key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.cli.argv import did_you_mean
from launcher.cli.flags import Flag
from launcher.errors import UsageError

Texts = list[str]


def read_config(path: str, flags: Sequence[Flag]) -> dict[str, tuple[str, Texts]]:
    """Flag's field → (key as it is written in the file, texts). Raises `UsageError`."""
    known = {spelling.lstrip("-"): flag for flag in flags for spelling in flag.spellings if spelling.startswith("--")}
    found: dict[str, tuple[str, Texts]] = {}
    for key, value in _load(path).items():
        flag = known.get(str(key).replace("_", "-"))
        if flag is None or flag.field == "config":
            hint = did_you_mean(str(key).replace("_", "-"), known)
            raise UsageError(f"--config {path}: unknown key {str(key)!r}{hint} (keys are the flags of xserve launch)")
        if flag.field in found:
            raise UsageError(f"--config {path}: {found[flag.field][0]} and {key} are one setting: give one of them")
        found[flag.field] = str(key), _texts(path, str(key), value, flag)
    return found


def _load(path: str) -> dict[Any, Any]:
    try:
        data = Path(path).expanduser().read_bytes()
    except (OSError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else "there is no home directory for ~"
        raise UsageError(f"--config {path} cannot be read ({why}): give a .toml or .yaml file") from None
    suffix = Path(path).suffix.lower()
    if suffix == ".toml":
        try:
            return tomllib.loads(data.decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"--config {path} is no TOML: {_one_line(error)}") from None
    if suffix not in (".yaml", ".yml"):
        raise UsageError(f"--config {path}: the name has to end in .toml, .yaml or .yml")
    loaded = _load_yaml(path, data)
    if not isinstance(loaded, dict):
        raise UsageError(f"--config {path} holds a {type(loaded).__name__}: write one key: value a line")
    return loaded


def _load_yaml(path: str, data: bytes) -> Any:
    import msgspec

    try:
        return msgspec.yaml.decode(data) or {}
    except ImportError:
        raise UsageError(f"--config {path}: reading YAML needs a package: pip install pyyaml, or write TOML") from None
    except Exception as error:
        # The parser's own classes are not imported for this one line.
        raise UsageError(f"--config {path} is no YAML: {_one_line(error)}") from None


def _texts(path: str, key: str, value: Any, flag: Flag) -> Texts:
    """The value as the command line would have it."""
    if flag.kind == "repeated":
        if isinstance(value, dict):
            return [f"{name}={_scalar(path, key, one)}" for name, one in value.items()]
        return [_scalar(path, key, one) for one in (value if isinstance(value, list) else [value])]
    if isinstance(value, list) and flag.joint:
        return [flag.joint.join(_scalar(path, key, one) for one in value)]
    return [_scalar(path, key, value)]


def _scalar(path: str, key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise UsageError(f"--config {path}: {key} is a {type(value).__name__}: give one value")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
