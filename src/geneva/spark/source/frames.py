"""Data frames over tables, and the registration that they need. Imports pyspark when called."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from geneva.errors import UserInputError
from geneva.model.tables import Secrets, TableRef
from geneva.render.text import one_line
from geneva.spark.sessions import as_own_session, compiling_queries
from geneva.spark.source.options import ReadOptions
from geneva.storage.lance.damage import is_damage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_registered: WeakKeyDictionary[SparkSession, dict[tuple[str, Secrets], str]] = WeakKeyDictionary()


def register(
    spark: SparkSession,
    *,
    storage_options: Mapping[str, str] | None = None,
    name: str = "geneva",
) -> None:
    """Make Lance tables readable and writable in a Spark session, classic or Connect.

    After it: `spark.read.format("geneva").load("DB/table.lance")`. Each session is registered by
    itself; a classic one also in each thread that writes, since Spark looks there for formats.

    Args:
        spark: The session.
        storage_options: Keys and settings of the object store. They are in no plan, page or log of
            Spark's.
        name: The format's name, for a session that reads from several stores.
    """
    if not name.replace("_", "").isalnum():
        raise UserInputError(f"A format's name has letters, digits and underscores, not {name!r}.")
    _register(compiling_queries(spark), name, Secrets(storage_options))


def _register(spark: SparkSession, name: str, storage_options: Secrets) -> None:
    from geneva.spark.source.source import source_class

    with as_own_session(spark):
        spark.dataSource.register(source_class(name, storage_options, str(Path.cwd())))


def read_frame(spark: SparkSession, ref: TableRef, options: ReadOptions) -> DataFrame:
    """One version of a table as a data frame. What can't be read is refused here."""
    from geneva.spark.source.reader import PinnedTable, table_schema

    assert isinstance(options.version, int)
    table_schema(PinnedTable(ref, options.version, options, secrets.token_hex(8)))
    compiling_queries(spark)
    reader = spark.read.format(_format_of(spark, ref)).options(**options.as_texts())
    return reader.load(ref.uri)


def make_views(
    spark: SparkSession,
    names: Sequence[str],
    read: Callable[[str], DataFrame],
    required: Collection[str],
) -> list[str]:
    """Make temporary views of tables, under their own names, for SQL; return the names.

    A table that can't be one is left out, with a warning in the name of who asked for the views,
    unless it is `required`.
    """
    for twins in _clashing_names(spark, names):
        why = (
            f"Tables {' and '.join(map(repr, twins))} are left out: their names differ in case "
            "only, and are one to Spark. Name one of them (names=[...]), or set "
            "spark.sql.caseSensitive to true."
        )
        if any(name in required for name in twins):
            raise UserInputError(why)
        warnings.warn(why, UserWarning, stacklevel=3)
        names = [name for name in names if name not in twins]
    made = []
    for name in names:
        try:
            frame = read(name)
        except BaseException as error:
            is_its_own = isinstance(error, UserInputError)
            if name in required or not (is_its_own or is_damage(error)):
                raise
            why = str(error) if is_its_own else one_line(error)
            warnings.warn(f"Table {name!r} is left out: {why}", UserWarning, stacklevel=3)
            continue
        frame.createOrReplaceTempView("`" + name.replace("`", "``") + "`")
        made.append(name)
    return made


def _clashing_names(spark: SparkSession, names: Sequence[str]) -> list[list[str]]:
    """Names of views that differ, and are one to Spark, since it doesn't look at their case."""
    if str(spark.conf.get("spark.sql.caseSensitive", "false")).lower() == "true":
        return []
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        groups.setdefault(name.lower(), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _format_of(spark: SparkSession, ref: TableRef) -> str:
    """The format that reads a table. Spark shows its name where it shows what is scanned."""
    known = _registered.setdefault(spark, {})
    key = (ref.name, ref.storage_options)
    if key not in known:
        # With keys, a name of its own: another connection may have others for the same table.
        own = f":{secrets.token_hex(4)}" if ref.storage_options else ""
        _register(spark, f"geneva:{ref.name}{own}", ref.storage_options)
        known[key] = f"geneva:{ref.name}{own}"
    return known[key]
