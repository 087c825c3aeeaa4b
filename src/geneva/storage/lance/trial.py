"""Whether a table's file format can hold a column at all: tried out, and not looked up."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
from lance.file import LanceFileReader, LanceFileWriter

from geneva.storage.lance.damage import is_damage


@lru_cache(maxsize=256)
def why_not_storable(version: str, kind: pa.DataType) -> str | None:
    """What Lance says against NULL in a column of this type, in a format; None: nothing.

    A column that is added is NULL until it is computed. Where its format can't write that, every
    update and every compaction of the table fails.
    """
    try:
        nulls = _one_null(kind)
    except (pa.ArrowException, NotImplementedError):
        return None  # nothing to try it with
    try:
        with tempfile.TemporaryDirectory(prefix="geneva-trial-") as folder:
            path = str(Path(folder, "trial.lance"))
            writer = LanceFileWriter(path, pa.schema([pa.field("x", kind)]), version=version)
            writer.write_batch(pa.record_batch([nulls], names=["x"]))
            writer.close()
            found = LanceFileReader(path).read_all().to_table().column(0)
    except BaseException as error:
        if not is_damage(error) and not isinstance(error, NotImplementedError):
            raise
        return str(error).split(", /")[0]
    return None if found.null_count == 1 else "NULL comes back as a value"


def _one_null(kind: pa.DataType) -> pa.Array:
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, pa.nulls(1, kind.storage_type))
    return pa.nulls(1, kind)
