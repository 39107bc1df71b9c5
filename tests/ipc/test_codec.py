from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from launcher.errors import InternalError, UsageError
from launcher.ipc import BufferHook, Codec, hooks
from launcher.ipc.codec import BUFFER_TAG, BYTES_TAG, PICKLE_TAG, PLAIN_TAG
from tests.ipc.conftest import Note


class Arrays(msgspec.Struct):
    array: np.ndarray[Any, Any]
    rest: Any = None


class Borrowing(msgspec.Struct):
    inner: list[dict[str, msgspec.Raw]]


class Loop(msgspec.Struct):
    next: Loop | None = None


STRUCTS = {1: Note, 2: Arrays, 3: Borrowing, 4: Loop}
TRUSTED = Codec(STRUCTS, trusted=True)
PLAIN = Codec(STRUCTS, trusted=False)


class Message(NamedTuple):
    tag: int
    head: bytes | memoryview
    buffers: Sequence[memoryview]


def there_and_back(codec: Codec, obj: Any) -> tuple[Message, Any]:
    message = Message(*codec.encode(obj))
    head = bytearray(message.head)
    result = codec.decode(message.tag, memoryview(head), [bytearray(buffer) for buffer in message.buffers])
    head[:] = bytes(len(head))  # the head is only lent: what was decoded must not change with it
    return message, result


@pytest.mark.parametrize("codec", [TRUSTED, PLAIN])
@pytest.mark.parametrize("obj", [None, True, -5, 2.5, "käse", b"", b"raw", Note(1, "x", [1, 2]), Loop(Loop())])
def test_what_every_codec_carries(codec: Codec, obj: Any) -> None:
    message, back = there_and_back(codec, obj)
    assert back == obj
    assert type(back) is type(obj)
    assert message.tag != PICKLE_TAG


@pytest.mark.parametrize("obj", [(1, "a"), {2: {3}}, [None], 1 << 80, ValueError("x"), Ellipsis, Note])
def test_what_only_pickle_carries(obj: Any) -> None:
    message, back = there_and_back(TRUSTED, obj)
    assert message.tag == PICKLE_TAG
    assert repr(back) == repr(obj)
    with pytest.raises(UsageError, match="cannot be sent"):
        PLAIN.encode(obj)
    with pytest.raises(InternalError, match="not trusted"):
        PLAIN.decode(message.tag, memoryview(message.head), ())


def test_functions_by_value() -> None:
    offset = 3
    assert there_and_back(TRUSTED, lambda x: x + offset)[1](4) == 7


def test_struct_that_msgpack_cannot_carry() -> None:
    note = Note(1, payload=1 + 2j)
    message, back = there_and_back(TRUSTED, note)
    assert message.tag == PICKLE_TAG
    assert back == note
    with pytest.raises(UsageError, match="a Note cannot be sent: msgpack cannot carry a builtins"):
        PLAIN.encode(note)
    # The failed attempt has left no buffer behind.
    message, back = there_and_back(PLAIN, Note(2))
    assert (message.tag, message.buffers, back) == (1, (), Note(2))


def test_bytes_like_arrive_as_bytes() -> None:
    for obj in (bytearray(b"ab"), memoryview(b"ab"), memoryview(b"axbx")[::2]):
        message, back = there_and_back(PLAIN, obj)
        assert message.tag == BYTES_TAG
        assert back == b"ab"
    assert PLAIN.encode("x")[0] == PLAIN_TAG


ARRAYS = [
    np.arange(6, dtype=np.int16).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(20)[::3],
    np.array(2.0, np.float32),
    np.zeros((0, 3), np.float16),
    np.array([True, False]),
    np.array(["2020-01-01"], "M8[D]"),
    np.array([1j]),
    np.array([b"ab"], ">S2"),
]


@pytest.mark.parametrize("codec", [TRUSTED, PLAIN])
@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{list(a.shape)}")
def test_arrays(codec: Codec, array: np.ndarray[Any, Any]) -> None:
    cases: list[tuple[Any, Callable[[Any], Any]]] = [
        (array, lambda x: x),
        (Arrays(array, [array]), lambda x: x.array),
        (Arrays(np.ones(1), {"a": array}), lambda x: x.rest["a"]),
    ]
    for wrapped, unwrap in cases:
        message, back = there_and_back(codec, wrapped)
        assert message.tag in (BUFFER_TAG, 2)
        got = unwrap(back)
        np.testing.assert_array_equal(got, array)
        assert got.dtype == array.dtype
        assert got.shape == array.shape
        assert got.flags.writeable
        assert len(message.head) < 200, "the content travels beside the message"


def test_odd_arrays_go_through_pickle() -> None:
    for array in (np.array([{}, None]), np.zeros(2, [("a", "i4"), ("b", "f8")])):
        message, back = there_and_back(TRUSTED, array)
        assert message.tag == PICKLE_TAG
        np.testing.assert_array_equal(back, array)
        with pytest.raises(UsageError):
            PLAIN.encode(array)


DTYPES = [
    torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float32, torch.int64, torch.uint8,
    torch.bool, torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 2)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(max(1, 12)).to(dtype)[: int(np.prod(shape))].reshape(shape)
    for codec in (TRUSTED, PLAIN):
        message, back = there_and_back(codec, tensor)
        assert message.tag == BUFFER_TAG
        assert back.dtype == dtype
        assert back.shape == tensor.shape
        assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    _, nested = there_and_back(TRUSTED, {"x": (tensor, np.ones(2))})
    assert torch.equal(nested["x"][0].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_tensor_kinds() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    parameter = torch.nn.Parameter(base.clone())
    _, back = there_and_back(PLAIN, parameter)
    assert isinstance(back, torch.nn.Parameter)
    assert back.requires_grad
    for view in (base.t(), base[:, 1], torch.complex(base, base).conj(), base.clone().requires_grad_()):
        _, back = there_and_back(PLAIN, view)
        assert torch.equal(back, view)
        assert back.requires_grad == view.requires_grad
    message, back = there_and_back(TRUSTED, base.to_sparse())
    assert message.tag == PICKLE_TAG
    assert torch.equal(back.to_dense(), base)


def test_raw_fields_do_not_point_into_the_ring() -> None:
    sent = Borrowing([{"a": msgspec.Raw(msgspec.msgpack.encode("kept"))}])
    _, back = there_and_back(PLAIN, sent)
    assert msgspec.msgpack.decode(back.inner[0]["a"]) == "kept"


def test_a_hook_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_hooks", dict(hooks._hooks))
    hooks.register(BufferHook("fractions", lambda f: ([f.denominator], memoryview(bytes([f.numerator]))), _fraction))
    from fractions import Fraction

    assert there_and_back(PLAIN, Fraction(3, 7))[1] == Fraction(3, 7)
    hooks._by_type.clear()


def _fraction(facts: Any, buffer: Any) -> Any:
    from fractions import Fraction

    return Fraction(buffer[0], facts[0])


def test_bad_tags() -> None:
    with pytest.raises(InternalError, match="codec tags must be"):
        Codec({0: Note}, trusted=True)
    with pytest.raises(InternalError, match="one per class"):
        Codec({1: Note, 2: Note}, trusted=True)
    with pytest.raises(InternalError, match="tag 99"):
        TRUSTED.decode(99, memoryview(b""), ())


def test_wrong_type_in_a_field() -> None:
    message = Message(*PLAIN.encode(Arrays(np.ones(1))))
    other = Codec({2: msgspec.defstruct("Other", [("array", torch.Tensor), ("rest", Any, None)])}, trusted=False)
    with pytest.raises(msgspec.ValidationError, match="expected a Tensor"):
        other.decode(2, memoryview(message.head), [bytearray(message.buffers[0])])
