"""The API server as a process of its own: born by a nursery, its socket handed down, a small core behind it."""

from __future__ import annotations

import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from launcher.config import ApiSettings, encode
from launcher.process.nursery import Child, Nursery
from launcher.process.reports import Drain, Drained, Stop, TreeState
from launcher.process.spec import ProcessSpec
from tests.api.fakes import text_of, tokens_of
from tests.api.models import make_tokenizer
from tests.api.small_core import SmallCore
from tests.conftest import eventually


class Server:
    def __init__(self, directory: Path, listener: socket.socket, **settings: Any) -> None:
        self.address = f"ipc://{directory}/core0"
        self.nursery = Nursery("spawn")
        self.drained: list[int] = []
        payload = encode(ApiSettings(engine_addresses=(self.address,), **settings))
        spec = ProcessSpec(
            title="APIServer_0", role="api_server", target="launcher.api.server:run", payload=payload, comm="xs:api0"
        )
        with listener:
            self.listening = listener.getsockname()
            (self.child,) = self.nursery.start_all([spec], descriptors={spec.title: {"http": listener.fileno()}})

    def tell(self, message: Any) -> None:
        self.nursery.send(self.child, message)

    def pump(self) -> Child:
        for event in self.nursery.poll(0.01):
            if isinstance(event.message, Drained):
                self.drained.append(event.message.cut)
        return self.child

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listening[1]}"

    def wait_ready(self) -> None:
        self.nursery.wait_ready(30)

    def wait_admitting(self, client: httpx.Client) -> None:
        self.tell(TreeState("ready"))
        answers: list[str] = []

        def admitted() -> bool:
            answer = client.get("/readyz")
            answers.append(answer.text)
            return answer.status_code == 200

        try:
            eventually(admitted, 20, "requests are admitted")
        except AssertionError:
            pytest.fail(f"requests are not admitted: {answers[-1]}")

    def wait_gone(self, within: float = 10) -> Child:
        eventually(lambda: self.pump().is_gone, within, "the API server is gone")
        return self.child


@pytest.fixture
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("x")


@pytest.fixture
def server(directory) -> Iterator[Server]:
    server = Server(directory, socket.create_server(("127.0.0.1", 0)))
    yield server
    server.nursery.close()


@pytest.fixture
def core(server) -> Iterator[SmallCore]:
    core = SmallCore(server.address)
    yield core
    core.close()


@pytest.fixture
def client(server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


COMPLETION = {"model": "reference", "prompt": "hi", "temperature": 0}


def test_from_birth_to_stop(server, client, directory) -> None:
    server.wait_ready()
    assert client.get("/livez").status_code == 200
    server.tell(TreeState("starting", "loading weights"))
    eventually(lambda: client.get("/startupz").json()["phase"] == "loading weights", what="the phase is shown")
    assert client.get("/startupz").status_code == 503
    server.tell(TreeState("ready"))
    eventually(lambda: "engine" in client.get("/readyz").json()["phase"], what="it waits for the engine")
    core = SmallCore(server.address)
    try:
        server.wait_admitting(client)
        assert client.get("/health").status_code == 200
        answer = client.post("/v1/completions", json=COMPLETION).json()
        assert answer["choices"][0]["text"] == text_of(tokens_of(b"hi", 16))
        began = time.monotonic()
        server.tell(Stop(5))
        child = server.wait_gone()
        assert time.monotonic() - began < 3
        assert child.exit.code == 0
    finally:
        core.close()


def test_drain_waits_for_what_runs_and_takes_nothing_more(server, core, client) -> None:
    server.wait_ready()
    server.wait_admitting(client)
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(
            httpx.post(f"{server.url}/v1/completions", json={**COMPLETION, "max_tokens": 150}, timeout=20)
        )
    )
    asking.start()
    eventually(lambda: core.running, what="the request runs")
    server.tell(Drain(20))
    eventually(lambda: client.get("/readyz").status_code == 503, what="it admits nothing more")
    refused = client.post("/v1/completions", json=COMPLETION)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    eventually(lambda: server.pump() and server.drained, what="it says that it is drained")
    assert server.drained == [0]
    asking.join(10)
    assert answers[0].json()["choices"][0]["text"] == text_of(tokens_of(b"hi", 150))
    server.tell(Stop(5))
    assert server.wait_gone().exit.code == 0


def test_drain_cuts_what_is_too_slow(server, core, client) -> None:
    server.wait_ready()
    server.wait_admitting(client)
    core.step = 0.05
    with client.stream("POST", "/v1/completions", json={**COMPLETION, "max_tokens": 4000, "stream": True}) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        server.tell(Drain(0.2))
        eventually(lambda: server.pump() and server.drained, what="it says that it is drained")
        assert server.drained == [1]
        rest = [line for line in lines if line]
    assert '"code":"shutting_down"' in rest[-1]
    eventually(lambda: core.aborted, what="it was aborted in the core")


@pytest.mark.parametrize("how", ["stop", "sigterm"])
def test_a_stop_closes_at_once_also_with_requests(server, core, client, how) -> None:
    server.wait_ready()
    server.wait_admitting(client)
    core.step = 0.02
    with client.stream("POST", "/v1/completions", json={**COMPLETION, "max_tokens": 4000, "stream": True}) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        if how == "stop":
            server.tell(Stop(5))
        else:
            server.child.signal(signal.SIGTERM)
        assert any('"code":"shutting_down"' in line for line in lines)
    child = server.wait_gone(4)
    assert child.exit.code == 0


def test_a_client_that_hangs_up_is_aborted_in_the_core(server, core, client) -> None:
    server.wait_ready()
    server.wait_admitting(client)
    with client.stream("POST", "/v1/completions", json={**COMPLETION, "max_tokens": 4000, "stream": True}) as stream:
        next(stream.iter_lines())
    eventually(lambda: core.aborted, what="it was aborted in the core")
    assert not core.running


def test_the_core_dies_in_a_request_and_comes_back(server, client) -> None:
    core = SmallCore(server.address)
    server.wait_ready()
    server.wait_admitting(client)
    with client.stream("POST", "/v1/completions", json={**COMPLETION, "max_tokens": 4000, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        core.close()
        assert any('"code":"engine_dead"' in line for line in lines)
    assert client.get("/readyz").status_code == 503
    assert client.post("/v1/completions", json=COMPLETION).status_code == 503
    core = SmallCore(server.address)
    try:
        server.wait_admitting(client)
        assert client.post("/v1/completions", json=COMPLETION).status_code == 200
    finally:
        core.close()


def test_a_model_directory_is_served_without_torch(directory, tmp_path) -> None:
    model = make_tokenizer(tmp_path / "model")
    server = Server(directory, socket.create_server(("127.0.0.1", 0)), model=str(model), served_model_name="tiny")
    core = SmallCore(server.address)
    try:
        server.wait_ready()
        with httpx.Client(base_url=server.url, timeout=20) as client:
            server.wait_admitting(client)
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.json()["usage"]["completion_tokens"] == 3
        assert "libtorch" not in Path(f"/proc/{server.child.pid}/maps").read_text()
    finally:
        core.close()
        server.nursery.close()


def test_a_directory_without_a_tokenizer_is_a_failure_with_its_reason(directory, tmp_path) -> None:
    server = Server(directory, socket.create_server(("127.0.0.1", 0)), model=str(tmp_path / "nothing"))
    try:
        child = server.wait_gone(30)
        assert child.exit.code == 2
        assert "no tokenizer in" in child.failure.headline
        assert child.failure.permanent
    finally:
        server.nursery.close()


def test_a_unix_socket(directory) -> None:
    path = str(directory / "http")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    server = Server(directory, listener)
    core = SmallCore(server.address)
    try:
        server.wait_ready()
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://x", timeout=20) as client:
            server.wait_admitting(client)
            answer = client.post("/v1/completions", json=COMPLETION).json()
            assert answer["choices"][0]["text"] == text_of(tokens_of(b"hi", 16))
        assert Path(path).is_socket()
    finally:
        core.close()
        server.nursery.close()


def test_tls(directory) -> None:
    key, certificate = directory / "key.pem", directory / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", key, "-out", certificate, "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(directory, listener, ssl_keyfile=str(key), ssl_certfile=str(certificate))
    try:
        server.wait_ready()
        trust = ssl.create_default_context(cafile=str(certificate))
        url = f"https://localhost:{server.listening[1]}/livez"
        assert httpx.get(url, verify=trust, timeout=20).json() == {"status": "ok"}
    finally:
        server.nursery.close()


def test_a_bad_certificate_is_a_failure_with_its_reason(directory) -> None:
    bad = directory / "bad.pem"
    bad.write_text("nothing")
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(directory, listener, ssl_keyfile=str(bad), ssl_certfile=str(bad))
    try:
        child = server.wait_gone(30)
        assert child.exit.code == 2
        assert "certificate" in child.failure.headline
    finally:
        server.nursery.close()
