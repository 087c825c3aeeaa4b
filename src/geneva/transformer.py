"""Functions and chunkers, where programs for Geneva on Ray import them from."""

from geneva.udf.chunker import Chunker, chunker
from geneva.udf.declare import UDF, UDFArgType, udf
from geneva.udf.table_function import UDTF, udtf

__all__ = ["UDF", "UDTF", "Chunker", "UDFArgType", "chunker", "udf", "udtf"]
