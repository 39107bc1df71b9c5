"""Where a launch listens, and with which keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.config import LaunchConfig
from launcher.errors import HostError, UsageError
from launcher.plan import front


@pytest.mark.parametrize(
    ("changes", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"port": 81}, "http://127.0.0.1:81"),
        ({"host": "0.0.0.0"}, "http://127.0.0.1:8000"),
        ({"host": "::"}, "http://[::1]:8000"),
        ({"host": "fe80::1%eth0"}, "http://[fe80::1%eth0]:8000"),
        ({"host": "box.example"}, "http://box.example:8000"),
        ({"ssl_certfile": "c", "ssl_keyfile": "k"}, "https://127.0.0.1:8000"),
    ],
)
def test_url(changes: dict[str, Any], url: str) -> None:
    assert front.choose_binding(LaunchConfig(**changes)).url() == url


def test_url_of_a_port_that_the_kernel_chose() -> None:
    assert front.choose_binding(LaunchConfig(port=0)).url(4711) == "http://127.0.0.1:4711"


def test_uds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    binding = front.choose_binding(LaunchConfig(uds="api.sock"))
    assert binding.uds == str(tmp_path / "api.sock")
    assert binding.url() == f"unix:{tmp_path}/api.sock"
    with pytest.raises(UsageError, match="there is no directory"):
        front.choose_binding(LaunchConfig(uds="nowhere/api.sock"))


def test_uds_holds_107_bytes() -> None:
    front.choose_binding(LaunchConfig(uds="/" + "x" * 106))
    with pytest.raises(UsageError, match="108 bytes long"):
        front.choose_binding(LaunchConfig(uds="/" + "x" * 107))
    with pytest.raises(UsageError, match="bytes long"):
        front.choose_binding(LaunchConfig(uds="/" + "é" * 60))


def test_api_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# clients\n\none\n  two  \n")
    assert front.read_api_keys(LaunchConfig()) == ()
    assert front.read_api_keys(LaunchConfig(api_key="k")) == ("k",)
    assert front.read_api_keys(LaunchConfig(api_key_file=str(path))) == ("one", "two")


@pytest.mark.parametrize(
    ("changes", "content", "words"),
    [
        ({"api_key": " "}, None, "--api-key is empty"),
        ({"api_key": "k", "api_key_file": "keys"}, b"x", "both given"),
        ({"api_key_file": "keys"}, None, "No such file"),
        ({"api_key_file": "keys"}, b"# none\n", "holds no key"),
        ({"api_key_file": "keys"}, b"\xff\xfe", "not UTF-8"),
    ],
)
def test_api_key_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], content: bytes | None, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("keys").write_bytes(content)
    with pytest.raises(UsageError, match=words):
        front.read_api_keys(LaunchConfig(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"ssl_keyfile": "here", "ssl_certfile": "here"}, None),
        ({"ssl_keyfile": "here"}, "--ssl-certfile is missing"),
        ({"ssl_certfile": "here"}, "--ssl-keyfile is missing"),
        ({"ssl_keyfile": "here", "ssl_certfile": "gone"}, "--ssl-certfile gone cannot be read: No such file"),
    ],
)
def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str | None) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").write_text("x")
    if words is None:
        front.check_tls(LaunchConfig(**changes))
        return
    with pytest.raises(UsageError, match=words):
        front.check_tls(LaunchConfig(**changes))


def test_addresses() -> None:
    assert front.engine_address(Path("/run/a"), 2) == "ipc:///run/a/core2.sock"
    assert front.engine_address(Path("/" + "x" * 95), 0)
    with pytest.raises(HostError, match="XDG_RUNTIME_DIR"):
        front.engine_address(Path("/" + "x" * 96), 0)


def test_each_life_meets_in_a_file_of_its_own() -> None:
    found = {front.rendezvous(Path("/run/a"), launch, dp, life) for launch in "ab" for dp in (0, 1) for life in (0, 1)}
    assert len(found) == 8
    assert front.rendezvous(Path("/run/é #?"), "L", 0, 0) == "file:///run/%C3%A9%20%23%3F/rendezvous-L-0-0"
