"""Where each setting comes from: flag > XSERVE_<FLAG> > --config file > default."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from launcher import envs
from launcher.cli import values
from launcher.cli.config_file import read_config
from launcher.cli.flags import CONFIG, Flag
from launcher.errors import UsageError

Given = Mapping[str, str | list[str] | bool | None]
"""A flag's field → its text (a list for a repeated one, True for a switch); None when it is not on the command line."""


class Strength(IntEnum):
    FILE = 1
    VARIABLE = 2
    FLAG = 3


class Source(NamedTuple):
    """Where a value came from, and its texts."""

    strength: Strength
    name: str
    """For people: ``--tp``, ``XSERVE_TP``, ``chat.toml: tp``."""
    texts: list[str]


def find_sources(flags: Sequence[Flag], given: Given) -> dict[str, Source]:
    """Field → source, for every flag that anybody has given."""
    found: dict[str, Source] = {}
    if (path := read_flag(CONFIG, given.get(CONFIG.field))) is not None:
        for field, (key, texts) in read_config(path, flags).items():
            found[field] = Source(Strength.FILE, f"{path}: {key}", texts)
    for flag in flags:
        source = find_source(flag, given.get(flag.field))
        if source is not None:
            found[flag.field] = source
    found.pop(CONFIG.field, None)
    return found


def find_source(flag: Flag, given: str | list[str] | bool | None) -> Source | None:
    """From the command line, else the environment."""
    if given is not None and given is not False and given != []:
        texts = given if isinstance(given, list) else ["true" if given is True else given]
        return Source(Strength.FLAG, flag.name, texts)
    value = envs.flag_from_environment(flag.field)
    if value is None:
        return None
    texts = value.split(",") if flag.kind == "repeated" else [value]
    return Source(Strength.VARIABLE, f"XSERVE_{flag.field.upper()}", texts)


def read_flag(flag: Flag, given: str | list[str] | bool | None) -> Any:
    """One flag's checked value: from the command line, else the environment, else None."""
    source = find_source(flag, given)
    return None if source is None else parse(flag, source)


def parse(flag: Flag, source: Source) -> Any:
    """The checked value. `UsageError` names the source, the text, and what to write instead."""
    parsed: list[Any] = []
    joint = {Strength.FLAG: " ", Strength.VARIABLE: "=", Strength.FILE: " = "}[source.strength]
    for text in source.texts:
        try:
            parsed.append(values.switch(text) if flag.kind == "switch" else flag.parse(text))
        except UsageError as error:
            shown = "***" if flag.parse is values.secret else shlex.quote(text)
            raise UsageError(f"{source.name}{joint}{shown} {error}") from None
    return dict(parsed) if flag.kind == "repeated" else parsed[-1]


def keep_the_stronger(sources: dict[str, Source], fields: Iterable[str]) -> None:
    """Of settings that exclude each other, drop those that a stronger source overrules; equals are an error."""
    present = sorted((f for f in fields if f in sources), key=lambda f: -sources[f].strength)
    for weaker in present[1:]:
        if sources[weaker].strength == sources[present[0]].strength:
            names = " and ".join(sources[f].name for f in fields if f in sources)
            raise UsageError(f"{names} exclude each other: give one of them")
        del sources[weaker]
