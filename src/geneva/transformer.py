"""Functions and chunkers, where programs for Geneva on Ray import them from."""

from geneva.udf.chunker import Chunker, chunker
from geneva.udf.declare import UDF, UDFArgType, udf

__all__ = ["UDF", "Chunker", "UDFArgType", "chunker", "udf"]
