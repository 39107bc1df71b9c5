"""Errors → what the user reads, and exit codes. The only place that does so.

A failed launch is printed from the least to the most important, since a terminal shows the end: follow-ons in a line
each, one traceback, the dead process's last output, then the headline and what to do.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from typing import TextIO

from launcher.errors import BEING_STOPPED, ChildFailedError, Failure, RemoteError, XserveError, describe
from launcher.logs import SECRETS

BROKEN_PIPE = 128 + signal.SIGPIPE
INTERRUPTED = 128 + signal.SIGINT
BUG = 1


def report(error: BaseException, stream: TextIO | None = None) -> int:
    """Print what `error` means to the user on stderr; the exit code."""
    if isinstance(error, BrokenPipeError):
        # Whoever read our output is gone (`xserve plan | head`). Closing stdout at exit must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return BROKEN_PIPE
    text, code = _text_and_code(error)
    stream = stream or sys.stderr
    if text and stream is not None:  # None: started with descriptor 2 closed
        try:
            stream.write(SECRETS.text(text) + "\n")
            stream.flush()
        except OSError:
            pass  # nobody reads it any more; the exit code still says it
    return code


def _text_and_code(error: BaseException) -> tuple[str, int]:
    if isinstance(error, KeyboardInterrupt):
        return "xserve: interrupted", INTERRUPTED
    if isinstance(error, ChildFailedError):
        return failure_text(error.cause, error.follow_ons), error.exit_code
    if isinstance(error, RemoteError):
        return f"{error.remote_traceback.rstrip()}\n\nxserve: {error.headline}", error.exit_code
    if isinstance(error, XserveError):
        return f"xserve: {one_line(str(error))}", error.exit_code
    story = "".join(traceback.format_exception(error)).rstrip()
    return f"{story}\n\nxserve: this is a bug in xserve: please report it with the lines above", BUG


def failure_text(cause: Failure, follow_ons: tuple[Failure, ...] = ()) -> str:
    """The whole story of a failed launch; the last lines say who failed, how, and what to do."""
    story = describe(cause)
    # Who has nothing of its own to tell is only named: the cause stands below.
    parts = [f"xserve: because of it: {one_line(describe(one).removesuffix(f': {story}'))}" for one in follow_ons]
    if cause.traceback and not (cause.permanent or cause.node_lost):  # these have their whole story in one line
        parts += ["", cause.traceback.rstrip()]
    if cause.kind in ("died", "timeout") and cause.last_output:
        parts += ["", f"last output of {cause.title}:", *(f"  {line}" for line in cause.last_output)]
    if parts:
        parts.append("")
    parts.append(f"xserve: {one_line(story)}")
    advice = advise(cause)
    if advice:
        parts.append(f"xserve: {advice}")
    return "\n".join(parts)


def advise(cause: Failure) -> str:
    """What to do about it; empty when the headline says all that is known."""
    if cause.node_lost and cause.headline.endswith(BEING_STOPPED):
        return "somebody stopped xserve on that node; start it there again, with the same command"
    if cause.node_lost:
        return (
            "look at that node: whether it is up, what its own log ends with, and whether a firewall stands between"
            " (xserve plan prints a rule)"
        )
    if cause.kind == "timeout":
        flag = "--watchdog-timeout" if "--watchdog-timeout" in cause.headline else "--ready-timeout"
        return f"if it is slow and not stuck, give it more time with {flag}"
    if cause.kind == "raised":
        return ""
    if cause.kind == "peer_lost":
        return "the process at the other end was lost: its own failure should stand above"
    if "out of memory" in cause.headline:
        return "give it less to hold: a smaller --kv-cache-memory, a shorter --max-model-len, or more memory"
    if cause.signal == signal.SIGKILL:
        return "somebody killed it: by hand, or the kernel when memory ran out (look for 'oom' in: dmesg)"
    if cause.signal is not None:
        return "it crashed in native code: where, its last output above says"
    return "it left without a word: its last output stands above, if there was any"


def one_line(text: str) -> str:
    """Line breaks become ``; ``: a message of ours is one line even when it quotes somebody else's."""
    return "; ".join(part.strip() for part in text.splitlines() if part.strip())
