"""The part of `scripts/run` that needs the environment: see there."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import httpx
import psutil

from launcher import envs
from launcher.cli.argv import normalise
from launcher.cli.launch_config import launch_config
from launcher.clock import Deadline
from launcher.config import LaunchConfig
from launcher.control import client, run_dir
from launcher.control.protocol import InstanceStatus
from launcher.control.run_dir import Instance
from launcher.errors import XserveError
from launcher.process import kernel

QUESTION = "What is the capital of France? Answer in one sentence."
PORT = 8000
DEMO_TP = 3
START_LIMIT = 3600.0
"""Seconds after which a start is given up here; xserve itself gives up much sooner when nothing moves."""
ANSWER_LIMIT = 300.0


class RunError(Exception):
    """One line; everything that was started is stopped."""


def say(text: str) -> None:
    print(text, flush=True)


class Launch:
    """The `xserve launch` that we started."""

    def __init__(self, arguments: list[str], name: str) -> None:
        self.name = name
        # A group of its own: Ctrl-C reaches us alone, and we hand it on once (a second one would force it).
        # If we are killed, it is told to stop.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "launcher.cli", "launch", *arguments],
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=lambda: kernel.set_parent_death_signal(signal.SIGTERM),
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._hand_on)
        self.interrupted = False

    def _hand_on(self, number: int, _frame: FrameType | None) -> None:
        self.interrupted = True
        if self.process.poll() is None:
            self.process.send_signal(number)

    def instance(self) -> Instance | None:
        return next((i for i in run_dir.list_instances() if i.name == self.name), None)

    def status(self) -> InstanceStatus:
        found = self.instance()
        if found is None:
            raise RunError("the launch is gone")
        return client.status(found, Deadline.after(5))

    def wait_ready(self, config: LaunchConfig) -> tuple[httpx.Client, str]:
        """A client for it, and its url, as soon as it answers /readyz."""
        deadline = Deadline.after(START_LIMIT)
        http: httpx.Client | None = None
        url = ""
        while not deadline.expired:
            if self.process.poll() is not None:
                raise RunError(f"the launch ended with exit code {self.process.returncode}; its own words stand above")
            found = self.instance()
            if http is None and found is not None and found.url:
                url = found.url
                http = _client(config, url)
            if http is not None and _is_ready(http):
                return http, url
            time.sleep(0.1)
        raise RunError(f"not ready after {START_LIMIT:g} s")

    def stop(self) -> int:
        """Stop it in order; its exit code."""
        # A stop that was asked for already goes on: a second signal would force it.
        if self.process.poll() is None and not self.interrupted:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its guard ends what is left of the tree
            return self.process.wait(10)


def _client(config: LaunchConfig, url: str) -> httpx.Client:
    context: Any = True
    if config.ssl_certfile:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # it is our own child that we talk to
    transport = httpx.HTTPTransport(uds=config.uds, verify=context)
    scheme = "https" if config.ssl_certfile else "http"
    key = config.api_key or _first_key(config.api_key_file)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    base = f"{scheme}://localhost" if config.uds else url
    return httpx.Client(base_url=base, headers=headers, transport=transport, timeout=ANSWER_LIMIT, trust_env=False)


def _first_key(path: str | None) -> str | None:
    from launcher.cli.values import read_keys

    return read_keys(path)[0] if path else None


def _is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/readyz", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def chat(http: httpx.Client, model: str) -> Iterator[str]:
    """The pieces of the answer to our question, as they come."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 48,
        "temperature": 0,
        "stream": True,
    }
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RunError(f"the API answered {answer.status_code}: {answer.read().decode(errors='replace')}")
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if data == line or data == "[DONE]":
                continue
            piece = json.loads(data)
            if "error" in piece:
                raise RunError(f"the API broke the answer off: {piece['error']}")
            for choice in piece.get("choices", ()):
                yield choice.get("delta", {}).get("content") or ""


def show_answer(http: httpx.Client) -> str:
    """Ask and print; the model's name."""
    model: str = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    say(f"\nyou:   {QUESTION}")
    print(f"{model}: ", end="", flush=True)
    got = ""
    for piece in chat(http, model):
        got += piece
        print(piece, end="", flush=True)
    say("\n")
    if not got.strip():
        raise RunError("the answer is empty")
    return model


def show_tree(supervisor: int, status: InstanceStatus) -> None:
    """The processes with the names that ps shows, and what status knows of them."""
    known = {one.pid: one for one in status.processes}

    def show(process: psutil.Process, depth: int) -> None:
        try:
            title = " ".join(process.cmdline()).strip() or process.name()
            children = process.children()
        except psutil.Error:
            return
        one = known.get(process.pid)
        rank = f"rank {one.rank}, " if one is not None and one.rank is not None else ""
        phase = f"  ({rank}{one.phase})" if one is not None else ""
        say(f"  {'   ' * depth}{title}  pid {process.pid}{phase}")
        for child in sorted(children, key=lambda c: c.pid):
            show(child, depth + 1)

    say("process tree:")
    show(psutil.Process(supervisor), 0)


def curl_line(config: LaunchConfig, url: str, model: str) -> str:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Tell me a short story."}]})
    command = ["curl", "-N"]
    if config.uds:
        url = "https://localhost" if config.ssl_certfile else "http://localhost"
        command += ["--unix-socket", config.uds]
    if config.ssl_certfile:
        command.append("-k")
    if config.api_key or config.api_key_file:
        command += ["-H", "Authorization: Bearer YOUR_KEY"]
    command += ["-H", "Content-Type: application/json", f"{url}/v1/chat/completions"]
    return shlex.join([*command, "-d", body[:-1] + ', "stream": true}'])


def demo_model() -> str:
    """The directory of the demo model, made on first use. Its progress goes to stderr by itself."""
    done = subprocess.run([sys.executable, "-m", "launcher.models.demo"], stdout=subprocess.PIPE, text=True)
    lines = done.stdout.split()
    if done.returncode != 0 or not lines:
        raise RunError(f"the demo model could not be had (exit code {done.returncode})")
    directory = done.stdout.strip().splitlines()[-1]
    if not Path(directory).is_dir():
        raise RunError(f"the demo model said that it is in {directory!r}: there is no such directory")
    return directory


def complete(arguments: list[str]) -> tuple[list[str], LaunchConfig]:
    """The user's flags, checked, and ours where he gave none."""
    flags = normalise(["launch", *arguments])[1:]
    given = _given(flags)

    def has(*fields: str) -> bool:
        return any(field in given or envs.flag_from_environment(field) is not None for field in fields)

    launch_config(given)  # a mistyped flag is worth no download
    if not has("model", "worker"):
        flags += [f"--model={demo_model()}"]
        if not has("tp"):
            flags += [f"--tp={DEMO_TP}"]
    if not has("port", "uds"):
        flags += [f"--port={_port()}"]
    if not has("name"):
        flags += [f"--name={_name()}"]
    return flags, launch_config(_given(flags))


def _given(flags: list[str]) -> dict[str, Any]:
    """Field → text, as typer would hand them over."""
    found: dict[str, Any] = {}
    for flag in flags:
        name, _, value = flag.partition("=")
        field = name.lstrip("-").replace("-", "_")
        if field == "worker_config":
            found.setdefault(field, []).append(value)
        else:
            found[field] = value
    return found


def _port() -> int:
    """8000, or 0 (a free one that xserve takes, so that nobody can come between) when it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            say(f"port {PORT} is taken: using a free one")
            return 0
    return PORT


def _name() -> str:
    taken = {instance.name for instance in run_dir.list_instances()}
    return "demo" if "demo" not in taken else f"demo-{os.getpid()}"


def run(arguments: list[str]) -> int:
    once = "--once" in arguments
    flags, config = complete([a for a in arguments if a != "--once"])
    launch = Launch(flags, config.name or "")
    try:
        http, url = launch.wait_ready(config)
        with contextlib.closing(http):
            model = show_answer(http)
        show_tree(launch.process.pid, launch.status())
        say(f"\ntry next:\n  {curl_line(config, url, model)}")
        say(f"  .venv/bin/xserve status --name {shlex.quote(launch.name)}\n")
        if once:
            return launch.stop()
        say("serving until Ctrl-C")
        return launch.process.wait()
    except (RunError, XserveError, httpx.HTTPError, ValueError, KeyError) as error:
        if launch.interrupted:
            return launch.stop()  # Ctrl-C came while we were waiting for something: no failure
        print(f"scripts/run: {error or type(error).__name__}", file=sys.stderr)
        return launch.stop() or 1
    except BaseException:
        launch.stop()
        raise


def main() -> NoReturn:
    arguments = sys.argv[1:]
    if {"--help", "-h"} & set(arguments):
        say("usage: scripts/run [--once] [flags of xserve launch]\n\n--once   stop after the first answer")
        sys.exit(0)
    try:
        code = run(arguments)
    except (RunError, XserveError) as error:
        print(f"scripts/run: {error}", file=sys.stderr)
        code = getattr(error, "exit_code", 1)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
