"""Spellings, and every kind of mistake in one line."""

from __future__ import annotations

import pytest

from launcher.cli.argv import normalise
from launcher.cli.flags import COMMANDS, LATER
from launcher.errors import UsageError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["launch"], ["launch"]),
        (["--help"], ["--help"]),
        (["-h"], ["--help"]),
        (["--version"], ["--version"]),
        (["launch", "-h"], ["launch", "--help"]),
        (["launch", "-tp", "4"], ["launch", "--tp=4"]),
        (["launch", "-tp=4"], ["launch", "--tp=4"]),
        (["launch", "--tensor_parallel_size", "4"], ["launch", "--tp=4"]),
        (["launch", "--tp_size=4"], ["launch", "--tp=4"]),
        (["launch", "--distributed-executor-backend", "mp"], ["launch", "--backend=mp"]),
        (["launch", "--max_num_seqs", "8", "--tp", "2"], ["launch", "--max-num-seqs=8", "--tp=2"]),
        (["launch", "--seed", "-1"], ["launch", "--seed=-1"]),
        (["launch", "--api-key", "-x"], ["launch", "--api-key=-x"]),
        (["launch", "--api-key", "a=b_c"], ["launch", "--api-key=a=b_c"]),
        (
            ["launch", "--worker-config", "a=1", "--worker_config=b=2"],
            ["launch", "--worker-config=a=1", "--worker-config=b=2"],
        ),
        (["status", "--json", "--name", "x"], ["status", "--json", "--name=x"]),
        (["launch", "-n", "2", "-r", "1"], ["launch", "--nnodes=2", "--node-rank=1"]),
        (["launch", "-n=2", "--node_rank", "1"], ["launch", "--nnodes=2", "--node-rank=1"]),
        (["keygen", "a.key"], ["keygen", "--file=a.key"]),
    ],
)
def test_every_spelling_becomes_one(given: list[str], expected: list[str]) -> None:
    assert normalise(given) == expected


@pytest.mark.parametrize("command", list(COMMANDS))
def test_each_flag_is_known_by_each_of_its_spellings(command: str) -> None:
    for flag in COMMANDS[command]:
        for spelling in flag.spellings:
            tail = [] if flag.kind == "switch" else ["v"]
            assert normalise([command, spelling, *tail]) == [command, flag.name if not tail else f"{flag.name}=v"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "no command given: say one of launch, plan, doctor, status, stop, keygen"),
        (["lauch"], "unknown command 'lauch': did you mean launch?"),
        (["x"], "unknown command 'x' ("),
        (["--verzion"], "unknown flag --verzion: did you mean --version?"),
        (["launch", "--tensor-paralel-size", "2"], "did you mean --tensor-parallel-size?"),
        (["launch", "--max_num_seq", "2"], "unknown flag --max_num_seq: did you mean --max-num-seqs?"),
        (["launch", "--tensor"], "did you mean --tensor-parallel-size?"),
        (["launch", "--xyzzy", "2"], "unknown flag --xyzzy ("),
        (["launch", "-t", "2"], "unknown flag -t"),
        (["launch", "--a\nb"], r"unknown flag '--a\nb'"),
        (["launch", "--tp"], "--tp needs a value: write for example --tp 4"),
        (["launch", "--tp", "--port", "1"], "--tp needs a value"),
        (["launch", "4"], "launch: unexpected '4'"),
        (["keygen", "a", "b"], "keygen: unexpected 'b'"),
        (["launch", "--"], "launch: unexpected '--'"),
        (["status", "--json=1"], "--json takes no value"),
        (["status", "--tp", "1"], "unknown flag --tp"),
        *[(["launch", flag, "2"], f"{flag} is not in this version yet") for flag in sorted(LATER)],
    ],
)
def test_mistakes(given: list[str], words: str) -> None:
    with pytest.raises(UsageError) as error:
        normalise(given)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_no_flag_is_both_here_and_later() -> None:
    here = {spelling for flags in COMMANDS.values() for flag in flags for spelling in flag.spellings}
    assert not here & LATER
