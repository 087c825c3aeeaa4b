"""The functions of computed columns, in the table's `_udfs` folder, by the digest of their bytes.

A branch or a clone has those that were declared on it; the others are where it comes from.

Only `load_udf` turns stored bytes into code: on workers, and here to verify or preview.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import lru_cache, partial
from weakref import WeakValueDictionary

import pyarrow as pa
from lance.file import LanceFileSession

from geneva.background import in_background
from geneva.errors import UDFIntegrityError, UntrustedFunctionError
from geneva.model.computation import Permit
from geneva.model.tables import TableRef
from geneva.storage.lance.damage import is_damage, is_missing
from geneva.storage.lance.dataset import base_refs
from geneva.udf.declare import UDF, deserialize_udf, serialize_udf, udf_digest
from geneva.udf.job_modules import job_modules
from geneva.udf.reading import source_text

_SCHEMA = pa.schema([("pickled_udf", pa.large_binary()), ("source", pa.large_string())])
"""Only the first is covered by the digest. The source is what its author left for readers."""


def _udf_session(ref: TableRef) -> LanceFileSession:
    return LanceFileSession(f"{ref.uri}/_udfs", storage_options=ref.storage_options.plain())


def stage_udf(ref: TableRef, udf: UDF) -> str:
    """Store a function under the digest of its bytes; nothing refers to it yet."""
    data = serialize_udf(udf)
    digest = udf_digest(data)
    _stage(ref, digest, data, source_text(udf))
    return digest


def copy_udf(source: TableRef, target: TableRef, digest: str) -> None:
    """Store a table's function beside another table, as it is: no code is made of it."""
    _stage(target, digest, read_function(source, digest), read_source(source, digest))


def _stage(ref: TableRef, digest: str, data: bytes, text: str) -> None:
    session = _udf_session(ref)
    name = f"{digest}.lance"
    if not session.contains(name):
        writer = session.open_writer(name, schema=_SCHEMA)
        row = {"pickled_udf": [data], "source": [text]}
        writer.write_batch(pa.record_batch(row, schema=_SCHEMA))
        writer.close()


def load_udf(ref: TableRef, digest: str, permit: Permit | None) -> UDF:
    """Read a function and make it code again: the only way from a table to code.

    Not without the driver's permit for these very bytes, and not unless they are what was stored.
    """
    check_permit(ref, digest, permit)
    return _load(ref, digest, job_modules())


def check_permit(ref: TableRef, digest: str, permit: Permit | None) -> None:
    """Refuse a function that the driver has not let run."""
    if permit is None or permit.digest != digest:
        raise UntrustedFunctionError(
            f"The function of table {ref.name!r} stored as _udfs/{digest} came to a worker without "
            "its driver's permit. It was not loaded."
        )


def fetch_ahead(ref: TableRef, digest: str) -> None:
    """Begin to read a function that is about to be loaded: of a store it is some requests."""
    if ref.is_remote and (digest, job_modules()) not in _LOADED:
        read = partial(read_function, ref, digest)
        _FETCHING[ref, digest] = in_background("geneva-function", read)


_FETCHING: dict[tuple[TableRef, str], Future[bytes]] = {}
"""Functions on their way. One that is not needed after all stays, until it is fetched again."""


@lru_cache(maxsize=32)
def _load(ref: TableRef, digest: str, modules: tuple[str, ...]) -> UDF:
    loaded = _LOADED.get((digest, modules))
    if loaded is not None:  # from another table: the digest is that of the very same bytes
        return loaded
    fetching = _FETCHING.pop((ref, digest), None)
    data = fetching.result() if fetching is not None else read_function(ref, digest)
    return _LOADED.setdefault((digest, modules), deserialize_udf(data, digest))


_LOADED: WeakValueDictionary[tuple[str, tuple[str, ...]], UDF] = WeakValueDictionary()
"""Tables that store the same function share it: a worker loads its model once.

By its digest, and the modules of the job: a function remembers what it has imported.
"""


def forget_functions() -> None:
    """Let functions be loaded anew: with them goes what they keep in their globals and caches."""
    _load.cache_clear()
    _LOADED.clear()


def read_function(ref: TableRef, digest: str) -> bytes:
    """The bytes of a stored function, which are not checked and not loaded."""
    return bytes(_read(ref, digest).column(0)[0].as_py())


def read_source(ref: TableRef, digest: str) -> str:
    """The source text that was stored beside a function. Nothing proves that it is the same."""
    stored = _read(ref, digest)
    return str(stored.column("source")[0].as_py() or "") if "source" in stored.column_names else ""


def _read(ref: TableRef, digest: str) -> pa.Table:
    try:
        return _read_from(ref, digest)
    except BaseException as error:
        if not is_damage(error):
            raise
        raise UDFIntegrityError(
            f"The function of table {ref.name!r} stored as _udfs/{digest} can't be read: {error}. "
            "Declare it again with alter_columns."
        ) from error


def _read_from(ref: TableRef, digest: str) -> pa.Table:
    name = f"{digest}.lance"
    try:
        return _udf_session(ref).open_reader(name).read_all().to_table()
    except BaseException as error:
        if not is_missing(error):
            raise
        others = (_udf_session(base) for base in base_refs(ref))
        session = next((other for other in others if other.contains(name)), None)
        if session is None:
            raise
        return session.open_reader(name).read_all().to_table()
