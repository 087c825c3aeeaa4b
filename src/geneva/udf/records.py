"""Functions whose result is a record: the fields of it, and the columns that these become."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import pyarrow as pa

from geneva.errors import InvalidUDFError
from geneva.udf.types import UnclearTypeError, arrow_type_of, expanded, hints_of, optional_member

if TYPE_CHECKING:
    from geneva.udf.declare import UDF

OutputSchema: TypeAlias = pa.Schema | pa.StructType | Sequence[pa.Field]


class SeveralColumns:
    """Marks the annotation of a function that fills one column per field of its record."""

    def __repr__(self) -> str:
        """Name it as it is written."""
        return "geneva.Columns"


SEVERAL_COLUMNS = SeveralColumns()

_Record = TypeVar("_Record")

Columns = Annotated[_Record, SEVERAL_COLUMNS]
"""`-> Columns[Size]`: the function returns a `Size`, and each field of that is a column.

`Size` is a NamedTuple, a dataclass or a TypedDict. For a type checker it is just `Size`.
"""


@dataclass(frozen=True, slots=True)
class UnpackedUDF:
    """A UDF that returns `Columns[...]`, with a prefix for the names of its columns."""

    udf: UDF
    prefix: str | None = None

    def __post_init__(self) -> None:
        """Refuse what has no columns to unpack."""
        if not getattr(self.udf, "unpacks", False):
            raise InvalidUDFError(
                f"UnpackedUDF takes a UDF that returns several columns (`-> geneva.Columns[...]`, "
                f"or output_schema=...), not {self.udf!r}."
            )
        if not isinstance(self.prefix, str | None):
            raise InvalidUDFError(f"prefix={self.prefix!r} must be a string.")

    def test(self, table: Any, n: int = 5, *, where: str | None = None) -> Any:
        """Try the function on `n` rows of a table, in this process: `table.preview(udf, n)`."""
        return table.preview(self, n, where=where)

    @property
    def columns(self) -> dict[str, pa.Field]:
        """The columns that it fills, by name, and the fields of the record that they are."""
        return {f"{self.prefix or ''}{field.name}": field for field in self.udf.outputs}


@dataclass(frozen=True, slots=True)
class Record:
    """What a function that fills several columns returns."""

    type: pa.StructType
    optional: tuple[str, ...] = ()
    """Fields that a result may leave out: they are NULL then."""


def annotated_record(name: str, annotation: Any) -> Record | None:
    """The record of a `Columns[...]` annotation; None where it is another one."""
    record = _inside(annotation)
    if record is None:
        return None
    record = optional_member(record)
    if isinstance(record, typing.TypeVar):
        raise _unclear(name, "geneva.Columns names no record")
    try:
        struct = arrow_type_of(record)
    except UnclearTypeError as error:
        raise _unclear(name, str(error)) from None
    if not pa.types.is_struct(struct):
        raise _unclear(name, f"{record} is no record")
    return Record(checked_record("UDF", name, struct), _optional_fields(record))


def _optional_fields(record: Any) -> tuple[str, ...]:
    """The keys that a TypedDict may leave out; of other records none."""
    if not typing.is_typeddict(record):
        return ()
    hints = hints_of(record)
    marks = {name: str(typing.get_origin(hint)).rpartition(".")[2] for name, hint in hints.items()}
    # Python overlooks the marks of annotations that are texts.
    loose = {name for name in record.__optional_keys__ if marks.get(name) != "Required"}
    return tuple(name for name in hints if marks[name] == "NotRequired" or name in loose)


def _unclear(name: str, reason: str) -> InvalidUDFError:
    return InvalidUDFError(
        f"UDF '{name}': can't tell its columns, because {reason}. Annotate it "
        f"`-> geneva.Columns[T]`, where T is a NamedTuple, a dataclass or a TypedDict, or pass "
        f"output_schema=pa.schema([...])."
    )


def _inside(annotation: Any) -> Any:
    """T of `Columns[T]`, and of `Columns[T] | None`; None where it is another annotation."""
    annotation = optional_member(expanded(annotation))
    if typing.get_origin(annotation) is not Annotated:
        return None
    is_marked = any(isinstance(mark, SeveralColumns) for mark in annotation.__metadata__)
    return annotation.__origin__ if is_marked else None


def declared_record(
    what: str, name: str, schema: Any, option: str = "output_schema"
) -> pa.StructType:
    """A record as it was given: a schema, a struct, or a list of fields."""
    if isinstance(schema, pa.DataType):
        if not pa.types.is_struct(schema):
            raise InvalidUDFError(
                f"{what} '{name}': {option} is the struct of one row, not {schema}."
            )
        return checked_record(what, name, schema)
    try:
        struct = pa.struct(list(schema))
    except (TypeError, pa.ArrowException) as error:
        raise InvalidUDFError(
            f"{what} '{name}': {option} is a pa.schema([...]), not {schema!r}."
        ) from error
    return checked_record(what, name, struct)


def checked_record(what: str, name: str, struct: pa.StructType) -> pa.StructType:
    """A record, if it has fields, and no two of one name."""
    names = [field.name for field in struct]
    if not names or len({field.lower() for field in names}) < len(names):
        raise InvalidUDFError(
            f"{what} '{name}': a record needs one or more columns, whose names differ in more than "
            f"upper and lower case, not {names}."
        )
    return struct
