"""The command line before typer sees it: every spelling of a flag becomes ``--name=value``.

The parser below typer reads ``-tp 4`` as ``-t -p 4``, knows no underscores, and answers mistakes in several lines. Here
each mistake is one `UsageError`. Pure: a list in, a list out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.cli.flags import COMMANDS, HELP, LATER, VERSION, Flag
from launcher.errors import UsageError


def normalise(arguments: Sequence[str], commands: Mapping[str, Sequence[Flag]] = COMMANDS) -> list[str]:
    """The command, then each flag in its one spelling, with its value behind ``=``."""
    if not arguments:
        raise UsageError(f"no command given: say one of {', '.join(commands)}, or --help")
    first, rest = arguments[0], list(arguments[1:])
    if first.startswith("-"):
        flag = _look_up(_by_spelling((HELP, VERSION)), first, "")
        return [flag.name]
    if first not in commands:
        raise UsageError(f"unknown command {first!r}{did_you_mean(first, commands)} ('xserve --help' lists them)")
    return [first, *_flags(first, rest, _by_spelling((*commands[first], HELP)))]


def _flags(command: str, arguments: list[str], known: Mapping[str, Flag]) -> list[str]:
    result = []
    position = 0
    words = [flag for flag in dict.fromkeys(known.values()) if flag.positional]
    while position < len(arguments):
        token = arguments[position]
        position += 1
        if words and not token.startswith("-"):
            result.append(f"{words.pop(0).name}={token}")
            continue
        if not token.startswith("-") or token in ("-", "--"):
            raise UsageError(f"{command}: unexpected {token!r}: everything is given by flags, such as --tp 4")
        spelling, equals, value = token.partition("=")
        flag = _look_up(known, spelling, command)
        if flag.kind == "switch":
            if equals:
                raise UsageError(f"{spelling} takes no value: leave out {equals + value!r}")
            result.append(flag.name)
            continue
        if not equals:
            if position >= len(arguments) or _canonical(arguments[position].partition("=")[0]) in known:
                example = f": write for example {spelling} {flag.example}" if flag.example else f" ({flag.metavar})"
                raise UsageError(f"{spelling} needs a value{example}")
            value = arguments[position]
            position += 1
        result.append(f"{flag.name}={value}")
    return result


def _look_up(known: Mapping[str, Flag], spelling: str, command: str) -> Flag:
    flag = known.get(_canonical(spelling))
    if flag is not None:
        return flag
    where = f"xserve {command} --help".replace("  ", " ")
    if _canonical(spelling) in LATER:
        raise UsageError(f"{spelling} is not in this version yet ('{where}' lists what is)")
    shown = spelling if spelling.isprintable() else repr(spelling)
    raise UsageError(f"unknown flag {shown}{did_you_mean(_canonical(spelling), known)} ('{where}' lists them)")


def did_you_mean(wrong: str, known: Mapping[str, object]) -> str:
    """``: did you mean --tp?``, or nothing."""
    from difflib import get_close_matches

    longer = [name for name in known if name.startswith(wrong) and len(wrong) > 3]
    near = get_close_matches(wrong, known, n=1, cutoff=0.6)
    close = get_close_matches(wrong, known, n=1, cutoff=0.8) or longer[:1] or near
    return f": did you mean {close[0]}?" if close else ""


def _canonical(spelling: str) -> str:
    return spelling.replace("_", "-") if spelling.startswith("--") else spelling


def _by_spelling(flags: Sequence[Flag]) -> dict[str, Flag]:
    return {spelling: flag for flag in flags for spelling in flag.spellings}
