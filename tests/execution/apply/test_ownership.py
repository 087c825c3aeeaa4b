"""What a function returns is copied, unless nobody else has its memory."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from geneva import udf
from geneva.execution.apply.batch import Applier
from geneva.execution.apply.ownership import is_only_here
from geneva.execution.apply.preparing import _parts
from geneva.execution.apply.tensors import is_tensor
from geneva.on_error import skip_on_error

ROWS, WIDTH = 4, 3
VECTOR = pa.list_(pa.float32(), WIDTH)
KEPT = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
SEEN: list[int] = []
HELD: list[Any] = []


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def fresh() -> np.ndarray[Any, Any]:
    return KEPT + 1


def seen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    SEEN.append(address(array))
    return array


@lru_cache
def remembered() -> np.ndarray[Any, Any]:
    return fresh()


def held(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    HELD.append(array)
    return array


def iterated() -> np.ndarray[Any, Any]:
    HELD.append(generator := (array for array in [fresh()]))
    return next(generator)  # the generator goes on to hold it


def watched() -> np.ndarray[Any, Any]:
    HELD.append(weakref.ref(array := fresh()))
    return array


def view_of_watched() -> np.ndarray[Any, Any]:
    return watched()[:]


def misaligned() -> np.ndarray[Any, Any]:
    memory = np.zeros(ROWS * WIDTH * 4 + 1, dtype=np.uint8)
    return memory[1:].view(np.float32).reshape(ROWS, WIDTH)


def applied(function: Callable[[], Any]) -> pa.Array:
    @udf(data_type=VECTOR)
    def vectors(x: pa.Array) -> np.ndarray[Any, Any]:
        return seen(function())

    values = Applier(vectors, pa.field("v", VECTOR)).apply(pa.record_batch({"x": range(ROWS)}))
    assert values.type == VECTOR
    return values


def is_as_it_was(values: pa.Array) -> bool:
    return bool(values.values.buffers()[1].address == SEEN[-1])


@pytest.mark.parametrize(
    ("function", "stays"),
    [
        (fresh, True),
        (lambda: fresh().reshape(-1).reshape(ROWS, WIDTH), True),
        (lambda: KEPT, False),
        (lambda: KEPT[:], False),
        (lambda: KEPT.reshape(-1).reshape(ROWS, WIDTH), False),
        (remembered, False),
        (lambda: held(fresh()), False),
        (lambda: held(fresh())[:], False),
        (iterated, False),
        (watched, False),
        (view_of_watched, False),
        (lambda: np.frombuffer(bytes(ROWS * WIDTH * 4), np.float32).reshape(ROWS, WIDTH), False),
        (lambda: np.zeros((100 * ROWS, WIDTH), np.float32)[:ROWS], False),  # keeps all of it
        (misaligned, False),
    ],
)
def test_only_what_nobody_else_has_is_not_copied(
    function: Callable[[], Any], *, stays: bool
) -> None:
    expected = np.array(function()).tolist()
    values = applied(function)
    assert values.to_pylist() == expected
    assert is_as_it_was(values) is stays


def test_memory_that_is_used_again_leaves_earlier_values_alone() -> None:
    buffer = np.zeros((ROWS, WIDTH), np.float32)

    @udf(data_type=VECTOR)
    def vectors(x: pa.Array) -> np.ndarray[Any, Any]:
        buffer[:] = x.to_numpy()[:, None]
        return buffer[: len(x)]

    applier = Applier(vectors, pa.field("v", VECTOR))
    batches = [pa.record_batch({"x": [n] * ROWS}) for n in range(5)]
    found = [applier.apply(batch) for batch in batches]
    assert [values.to_pylist() for values in found] == [[[n] * WIDTH] * ROWS for n in range(5)]


@pytest.mark.parametrize(
    "returned",
    [
        np.zeros((ROWS, WIDTH), np.float64),
        np.asfortranarray(fresh()),
        fresh()[::-1],
    ],
)
def test_other_arrays_are_taken_as_before(returned: np.ndarray[Any, Any]) -> None:
    @udf(data_type=pa.list_(pa.float64(), WIDTH))
    def vectors(x: pa.Array) -> np.ndarray[Any, Any]:
        return returned.copy(order="K")

    applier = Applier(vectors, pa.field("v", pa.list_(pa.float64(), WIDTH)))
    values = applier.apply(pa.record_batch({"x": range(ROWS)}))
    assert values.to_pylist() == returned.astype(np.float64).tolist()


def test_an_array_without_dimensions_is_refused_as_what_it_is() -> None:
    @udf(data_type=pa.float64(), on_error=skip_on_error())
    def squeezed(x: pa.Array) -> np.ndarray[Any, Any]:
        return np.array(x, np.float64).squeeze()

    applier = Applier(squeezed, pa.field("v", pa.float64()))
    assert applier.apply(pa.record_batch({"x": [1, 2]})).to_pylist() == [1.0, 2.0]
    applied = applier.run(pa.record_batch({"x": [1]}))
    assert applied.arrays[0].to_pylist() == [None]
    (failure,) = applied.failures
    assert failure.exception_type == "UDFOutputError"
    assert "one value per row" in failure.message


def test_tensors_of_torch() -> None:
    torch = pytest.importorskip("torch")
    kept = torch.arange(ROWS * WIDTH, dtype=torch.float32).reshape(ROWS, WIDTH)
    assert is_only_here([kept + 1])
    with torch.inference_mode():
        assert is_only_here([(kept + 1).mean(dim=0, keepdim=True).float().cpu().reshape(-1)])
    assert not is_only_here([(kept + 1).requires_grad_()]), "keeps what it was made from"
    assert not is_only_here([torch.empty(1, device="meta")]), "is elsewhere"
    assert not is_only_here([kept])
    assert not is_only_here([kept.detach()])
    assert not is_only_here([kept[:2]])
    assert not is_only_here([torch.zeros(100, WIDTH)[:2]]), "keeps all of it"
    held_tensor, watched = kept + 1, kept + 1
    assert not is_only_here([held_tensor])
    observer = weakref.ref(watched)
    box = [watched]
    del watched
    assert not is_only_here(box)
    assert observer() is not None
    exported, listed = kept + 1, kept + 1
    array, storage = np.from_dlpack(exported), listed.untyped_storage()
    boxes = [exported], [listed]
    del exported, listed
    assert not any(map(is_only_here, boxes))
    assert array is not None
    assert storage is not None


def test_tensors_over_memory_of_others() -> None:
    torch = pytest.importorskip("torch")
    kept, kept_bytes = np.zeros((ROWS, WIDTH), np.float32), bytearray(ROWS * WIDTH * 4)
    kept_tensor = torch.zeros(ROWS, WIDTH)
    for tensor in (
        lambda: torch.from_numpy(kept),
        lambda: torch.from_dlpack(kept),
        lambda: torch.from_dlpack(kept_tensor),
        lambda: torch.frombuffer(kept_bytes, dtype=torch.float32),
        lambda: torch.zeros(ROWS, WIDTH).share_memory_(),
    ):
        assert not is_only_here([tensor()])
        assert not is_only_here([tensor().numpy()])


def test_a_function_may_write_into_memory_that_torch_and_numpy_share() -> None:
    torch = pytest.importorskip("torch")
    kept = np.zeros((ROWS, WIDTH), np.float32)

    @udf(data_type=VECTOR)
    def as_array(x: pa.Array) -> np.ndarray[Any, Any]:
        return torch.from_numpy(kept).add_(1).numpy()

    @udf(data_type=VECTOR)
    def as_tensor(x: pa.Array) -> Any:
        return torch.from_numpy(kept).add_(1)

    batch = pa.record_batch({"x": [*range(ROWS)]})
    for function in (as_array, as_tensor):
        kept[:] = 0
        applier = Applier(function, pa.field("v", VECTOR))
        first, second = applier.apply(batch), applier.apply(batch)
        assert first.to_pylist() == [[1.0] * WIDTH] * ROWS
        assert second.to_pylist() == [[2.0] * WIDTH] * ROWS


def test_tensors_count_as_their_values() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.full((WIDTH,), 1.5, requires_grad=True)
    numbers = pa.field("v", pa.float32()), pa.field("v", VECTOR)

    def batches(x: pa.Array) -> Any:
        return weight * torch.ones(len(x), WIDTH)

    def half_width(x: pa.Array) -> Any:
        return (weight * torch.ones(len(x), WIDTH)).to(torch.bfloat16)

    def rows(x: int) -> Any:
        return weight * 1

    def listed(x: pa.Array) -> Any:
        return list(batches(x))

    def single(x: int) -> Any:
        return (weight * 1).sum() / WIDTH

    batch = pa.record_batch({"x": [*range(ROWS)]})
    for function in (batches, half_width, rows, listed):
        made = Applier(udf(data_type=VECTOR)(function), numbers[1]).apply(batch)
        assert made.to_pylist() == [[1.5] * WIDTH] * ROWS, function.__name__
    made = Applier(udf(data_type=pa.float32())(single), numbers[0]).apply(batch)
    assert made.to_pylist() == [1.5] * ROWS

    def reused(x: int) -> Any:
        with torch.no_grad():
            return shared.add_(1)

    shared = weight * 0  # has a history: it can't be copied by `copy.deepcopy`
    made = Applier(udf(data_type=VECTOR)(reused), numbers[1]).apply(batch)
    assert made.to_pylist() == [[float(i + 1)] * WIDTH for i in range(ROWS)]


def test_a_tensor_without_values_is_the_functions_failure() -> None:
    torch = pytest.importorskip("torch")

    @udf(data_type=VECTOR, on_error=skip_on_error())
    def empty(x: pa.Array) -> Any:
        return torch.ones(len(x), WIDTH, device="meta")

    applied = Applier(empty, pa.field("v", VECTOR)).run(pa.record_batch({"x": [1]}))
    assert applied.arrays[0].to_pylist() == [None]
    (failure,) = applied.failures
    assert "meta tensor" in failure.message


def test_torch_that_is_being_imported_is_none_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert is_only_here([fresh()])
    assert not is_tensor(fresh())
    assert _parts({"a": fresh()}), "what is prepared ahead is pickled meanwhile, too"


def test_a_tensor_without_rows_is_the_functions_failure() -> None:
    torch = pytest.importorskip("torch")

    @udf(data_type=VECTOR, on_error=skip_on_error())
    def nested(x: pa.Array) -> Any:
        return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])

    applied = Applier(nested, pa.field("v", VECTOR)).run(pa.record_batch({"x": [1, 2]}))
    assert applied.arrays[0].to_pylist() == [None, None]
