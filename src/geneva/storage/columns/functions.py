"""The functions of computed columns, in the table's `_udfs` folder, by the digest of their bytes.

A branch or a clone has those that were declared on it; the others are where it comes from.

Only `load_udf` turns stored bytes into code, and only workers call it.
"""

from __future__ import annotations

from functools import lru_cache

import pyarrow as pa
from lance.file import LanceFileSession

from geneva.errors import UDFIntegrityError
from geneva.model.tables import TableRef
from geneva.storage.lance.damage import is_damage
from geneva.storage.lance.dataset import base_refs
from geneva.udf.declare import UDF, deserialize_udf, serialize_udf, udf_digest


def _udf_session(ref: TableRef) -> LanceFileSession:
    return LanceFileSession(f"{ref.uri}/_udfs", storage_options=ref.storage_options.plain())


def stage_udf(ref: TableRef, udf: UDF) -> str:
    """Store a function under the digest of its bytes; nothing refers to it yet."""
    data = serialize_udf(udf)
    digest = udf_digest(data)
    _stage(ref, digest, data)
    return digest


def copy_udf(source: TableRef, target: TableRef, digest: str) -> None:
    """Store a table's function beside another table, as it is: no code is made of it."""
    _stage(target, digest, _read(source, digest))


def _stage(ref: TableRef, digest: str, data: bytes) -> None:
    session = _udf_session(ref)
    name = f"{digest}.lance"
    if not session.contains(name):
        schema = pa.schema([pa.field("pickled_udf", pa.large_binary())])
        writer = session.open_writer(name, schema=schema)
        writer.write_batch(pa.record_batch([pa.array([data], pa.large_binary())], schema=schema))
        writer.close()


@lru_cache(maxsize=32)
def load_udf(ref: TableRef, digest: str) -> UDF:
    """Read a function and make it code again, after checking that it is what was stored."""
    return deserialize_udf(_read(ref, digest), digest)


def _read(ref: TableRef, digest: str) -> bytes:
    try:
        name = f"{digest}.lance"
        session = _udf_session(ref)
        if not session.contains(name):
            others = (_udf_session(base) for base in base_refs(ref))
            session = next((other for other in others if other.contains(name)), session)
        return bytes(session.open_reader(name).read_all().to_table().column(0)[0].as_py())
    except BaseException as error:
        if not is_damage(error):
            raise
        raise UDFIntegrityError(
            f"The function of table {ref.name!r} stored as _udfs/{digest} can't be read: {error}. "
            "Declare it again with alter_columns."
        ) from error
