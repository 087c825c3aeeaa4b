"""The Spark types of Lance's columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.types as pt
from pyspark.sql import types as spark

from geneva.errors import TypeMismatchError
from geneva.storage.lance.casts import BFLOAT16
from geneva.storage.lance.scans import ROW_ADDRESS, ROW_ID
from geneva.udf.types import is_binary, is_list, is_text

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

_LEAVES = {
    pa.bool_(): spark.BooleanType(),
    pa.int8(): spark.ByteType(),
    pa.int16(): spark.ShortType(),
    pa.int32(): spark.IntegerType(),
    pa.int64(): spark.LongType(),
    pa.uint8(): spark.ShortType(),
    pa.uint16(): spark.IntegerType(),
    pa.uint32(): spark.LongType(),
    pa.uint64(): spark.DecimalType(20, 0),
    pa.float16(): spark.FloatType(),
    pa.float32(): spark.FloatType(),
    pa.float64(): spark.DoubleType(),
    pa.null(): spark.NullType(),
    pa.date32(): spark.DateType(),
    pa.date64(): spark.DateType(),
}
_MAX_PRECISION = 38


def spark_schema(schema: pa.Schema) -> StructType:
    """The schema that Spark sees. Everything may be NULL, as with all of Spark's file sources."""
    fields = []
    for field in schema:
        # Ids and addresses of rows are unsigned by type only.
        kind = pa.int64() if field.name in (ROW_ID, ROW_ADDRESS) else field.type
        try:
            fields.append(spark.StructField(field.name, spark_type(kind), nullable=True))
        except _NoSparkType as error:
            raise TypeMismatchError(
                f"Column {field.name!r} can't be read by Spark: {error} Leave it out: name the "
                "columns to read (columns=...)."
            ) from None
    return spark.StructType(fields)


class _NoSparkType(TypeError):
    """A type that Spark has no equal of."""


def spark_type(kind: pa.DataType) -> DataType:
    """The Spark type that holds every value of an Arrow type."""
    if isinstance(kind, pa.BaseExtensionType):
        plain = pa.float32() if kind.extension_name == BFLOAT16 else kind.storage_type
        return spark_type(plain)
    if kind in _LEAVES:
        return _LEAVES[kind]
    if pt.is_dictionary(kind):
        return spark_type(kind.value_type)
    if is_text(kind):
        return spark.StringType()
    if is_binary(kind):
        return spark.BinaryType()
    if pt.is_timestamp(kind):
        return spark.TimestampNTZType() if kind.tz is None else spark.TimestampType()
    if pt.is_time(kind):
        return spark.TimeType()
    if pt.is_duration(kind):
        return spark.DayTimeIntervalType()
    if pt.is_decimal(kind):
        return _decimal(kind)
    if is_list(kind):
        return spark.ArrayType(spark_type(kind.value_type))
    if pt.is_map(kind):
        return spark.MapType(spark_type(kind.key_type), spark_type(kind.item_type))
    if pt.is_struct(kind):
        return spark.StructType([spark.StructField(f.name, spark_type(f.type)) for f in kind])
    raise _NoSparkType(f"it is {kind}, which Spark has no type for.")


def _decimal(kind: pa.DataType) -> DataType:
    scale = max(0, kind.scale)
    precision = kind.precision + scale - kind.scale
    if precision > _MAX_PRECISION:
        raise _NoSparkType(
            f"it is {kind}, and Spark's decimals have at most {_MAX_PRECISION} digits. Values that "
            f"have fewer can be read with a schema of your own: DECIMAL({_MAX_PRECISION}, "
            f"{min(scale, _MAX_PRECISION)})."
        )
    return spark.DecimalType(precision, scale)


def plain_type(kind: DataType) -> DataType:
    """A type as it is read back: how strings are compared, and units and NOT NULL, are not kept."""
    match kind:
        case spark.StringType():
            return spark.StringType()
        case spark.DayTimeIntervalType():
            return spark.DayTimeIntervalType()
        case spark.TimeType():
            return spark.TimeType()
        case spark.ArrayType():
            return spark.ArrayType(plain_type(kind.elementType))
        case spark.MapType():
            return spark.MapType(plain_type(kind.keyType), plain_type(kind.valueType))
        case spark.StructType():
            fields = [spark.StructField(f.name, plain_type(f.dataType)) for f in kind]
            return spark.StructType(fields)
    return kind


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema that Spark wants batches in, exactly."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")
