"""A batch is let go of with its values, and not at the next garbage collection.

That one may be far away: it counts objects, of which a batch of large values has few.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from geneva import skip_on_error
from geneva.execution.apply.batch import Applier
from geneva.udf.declare import udf


def scalar(x: int) -> int:
    return x + 1


def failing(x: int) -> int:
    if x == 3:
        raise ValueError(x)
    return x


async def waiting(x: int) -> int:
    return x + 1


def array(x: pa.Array) -> pa.Array:
    return pc.add(x, 1)


def failing_array(x: pa.Array) -> pa.Array:
    if 3 in x.to_pylist():
        raise ValueError(x)
    return pc.add(x, 1)


async def waiting_array(x: pa.Array) -> pa.Array:
    return pc.add(x, 1)


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("threads", [None, 3])
@pytest.mark.parametrize(
    "function", [scalar, failing, waiting, array, failing_array, waiting_array]
)
def test_a_batch_is_let_go_of(function: Callable[..., Any], threads: int | None) -> None:
    policy = skip_on_error() if "failing" in function.__name__ else None
    declared = udf(function, data_type=pa.int64(), on_error=policy)
    with Applier(declared, pa.field("y", pa.int64()), threads) as applier:
        batch = pa.record_batch({"x": pa.array(range(100))})
        seen = weakref.ref(batch)
        values = applier.run(batch).arrays
        assert len(values[0]) == 100
        del batch, values
        assert seen() is None
