"""Values, their sources, and what must not stand together."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest

from launcher import logs
from launcher.cli.flags import LAUNCH
from launcher.cli.launch_config import launch_config
from launcher.config import LaunchConfig
from launcher.errors import UsageError
from launcher.logs import Redactor


@pytest.fixture(autouse=True)
def fresh_secrets(monkeypatch: pytest.MonkeyPatch) -> Redactor:
    secrets = Redactor()
    monkeypatch.setattr("launcher.cli.launch_config.SECRETS", secrets)
    monkeypatch.setattr(logs, "SECRETS", secrets)
    return secrets


def test_nothing_given_is_the_default() -> None:
    assert launch_config({}) == LaunchConfig()


def test_every_flag_of_the_table_is_a_field_and_the_other_way_round() -> None:
    fields = {f.name for f in msgspec.structs.fields(LaunchConfig)}
    assert {flag.field for flag in LAUNCH} - {"config", "dist_init_addr"} == fields - {"origins"}


@pytest.mark.parametrize("flag", [f for f in LAUNCH if f.example and f.field not in ("ssl_keyfile", "ssl_certfile")])
def test_the_examples_of_the_help_are_good_values(flag: object, tmp_path: Path) -> None:
    from launcher.cli.flags import Flag

    assert isinstance(flag, Flag)
    text = flag.example
    if flag.field == "uds":
        text = str(tmp_path / "s")
    if flag.field == "api_key_file":
        (tmp_path / "keys").write_text("# mine\n\nk-one\nk-two\n")
        text = str(tmp_path / "keys")
    if flag.field == "config":
        text = str(tmp_path / text)
        (tmp_path / flag.example).write_text("tp = 2")
    launch_config({flag.field: [text] if flag.kind == "repeated" else text})


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("tp", "8", 8),
        ("kv_cache_memory", "2GiB", 2 << 30),
        ("kv_cache_memory", "512MB", 512_000_000),
        ("kv_cache_memory", "1000000", 1_000_000),
        ("kv_cache_memory", "1.5 gib", 3 << 29),
        ("kv_cache_memory", "2G", 2 << 30),
        ("dtype", "bf16", "bfloat16"),
        ("dtype", "FP32", "float32"),
        ("ready_timeout", "0.5", 0.5),
        ("shutdown_timeout", "0", 0.0),
        ("port", "0", 0),
        ("backend", "my.module:Class", "my.module:Class"),
        ("worker", "reference", "reference"),
        ("worker_config", ["a=1", "b=x=y", "a=2"], {"a": "2", "b": "x=y"}),
    ],
)
def test_values(field: str, text: str | list[str], value: object) -> None:
    assert getattr(launch_config({field: text}), field) == value


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("tp", "0", "--tp 0 is out of range: give 1 or more"),
        ("tp", "four", "--tp four is not a whole number: give 1 or more"),
        ("tp", "1_0", "--tp 1_0 is not a whole number: give 1 or more"),
        ("tp", "", "--tp '' is not a whole number: give 1 or more"),
        ("port", "99999", "--port 99999 is out of range: give 0 to 65535"),
        ("port", "-1", "--port -1 is out of range: give 0 to 65535"),
        ("kv_cache_memory", "2 gigs", "--kv-cache-memory '2 gigs' is not a size"),
        ("kv_cache_memory", "0", "--kv-cache-memory 0 is less than one byte"),
        ("kv_cache_memory", "-1GiB", "--kv-cache-memory -1GiB is not a size"),
        ("device", "tpu", "--device tpu is no choice here: give auto, cpu or cuda"),
        ("dtype", "int8", "--dtype int8 is no choice here: give auto, float32"),
        ("backend", "ray", "--backend ray is no choice here: give uni, mp or module:Class"),
        ("worker", "my.module", "--worker my.module is no choice here: give reference, transformers or module:Class"),
        ("worker_extension", "x", "--worker-extension x is no choice here: give module:Class"),
        ("worker_config", ["a"], "--worker-config a is not of the form key=value"),
        ("gpu_memory_utilization", "0", "--gpu-memory-utilization 0 is not a share: give a number above 0, at most 1"),
        ("gpu_memory_utilization", "90", "--gpu-memory-utilization 90 is not a share"),
        ("gpu_memory_utilization", "much", "--gpu-memory-utilization much is not a share"),
        ("ready_timeout", "nan", "--ready-timeout nan is not a number of seconds: give 0.1 or more"),
        ("ready_timeout", "0", "--ready-timeout 0 is not a number of seconds"),
        ("shutdown_timeout", "-1", "--shutdown-timeout -1 is not a number of seconds"),
        ("name", "a/b", "--name a/b"),
        ("model", "", "--model '' is empty"),
        ("log_level", "loud", "--log-level loud is no choice here"),
        ("api_key", "a b", "--api-key *** cannot be sent in an HTTP header"),
        ("api_key_file", "/nonexistent", "--api-key-file /nonexistent cannot be read (No such file or directory)"),
        ("ssl_keyfile", "/nonexistent", "--ssl-keyfile is given without --ssl-certfile"),
        ("ssl_certfile", "/nonexistent", "--ssl-certfile is given without --ssl-keyfile"),
        ("nnodes", "0", "--nnodes 0 is out of range: give 1 or more"),
        ("node_rank", "-1", "--node-rank -1 is out of range: give 0 or more"),
        ("master_port", "0", "--master-port 0 is out of range: give 1 to 65535"),
        ("master_addr", "10.0.0", "--master-addr 10.0.0 is no IP address: write for example 10.0.0.1"),
        ("dist_init_addr", "10.0.0.1", "--dist-init-addr 10.0.0.1 has no port: write for example 10.0.0.1:29501"),
        ("dist_init_addr", "fd00::1:29501", "brackets before a port"),
        ("iface", "eth0:1", "--iface eth0:1 is no interface's name: give for example eth0"),
        ("join_timeout", "0", "--join-timeout 0 is not a number of seconds: give 1 or more"),
        ("uds", "/nonexistent/s", "there is no directory /nonexistent"),
        ("uds", "/tmp", "--uds /tmp is a directory"),
        ("uds", "/tmp/" + "x" * 120, "is longer than the 107 bytes"),
    ],
)
def test_bad_values(field: str, text: str | list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        launch_config({field: text})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_flag_before_environment_before_default(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("XSERVE_TP", "3")
        patch.setenv("XSERVE_MAX_NUM_SEQS", "7")
        patch.setenv("XSERVE_WORKER_CONFIG", "a=1,b=2")
        config = launch_config({"tp": "5"})
        assert (config.tp, config.max_num_seqs, config.max_num_batched_tokens) == (5, 7, 2048)
        assert config.worker_config == {"a": "1", "b": "2"}
        patch.setenv("XSERVE_PORT", "http")
        with pytest.raises(UsageError, match="XSERVE_PORT=http is not a whole number"):
            launch_config({})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.1:29700", ("10.0.0.1", 29700)),
        ("node0:1", ("node0", 1)),
        ("[fd00::1]:29700", ("fd00::1", 29700)),
        ("[fe80::1%eth0]:29700", ("fe80::1%eth0", 29700)),
    ],
)
def test_dist_init_addr_is_address_and_port(text: str, expected: tuple[str, int]) -> None:
    config = launch_config({"dist_init_addr": text})
    assert (config.master_addr, config.master_port) == expected
    assert config.origins == {"master_addr": "--dist-init-addr", "master_port": "--dist-init-addr"}


@pytest.mark.parametrize("text", ["[fd00::1]", "fd00::1"])
def test_brackets_are_for_people(text: str) -> None:
    assert launch_config({"master_addr": text}).master_addr == "fd00::1"


def test_dist_init_addr_beside_address_and_port(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"dist_init_addr": "10.0.0.1:29700"}
    with pytest.raises(UsageError, match="--dist-init-addr and --master-addr exclude each other: give one of them"):
        launch_config(both | {"master_addr": "10.0.0.1"})
    with pytest.raises(UsageError, match="--dist-init-addr and --master-port exclude each other"):
        launch_config(both | {"master_port": "29700"})
    with monkeypatch.context() as patch:
        patch.setenv("XSERVE_MASTER_ADDR", "10.0.0.9")
        assert launch_config(both).master_addr == "10.0.0.1"
        patch.delenv("XSERVE_MASTER_ADDR")
        patch.setenv("XSERVE_DIST_INIT_ADDR", "10.0.0.9:29900")
        config = launch_config({"master_port": "29800"})
        assert (config.master_addr, config.master_port) == ("10.0.0.9", 29800)
        assert config.origins["master_addr"] == "XSERVE_DIST_INIT_ADDR"
        patch.setenv("XSERVE_DIST_INIT_ADDR", "10.0.0.9")
        with pytest.raises(UsageError, match=r"XSERVE_DIST_INIT_ADDR=10\.0\.0\.9 has no port"):
            launch_config({})


def test_nodes_in_a_file_and_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.toml").write_text('nnodes = 2\ndist_init_addr = "[fd00::1]:29700"\njoin-timeout = 20\n')
    with monkeypatch.context() as patch:
        patch.setenv("XSERVE_NODE_RANK", "1")
        config = launch_config({"config": str(tmp_path / "c.toml")})
    assert (config.nnodes, config.node_rank, config.join_timeout) == (2, 1, 20.0)
    assert (config.master_addr, config.master_port) == ("fd00::1", 29700)


def test_key_and_key_file_exclude_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k-one\n")
    with pytest.raises(UsageError, match="--api-key and --api-key-file exclude each other"):
        launch_config({"api_key": "x", "api_key_file": str(keys)})
    with monkeypatch.context() as patch:
        patch.setenv("XSERVE_API_KEY", "from-environment")
        config = launch_config({"api_key_file": str(keys)})
        assert (config.api_key, config.api_key_file) == (None, str(keys))
        patch.setenv("XSERVE_API_KEY_FILE", str(keys))
        with pytest.raises(UsageError, match="XSERVE_API_KEY and XSERVE_API_KEY_FILE exclude"):
            launch_config({})


@pytest.mark.parametrize(
    ("content", "words"), [(b"\n#x\n", "holds no key"), (b"\xff", "is no text file"), (b"a b\n", "holds a key that")]
)
def test_key_files_that_will_not_do(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "keys").write_bytes(content)
    with pytest.raises(UsageError, match=words):
        launch_config({"api_key_file": str(tmp_path / "keys")})


def test_keys_are_secrets_from_then_on(tmp_path: Path, fresh_secrets: Redactor) -> None:
    (tmp_path / "keys").write_text("first-key-of-file\nsecond-key-of-file\n")
    launch_config({"api_key": "key-from-flag"})
    launch_config({"api_key_file": str(tmp_path / "keys")})
    assert fresh_secrets.text("key-from-flag first-key-of-file second-key-of-file") == "*** *** ***"


def _certificate(folder: Path, *, passphrase: str = "") -> tuple[str, str]:
    key, chain = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-keyout", str(key), "-out", str(chain)]
    command += ["-passout", f"pass:{passphrase}"] if passphrase else ["-nodes"]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("no openssl command")
    return str(key), str(chain)


def test_certificate_and_key(tmp_path: Path) -> None:
    key, chain = _certificate(tmp_path)
    config = launch_config({"ssl_keyfile": key, "ssl_certfile": chain})
    assert (config.ssl_keyfile, config.ssl_certfile) == (key, chain)
    with pytest.raises(UsageError, match="do not work together"):
        launch_config({"ssl_keyfile": chain, "ssl_certfile": key})
    with pytest.raises(UsageError, match="--ssl-certfile /nonexistent cannot be read"):
        launch_config({"ssl_keyfile": key, "ssl_certfile": "/nonexistent"})


def test_an_encrypted_key_is_refused_without_asking_on_the_terminal(tmp_path: Path) -> None:
    key, chain = _certificate(tmp_path, passphrase="secret")
    with pytest.raises(UsageError, match="unencrypted"):
        launch_config({"ssl_keyfile": key, "ssl_certfile": chain})
