"""Columns of every type that Lance stores, with the values that are hard to keep."""

from __future__ import annotations

import datetime
import decimal
import uuid

import lance
import numpy as np
import pandas as pd
import pyarrow as pa
from lance.arrow import bfloat16_array

D = decimal.Decimal


def columns() -> dict[str, pa.Array]:
    """Three rows each; the last one is NULL."""
    texts = pa.array(["a", "", None])
    return {
        "bool": pa.array([True, False, None]),
        "int8": pa.array([-(2**7), 2**7 - 1, None], pa.int8()),
        "int16": pa.array([-(2**15), 2**15 - 1, None], pa.int16()),
        "int32": pa.array([-(2**31), 2**31 - 1, None], pa.int32()),
        "int64": pa.array([-(2**63), 2**63 - 1, None], pa.int64()),
        "uint8": pa.array([0, 2**8 - 1, None], pa.uint8()),
        "uint16": pa.array([0, 2**16 - 1, None], pa.uint16()),
        "uint32": pa.array([0, 2**32 - 1, None], pa.uint32()),
        "uint64": pa.array([0, 2**64 - 1, None], pa.uint64()),
        "half": pa.array([1.5, float("-inf"), None], pa.float16()),
        "float": pa.array([0.1, -0.0, None], pa.float32()),
        "double": pa.array([0.1, float("inf"), None], pa.float64()),
        "bfloat16": bfloat16_array([1.5, -2.0, None]),
        "text": texts,
        "large_text": pa.array(["é\0x", "", None], pa.large_string()),
        "bytes": pa.array([b"\0\xff", b"", None], pa.binary()),
        "large_bytes": pa.array([b"\0\xff", b"", None], pa.large_binary()),
        "fixed_bytes": pa.array([b"ab", b"cd", None], pa.binary(2)),
        "date32": pa.array([-719162, 2932896, None], pa.date32()),
        "date64": pa.array([-86_400_000, 86_400_000, None], pa.date64()),
        **{
            f"timestamp_{unit}_{'zone' if zone else 'local'}": pa.array(
                [-1_000, 1_600_000_000_000 if unit != "s" else 1_600_000_000, None],
                pa.timestamp(unit, zone),
            )
            for unit in ("s", "ms", "us", "ns")
            for zone in (None, "Europe/Berlin")
        },
        "time32": pa.array([0, 86_399, None], pa.time32("s")),
        "time64": pa.array([1_001, 86_399_999_999_999, None], pa.time64("ns")),
        "duration_s": pa.array([-1, 10**12, None], pa.duration("s")),
        "duration_ns": pa.array([-1_000, 10**18, None], pa.duration("ns")),
        "decimal": pa.array([D("-1.50"), D("99999999.99"), None], pa.decimal128(10, 2)),
        "decimal38": pa.array([D(10) ** 37, D(1), None], pa.decimal128(38, 0)),
        "decimal256": pa.array([D("1.5"), D("-2.25"), None], pa.decimal256(38, 2)),
        "decimal_hundreds": pa.array([D("1500"), D("-200"), None], pa.decimal128(5, -2)),
        "nothing": pa.nulls(3),
        "dictionary": texts.dictionary_encode(),
        "list": pa.array([[1, None], [], None], pa.list_(pa.uint8())),
        "large_list": pa.array([["x", None], [], None], pa.large_list(pa.large_string())),
        "vector": pa.array([[1.0, 2.0], [0.5, -1.0], None], pa.list_(pa.float16(), 2)),
        "matrix": pa.array([[[1, 2], [3, 4]], [], None], pa.list_(pa.list_(pa.int32(), 2))),
        "map": pa.array([[("a", 1), ("b", None)], [], None], pa.map_(pa.string(), pa.uint32())),
        "struct": pa.array(
            [{"n": 1, "inner": {"texts": ["x", None]}}, {"n": None, "inner": None}, None],
            pa.struct(
                [("n", pa.uint64()), ("inner", pa.struct([("texts", pa.list_(pa.string()))]))]
            ),
        ),
        "structs": pa.array(
            [[{"k": "a"}, None], [], None],
            pa.list_(pa.struct([("k", pa.dictionary(pa.int8(), pa.string()))])),
        ),
        "uuid": pa.ExtensionArray.from_storage(
            pa.uuid(), pa.array([b"a" * 16, b"b" * 16, None], pa.binary(16))
        ),
        "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1}', "[]", None])),
        "tensor": pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.float32(), [2]),
            pa.array([[1.0, 2.0], [3.0, 4.0], None], pa.list_(pa.float32(), 2)),
        ),
    }


def write(uri: str) -> lance.LanceDataset:
    """A table of all of them in two fragments; the second one has a row of NULLs only."""
    table = pa.table(columns())
    # Not slices: Lance's writer panics on those of structs in structs.
    lance.write_dataset(table.take([0, 1]), uri)
    return lance.write_dataset(table.take([2]), uri, mode="append")


def plain(value: object) -> object:
    """A value as it can be compared, whatever type it was stored in: times as nanoseconds."""
    match value:
        case None | bool() | str() | bytes():
            return value
        case int() | float():
            return D(value)
        case uuid.UUID():
            return value.bytes
        case np.ndarray():
            return plain(value.tolist())
        case dict():
            return {key: plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case pd.Timestamp() | pd.Timedelta():
            return value.value
        case datetime.datetime():
            epoch = datetime.datetime(1970, 1, 1, tzinfo=value.tzinfo and datetime.UTC)
            return plain(value - epoch)
        case datetime.timedelta():
            return value // datetime.timedelta(microseconds=1) * 1_000
    return D(str(value)) if type(value).__name__ == "BFloat16" else value
