"""Arrays are made from facts that may be a stranger's: what does not fit the bytes is an error, never a crash."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.ipc import hooks

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

BYTES = 24
WRONG: list[tuple[str, Any]] = [
    ("numpy", ["O", [3], "C"]),
    ("numpy", ["|O8", [3], "C"]),
    ("numpy", ["i4,i4", [3], "C"]),
    ("numpy", ["<f8", [4], "C"]),
    ("numpy", ["<f8", [-3], "C"]),
    ("numpy", ["<f8", [-1, -3], "C"]),
    ("numpy", ["<f8", [3.0], "C"]),
    ("numpy", ["<f8", [True, 3], "C"]),
    ("numpy", ["<f8", 3, "C"]),
    ("numpy", ["<f8", [3], "K"]),
    ("numpy", ["<U0", [1 << 62], "C"]),
    ("numpy", ["<f8", [1 << 40, 1 << 40], "C"]),
    ("numpy", None),
    ("torch", ["load", [3], False, False]),
    ("torch", ["__class__", [3], False, False]),
    ("torch", ["quint8", [24], False, False]),
    ("torch", ["float64", [4], False, False]),
    ("torch", ["float64", [-3], False, False]),
    ("torch", ["int64", [3], True, False]),
    ("torch", [["float64"], [3], False, False]),
    ("os", ["system"]),
    (7, []),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("package", "facts"), WRONG)
@pytest.mark.parametrize("size", [0, BYTES])
def test_wrong_facts(package: str, facts: Any, size: int) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 - which one does not matter: the message's reader tells it
        hooks.make(package, facts, bytearray(size))


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["numpy", "torch"]),
    st.lists(
        st.one_of(
            st.sampled_from(["<f8", "float64", "bool", "|b1", "<M8[ns]", "|V8", "C", "F"]),
            st.lists(st.integers(-2, 30), max_size=4),
            st.booleans(),
            st.none(),
        ),
        max_size=4,
    ),
    st.binary(max_size=64),
)
def test_any_facts(package: str, facts: list[Any], content: bytes) -> None:
    try:
        made = hooks.make(package, facts, bytearray(content))
    except Exception:
        return
    assert made.nbytes == len(content)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e5m2", "bool", "complex64", "uint8"])
def test_tensors_there_and_back(name: str) -> None:
    hook = hooks.hook_for(torch.Tensor)
    assert hook is not None
    tensor = torch.ones(2, 3).to(getattr(torch, name))
    taken = hook.take(tensor)
    assert taken is not None
    back = hook.make(taken[0], bytearray(taken[1]))
    assert back.dtype == tensor.dtype
    assert torch.equal(
        back.float() if not tensor.is_complex() else back, tensor.float() if not tensor.is_complex() else tensor
    )


@pytest.mark.parametrize("dtype", ["<f8", ">i4", "|b1", "<M8[ns]", "|S3", "<U2", "|V5", "<c16"])
def test_arrays_there_and_back(dtype: str) -> None:
    hook = hooks.hook_for(numpy.ndarray)
    assert hook is not None
    for array in (numpy.zeros((2, 3), dtype), numpy.zeros((0, 4), dtype), numpy.zeros((), dtype)):
        taken = hook.take(array)
        assert taken is not None
        back = hook.make(list(taken[0]), bytearray(taken[1]))
        assert (back.dtype, back.shape) == (array.dtype, array.shape)
