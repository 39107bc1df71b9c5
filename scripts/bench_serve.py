"""Tokens per second and time to first token: `mp` and `uni` against transformers, on one model, in one run.

    scripts/bench_serve [--quick] [--json] [--out FILE] [--model DIR] [--threads N] [--repeat N]

Contenders, each in a process of its own, all with the same number of OMP threads and the same weights in fp32:

    mp          `launcher.Engine(tp=1, backend="mp")`: the worker is a child of its own behind the queues
    uni         `launcher.Engine(tp=1, backend="uni")`: the worker in the engine's process
    generate    transformers' `generate` on one batch, padded to the longest prompt
    continuous  transformers' continuous batching: one manager, started once, with room for all requests

One contender computes at a time, the others wait for a line on a pipe, which takes no CPU. Repetitions are interleaved
and begin with another contender each time. Each repetition has prompts of its own, of different lengths, the same for
everyone (nothing can be found in a prefix cache). All answers have the same length, which suits `generate` best: what
continuous batching gains when short answers leave the batch does not show here. Ours make text of the tokens as they
come, the others do not. A first round warms up and is not counted.

``--threads`` is OMP_NUM_THREADS by default, else half of the CPUs. With a thread on every CPU each barrier in a step
waits whenever anything else on the machine takes one of them, and the figures are those of the others' work.

Figures are medians over the repetitions; ratios are medians of each repetition's own ratio, so that a machine that is
busy for a while weighs on both sides.

    tokens_per_second       8 requests at once
    tokens_per_second_one   1 request
    first_token_s           time of an answer of one token, 1 request
    first_tokens_s          time until 8 requests that came at once have one token each
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench_contender import CONTENDERS, Prompts

from launcher import envs
from launcher.host import read_host
from launcher.models.demo import demo_directory, demo_model, is_whole

CONCURRENT = 8
QUICK_SECONDS = 50.0
"""No further repetition is begun that would end later than this after the start."""
GOALS = (
    ("mp over uni, tokens/s, 8 concurrent", "mp", "uni", 0.95),
    ("uni over transformers' continuous batching, tokens/s, 8 concurrent", "uni", "continuous", 1.0),
)
PACKAGES = ("xserve", "torch", "transformers", "pyzmq", "msgspec")


class Task(NamedTuple):
    """What is timed: so many requests of so many tokens each."""

    name: str
    requests: int
    tokens: int


def tasks(tokens: int) -> list[Task]:
    return [
        Task("many", CONCURRENT, tokens),
        Task("one", 1, tokens),
        Task("first", 1, 1),
        Task("first_of_many", CONCURRENT, 1),
    ]


class Contender:
    def __init__(self, name: str, model: str, threads: int, longest: int) -> None:
        self.name = name
        script = str(Path(__file__).with_name("bench_contender.py"))
        command = [sys.executable, script, name, model, str(threads), str(CONCURRENT), str(longest)]
        environment = {**envs.child_environment(), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def wait_ready(self) -> None:
        self._read()
        print(f"{self.name} is ready", file=sys.stderr)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"bench_serve: {self.name} ended with exit code {self._process.wait()}; see above")
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self, prompts: Prompts, tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def make_prompts(chance: random.Random, count: int, vocabulary: int, longest: int) -> Prompts:
    """Of different lengths, evenly from short to `longest`."""
    lengths = [max(4, longest * (i + 1) // count) for i in range(count)]
    return [[chance.randrange(10, vocabulary) for _ in range(length)] for length in lengths]


Seconds = dict[str, dict[str, list[float]]]
"""Contender → task → one figure a repetition."""


def measure(contenders: list[Contender], options: argparse.Namespace, vocabulary: int) -> tuple[Seconds, bool]:
    """The seconds of the counted rounds, and whether all gave the same tokens (two may be as good as each other)."""
    chance = random.Random(0)
    seconds: Seconds = {c.name: {task.name: [] for task in tasks(0)} for c in contenders}
    same, took = True, 0.0
    for repetition in range(-1, options.repeat):
        began = time.monotonic()
        if repetition > 0 and began + took > options.until:
            break
        turn = repetition % len(contenders)
        for task in tasks(options.tokens if repetition >= 0 else 4):
            prompts = make_prompts(chance, task.requests, vocabulary, options.prompt)
            answers = []
            for contender in contenders[turn:] + contenders[:turn]:
                got = contender.run(prompts, task.tokens)
                answers.append(got["tokens"])
                lengths = {len(one) for one in got["tokens"]}
                if lengths != {task.tokens}:
                    raise SystemExit(f"bench_serve: {contender.name} gave {lengths} tokens instead of {task.tokens}")
                if repetition >= 0:
                    seconds[contender.name][task.name].append(got["seconds"])
            same = same and (repetition < 0 or all(one == answers[0] for one in answers))
        took = time.monotonic() - began
        print(f"round {repetition + 1} of {options.repeat}: {took:.1f} s", file=sys.stderr)
    return seconds, same


def ratio(seconds: Seconds, task: str, one: str, other: str) -> float:
    """How many times as fast `one` is."""
    pairs = zip(seconds[one][task], seconds[other][task], strict=True)
    return statistics.median(theirs / mine for mine, theirs in pairs)


def summarise(seconds: Seconds, options: argparse.Namespace) -> dict[str, Any]:
    figures = {}
    for name, by_task in seconds.items():
        middle = {task: statistics.median(values) for task, values in by_task.items()}
        figures[name] = {
            "tokens_per_second": CONCURRENT * options.tokens / middle["many"],
            "tokens_per_second_one": options.tokens / middle["one"],
            "first_token_s": middle["first"],
            "first_tokens_s": middle["first_of_many"],
        }
    pairs = [("mp", "uni"), ("uni", "continuous"), ("uni", "generate"), ("mp", "continuous"), ("mp", "generate")]
    ratios = {
        f"{one}/{other}": {task.name: ratio(seconds, task.name, one, other) for task in tasks(0)}
        for one, other in pairs
    }
    goals = []
    for title, one, other, limit in GOALS:
        value = ratios[f"{one}/{other}"]["many"]
        goals.append({"name": title, "value": round(value, 4), "limit": limit, "ok": value >= limit})
    return {"goals": goals, "figures": figures, "ratios": ratios, "seconds": seconds}


def facts(options: argparse.Namespace) -> dict[str, Any]:
    host = read_host()
    return {
        "model": options.model,
        "note": options.note,
        "dtype": "float32",
        "omp_threads": options.threads,
        "requests": CONCURRENT,
        "longest_prompt": options.prompt,
        "answer_tokens": options.tokens,
        "host": {
            "cpus": host.cpus,
            "cpu_quota": host.cpu_quota,
            "machine": platform.machine(),
            "kernel": platform.release(),
            "load_at_start": os.getloadavg()[0],
        },
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def show(result: dict[str, Any]) -> None:
    print(f"model {result['model']}{result['note']}, fp32, {result['omp_threads']} OMP thread(s) each")
    print(f"{'':12}{'tokens/s at 8':>15}{'at 1':>9}{'first token':>14}{'first of 8':>13}")
    for name, f in result["figures"].items():
        rates = f"{f['tokens_per_second']:15.1f}{f['tokens_per_second_one']:9.1f}"
        print(f"{name:12}{rates}{f['first_token_s'] * 1e3:11.1f} ms{f['first_tokens_s'] * 1e3:10.1f} ms")
    print("\ntimes as fast")
    for name, values in result["ratios"].items():
        print(
            f"{name:16}"
            + f"{values['many']:11.3f}{values['one']:9.3f}"
            + f"{values['first']:14.3f}{values['first_of_many']:13.3f}"
        )
    print("\nsame tokens: " + ("yes" if result["same_tokens"] else "no"))
    for goal in result["goals"]:
        mark = "met" if goal["ok"] else "MISSED"
        print(f"{mark}: {goal['name']}: {goal['value']:.3f} (at least {goal['limit']})")


def choose_model(options: argparse.Namespace) -> tuple[str, str]:
    """Directory, and what is to be said of it."""
    cache = envs.cache_dir()
    if options.model:
        return options.model, ""
    if is_whole(demo_directory(cache)):
        return str(demo_directory(cache)), ""
    return str(
        demo_model(cache, tiny=True)
    ), " (tiny: the demo model is not here, make it with scripts/make_demo_model)"


def vocabulary_of(model: str) -> int:
    return int(json.loads(Path(model, "config.json").read_text())["vocab_size"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], prog="bench_serve")
    parser.add_argument("--quick", action="store_true", help="under 60 s: short answers, few repetitions")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--out", metavar="FILE", help="write the JSON object there, too")
    parser.add_argument("--model", metavar="DIR", help="default: the demo model; a tiny one when it is not there")
    parser.add_argument("--threads", type=int, help="OMP threads of every contender")
    parser.add_argument("--repeat", type=int, help="repetitions")
    parser.add_argument("--tokens", type=int, help="tokens of each answer")
    parser.add_argument("--prompt", type=int, help="tokens of the longest prompt")
    options = parser.parse_args()
    quick = options.quick
    host = read_host()
    options.threads = options.threads or host.omp_num_threads or max(1, host.cpus // 2)
    options.repeat = options.repeat or (3 if quick else 7)
    options.tokens = options.tokens or (12 if quick else 48)
    options.prompt = options.prompt or (32 if quick else 128)
    options.until = time.monotonic() + (QUICK_SECONDS if quick else math.inf)
    return options


def main() -> int:
    options = parse()
    options.model, options.note = choose_model(options)
    result = facts(options)
    contenders: list[Contender] = []
    try:
        longest = options.prompt + options.tokens
        for name in CONTENDERS:  # one by one into the list: whatever happens, those that run are closed
            contenders += [Contender(name, options.model, options.threads, longest)]
        for contender in contenders:
            contender.wait_ready()
        seconds, same = measure(contenders, options, vocabulary_of(options.model))
    finally:
        for contender in contenders:
            contender.close()
    result = {**summarise(seconds, options), **result, "same_tokens": same}
    result["repetitions"] = len(seconds["uni"]["many"])
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
