"""`xserve`: the commands, and the one place where a command line begins and ends.

argv → `argv.normalise` (spellings) → typer (help, dispatch) → a command → exit code; an error anywhere → `report`.
Nothing heavy is imported here: `xserve --help` must come at once.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, Optional

import typer

from launcher import __version__
from launcher.cli.argv import normalise
from launcher.cli.flags import COMMANDS, Flag
from launcher.cli.report import report
from launcher.errors import UsageError

_FOOTER = "Each flag can also be set as XSERVE_<FLAG>, for example XSERVE_MAX_NUM_SEQS=32; the command line wins."

app = typer.Typer(
    name="xserve",
    help="Start and supervise the processes of a multi-GPU inference engine.",
    add_completion=False,
    rich_markup_mode=None,  # plain text: no rich at import, and help that can be grepped
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 120},
)


def command(name: str, **settings: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register a command whose parameters come from the table of flags, all as text."""

    def register(function: Callable[..., int]) -> Callable[..., int]:
        # typer gets the command as a value and `main` runs it: within typer, its own handling of KeyboardInterrupt and
        # broken pipes would come before ours.
        def run_command(**given: Any) -> Callable[[], int]:
            return lambda: function(given)

        parameters = [_parameter(flag) for flag in COMMANDS[name]]
        run_command.__doc__ = function.__doc__
        run_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run_command.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name, **settings)(run_command)
        return function

    return register


def _parameter(flag: Flag) -> inspect.Parameter:
    kinds: dict[str, Any] = {"value": Optional[str], "repeated": Optional[list[str]], "switch": bool}  # noqa: UP045
    text = f"{flag.help} [default: {flag.default}]" if flag.default else flag.help
    # The other spellings are shown, and understood by `argv`; typer itself sees the first only.
    option = typer.Option(
        False if flag.kind == "switch" else None,
        *flag.spellings,
        metavar=flag.metavar or None,
        help=text,
        show_default=False,
    )
    return inspect.Parameter(flag.field, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kinds[flag.kind])


@app.callback(invoke_without_command=True)
def _main(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        typer.echo(f"xserve {__version__}")
        raise typer.Exit


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


def run() -> None:
    """The `xserve` command."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code."""
    try:
        chosen = app(args=normalise(arguments), prog_name="xserve", standalone_mode=False)
        code: int = chosen() if callable(chosen) else 0  # not callable: --help or --version, done already
        if sys.stdout is not None:  # None: started with descriptor 1 closed
            sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        return report(_translated(error))
    return code


def _translated(error: BaseException) -> BaseException:
    """typer's own complaints as ours. `argv` has seen to nearly all of them before."""
    # The class has moved between typer's versions; BadParameter is public, and every complaint has its base.
    complaint = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
    if isinstance(error, complaint):
        return UsageError(f"{error.format_message()}; see 'xserve --help'")  # type: ignore[attr-defined]
    return KeyboardInterrupt() if isinstance(error, typer.Abort) else error
