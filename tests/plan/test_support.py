"""Which models are let through: every row of the tables, and what transformers' own table says."""

from __future__ import annotations

import importlib.util
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from launcher.config import LaunchConfig
from launcher.errors import UsageError
from launcher.plan import make_plan
from launcher.plan.architectures import REFUSED, SINGLE_RANK, TENSOR_PARALLEL
from launcher.plan.checkpoint import Checkpoint
from launcher.plan.support import causal_lm_types, check_architecture, is_proven
from tests.plan.made_facts import machine
from tests.plan.model_files import write_model

KNOWN = frozenset({"llama", "new_one", "falcon", "gpt2"})


def model(model_type: str) -> Checkpoint:
    return Checkpoint(directory="/m", model_type=model_type)


def test_the_tables_do_not_overlap() -> None:
    assert not TENSOR_PARALLEL & SINGLE_RANK
    assert not (TENSOR_PARALLEL | SINGLE_RANK) & REFUSED.keys()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", sorted(TENSOR_PARALLEL))
def test_proven_types(kind: str, tp: int) -> None:
    check_architecture(model(kind), tp, KNOWN)
    assert is_proven(kind)


@pytest.mark.parametrize("kind", sorted(SINGLE_RANK))
def test_types_for_one_rank(kind: str) -> None:
    check_architecture(model(kind), 1, KNOWN)
    assert is_proven(kind)
    with pytest.raises(UsageError, match=f"--tp 2: a {kind} .* use --tp 1"):
        check_architecture(model(kind), 2, KNOWN)


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_types_that_would_run_wrong(kind: str) -> None:
    assert not is_proven(kind)
    with pytest.raises(UsageError) as caught:
        check_architecture(model(kind), 1, KNOWN)
    assert str(caught.value) == f"--model /m is a {kind}, which is not supported: {REFUSED[kind]}"


def test_types_in_no_table() -> None:
    check_architecture(model("new_one"), 2, KNOWN)
    check_architecture(model("made_up"), 2, frozenset())
    with pytest.raises(UsageError) as caught:
        check_architecture(model("made_up"), 1, KNOWN)
    line = str(caught.value)
    assert "unknown architecture 'made_up'" in line
    assert "llama" in line
    assert "\n" not in line


def test_transformers_own_table() -> None:
    known = causal_lm_types()
    assert len(known) > 100
    assert known >= TENSOR_PARALLEL | SINGLE_RANK
    assert not known & {"bert_made_up", "clip", "whisper_made_up", "vit"}


@pytest.mark.parametrize("text", [None, "", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = make()\n"])
def test_a_table_that_cannot_be_read_refuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    auto = tmp_path / "transformers" / "models" / "auto"
    auto.mkdir(parents=True)
    (tmp_path / "transformers" / "__init__.py").touch()
    if text is not None:
        (auto / "modeling_auto.py").write_text(text)
    spec = PathFinder.find_spec("transformers", [str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert causal_lm_types() == frozenset()


def test_no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert causal_lm_types() == frozenset()


@pytest.mark.parametrize(("kind", "words"), [("made_up", "unknown architecture"), ("falcon", "is not supported")])
def test_a_plan_refuses(tmp_path: Path, kind: str, words: str) -> None:
    config = LaunchConfig(model=str(write_model(tmp_path, model_type=kind)))
    with pytest.raises(UsageError, match=words):
        make_plan(config, machine(), run_dir=Path("/run/x"), launch_id="L", name="n")


def test_a_type_that_nobody_tried_is_noted(tmp_path: Path) -> None:
    def notes(kind: str) -> str:
        config = LaunchConfig(model=str(write_model(tmp_path, model_type=kind)))
        return "\n".join(make_plan(config, machine(), run_dir=Path("/run/x"), launch_id="L", name="n").notes)

    assert "never tried" not in notes("llama")
    untried = min(causal_lm_types() - TENSOR_PARALLEL - SINGLE_RANK - REFUSED.keys())
    assert f"model type {untried} was never tried" in notes(untried)
