"""`xserve`: the commands, and the one place where a command line begins and ends.

argv → `argv.normalise` (spellings) → a command → exit code; an error anywhere → `report`. typer, made from the same
table of flags, writes the help and has the last word on what `normalise` let through; it is imported for that alone: a
launch starts its first process 0.15 s of CPU sooner without it. Nothing heavy is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from launcher.cli.argv import normalise
from launcher.cli.flags import COMMANDS, HELP, Flag
from launcher.cli.report import report
from launcher.errors import UsageError

if TYPE_CHECKING:
    import inspect

    import typer

Command = Callable[[dict[str, Any]], int]
_FOOTER = "Each flag can also be set as XSERVE_<FLAG>, for example XSERVE_MAX_NUM_SEQS=32; the command line wins."
_commands: dict[str, tuple[Command, str | None]] = {}
"""Name → (function, what stands below its help)."""


def command(name: str, epilog: str | None = None) -> Callable[[Command], Command]:
    """Register a command whose parameters come from the table of flags, all as text."""

    def register(function: Command) -> Command:
        _commands[name] = function, epilog
        return function

    return register


@command("launch", epilog=_FOOTER)
def launch(given: dict[str, Any]) -> int:
    """Start a tree of processes and serve until it is told to stop."""
    from launcher.cli import launch as implementation

    return implementation.launch(given)


@command("plan", epilog=_FOOTER)
def plan(given: dict[str, Any]) -> int:
    """Show what a launch with the same flags would start, and start nothing."""
    from launcher.cli import launch as implementation

    return implementation.plan(given)


@command("doctor", epilog=_FOOTER)
def doctor(given: dict[str, Any]) -> int:
    """Check this machine, and a launch with the same flags: what stands in its way, and what mends it."""
    from launcher.cli import doctor as implementation

    return implementation.doctor(given)


@command("status")
def status(given: dict[str, Any]) -> int:
    """Show the state of a running instance and of each of its processes."""
    from launcher.cli import instance

    return instance.status(given)


@command("stop")
def stop(given: dict[str, Any]) -> int:
    """Stop a running instance in order, and wait until it is gone."""
    from launcher.cli import instance

    return instance.stop(given)


@command("keygen")
def keygen(given: dict[str, Any]) -> int:
    """Write a new key for --cluster-key-file, readable by you alone: copy it to every node."""
    from launcher.cli import keygen as implementation

    return implementation.keygen(given)


def run() -> None:
    """The `xserve` command."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code."""
    try:
        code = _run(normalise(arguments))
        if sys.stdout is not None:  # None: started with descriptor 1 closed
            sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        return report(error)
    return code


def _run(words: list[str]) -> int:
    if words[0] not in _commands or HELP.name in words:
        return _show_help(words)
    function, _ = _commands[words[0]]
    return function(_given(COMMANDS[words[0]], words[1:]))


def _given(flags: Sequence[Flag], words: Sequence[str]) -> dict[str, Any]:
    """Flag's field → text, a list of texts, or whether a switch is there: as typer would hand them over."""
    given: dict[str, Any] = {flag.field: False if flag.kind == "switch" else None for flag in flags}
    by_name = {flag.name: flag for flag in flags}
    for word in words:
        name, _, text = word.partition("=")
        flag = by_name[name]
        if flag.kind == "switch":
            given[flag.field] = True
        elif flag.kind == "repeated":
            given[flag.field] = [*(given[flag.field] or []), text]
        else:
            given[flag.field] = text
    return given


# --- help --------------------------------------------------------------------------------------------------------


def _show_help(words: list[str]) -> int:
    import typer

    try:
        _typer_app()(args=words, prog_name="xserve", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        # The class has moved between typer's versions; BadParameter is public, and every complaint has its base.
        complaint = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
        if not isinstance(error, complaint):
            raise
        raise UsageError(f"{error.format_message()}; see 'xserve --help'") from None  # type: ignore[attr-defined]
    return 0


def _typer_app() -> typer.Typer:
    import inspect

    import typer

    app = typer.Typer(
        name="xserve",
        help="Start and supervise the processes of a multi-GPU inference engine.",
        add_completion=False,
        rich_markup_mode=None,  # plain text: no rich at import, and help that can be grepped
        context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 120},
    )

    def version_or_nothing(
        version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    ) -> None:
        if version:
            from launcher import __version__

            typer.echo(f"xserve {__version__}")
            raise typer.Exit

    # Its annotation is text here, and would be looked up among this module's names.
    version_or_nothing.__annotations__ = {"version": bool, "return": None}
    app.callback(invoke_without_command=True)(version_or_nothing)
    for name, (function, epilog) in _commands.items():
        parameters = [_parameter(flag) for flag in COMMANDS[name]]

        def run_command(**_: Any) -> None:
            """Never called: typer shows the help and leaves."""

        run_command.__doc__ = function.__doc__
        run_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run_command.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name, epilog=epilog)(run_command)
    return app


def _parameter(flag: Flag) -> inspect.Parameter:
    import inspect
    from typing import Optional

    import typer

    kinds: dict[str, Any] = {"value": Optional[str], "repeated": Optional[list[str]], "switch": bool}  # noqa: UP045
    text = f"{flag.help} [default: {flag.default}]" if flag.default else flag.help
    # The other spellings are shown here, and understood by `argv`.
    option = typer.Option(
        False if flag.kind == "switch" else None,
        *flag.spellings,
        metavar=flag.metavar or None,
        help=text,
        show_default=False,
    )
    return inspect.Parameter(flag.field, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kinds[flag.kind])
