"""The functions that are timed: each runs as a UDF, and as it is in the plain loop."""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from geneva import udf

SLOW_SECONDS = 0.005


@udf(data_type=pa.float64())
def arrow(x: pa.Array) -> pa.Array:
    return pc.add(pc.multiply(x, 2.5), 1.0)


@udf
def scalar(x: float) -> float:
    return x * 2.5 + 1


@udf
def slow(x: float) -> float:
    time.sleep(SLOW_SECONDS)
    return x


@udf(data_type=pa.float32())
def norm(v: pa.Array) -> pa.Array:
    rows = v.flatten().to_numpy().reshape(len(v), -1)
    return pa.array(np.sqrt(np.einsum("ij,ij->i", rows, rows)))


def over_rows(function):
    """A function of one value as one of an array, the way a loop would write it."""
    return lambda array: pa.array([function(value) for value in array.to_pylist()], pa.float64())
