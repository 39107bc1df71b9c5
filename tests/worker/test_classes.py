"""Worker classes by name, and what is said of names that lead nowhere."""

from __future__ import annotations

import pytest

from launcher.config import WorkerSettings
from launcher.errors import UsageError
from launcher.worker.base import Worker
from launcher.worker.classes import PROTOCOL, import_class, worker_class


class Duck:
    """Has the methods, and no base class of ours."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings


for _name in PROTOCOL:
    setattr(Duck, _name, lambda self, *args: None)


class Half:
    def init_device(self) -> None: ...


class Extension:
    def extra(self) -> str:
        return "extra"


class Hider:
    def load_model(self) -> None: ...


not_a_class = 3

BAD_NAMES = [
    ("nothing", "not of the form module:Class"),
    ("nothing:", "not of the form module:Class"),
    ("no_such_package.x:Y", "there is no module 'no_such_package'"),
    ("launcher.no_such:Y", "there is no module 'launcher.no_such'"),
    ("launcher.clock:Nope", "has no 'Nope'"),
    (f"{__name__}:not_a_class", "is a int, not a class"),
]


@pytest.mark.parametrize(("name", "message"), BAD_NAMES)
def test_bad_name(name: str, message: str) -> None:
    with pytest.raises(UsageError, match="worker") as error:
        import_class(name, "worker")
    assert message in str(error.value)
    assert repr(name) in str(error.value)


def test_an_error_inside_the_module_is_not_hidden(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_worker.py").write_text("import not_installed_at_all\n")  # type: ignore[operator]
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="not_installed_at_all"):
        import_class("broken_worker:Worker", "worker")


def test_a_class_without_the_methods_is_refused_in_words() -> None:
    with pytest.raises(UsageError) as error:
        worker_class(WorkerSettings(worker=f"{__name__}:Half"))
    assert "has no load_model, kv_cache_spec" in str(error.value)
    assert "launcher.worker.base:Worker" in str(error.value)


def test_a_duck_will_do() -> None:
    assert worker_class(WorkerSettings(worker=f"{__name__}:Duck")) is Duck


def test_an_extension_is_mixed_in() -> None:
    made = worker_class(WorkerSettings(worker="launcher.worker.base:Worker", worker_extension=f"{__name__}:Extension"))
    assert issubclass(made, Worker)
    assert made(WorkerSettings()).extra() == "extra"


def test_an_extension_may_not_hide() -> None:
    with pytest.raises(UsageError, match="would hide load_model of worker"):
        worker_class(WorkerSettings(worker="launcher.worker.base:Worker", worker_extension=f"{__name__}:Hider"))


def test_the_protocol_is_what_the_base_class_has() -> None:
    assert all(callable(getattr(Worker, name)) for name in PROTOCOL)
