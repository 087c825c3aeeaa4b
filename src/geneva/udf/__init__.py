"""Functions of the user: declaring them, calling them, their inputs, types and policy."""

from geneva.udf.declare import UDF, udf

__all__ = ["UDF", "udf"]
