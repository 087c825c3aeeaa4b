"""What is asked of a load, checked against table and source before anything is written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from geneva.errors import (
    ColumnChangedError,
    ColumnNotFoundError,
    TypeMismatchError,
    UserInputError,
)
from geneva.execution.backfill.subjects import SourceCheck
from geneva.execution.load.source import LoadSource
from geneva.model.computation import Computation, Input, Load, StagedKeys
from geneva.model.sql import missing_column
from geneva.model.tables import OnMissing, TableRef
from geneva.options import JobOptions
from geneva.render.text import did_you_mean
from geneva.storage.columns.definitions import bound_output, read_computed_columns
from geneva.storage.columns.publish import verify_column
from geneva.storage.lance.casts import Unfit, check_castable
from geneva.storage.lance.dataset import (
    Dataset,
    TableSnapshot,
    check_column_name,
    refuse_names_of_lance,
    refuse_taken_name,
    refuse_two_of_a_name,
)
from geneva.storage.lance.fragments import holds_blob
from geneva.storage.lance.trial import why_not_storable
from geneva.storage.loads.files import check_columns
from geneva.storage.loads.staging import SourceSchema
from geneva.storage.views.definition import read_view, visible_schema
from geneva.storage.views.explode import query_columns
from geneva.udf.types import is_binary, is_text


@dataclass(frozen=True, slots=True, eq=False)
class LoadRequest:
    """What was asked for."""

    source: LoadSource
    key: str
    columns: tuple[str, ...]
    on_missing: OnMissing
    options: JobOptions

    @property
    def version(self) -> str:
        """The same for the same source, columns and rule: what a loaded file is named after."""
        asked = [self.source.fingerprint, self.key, *self.columns, self.on_missing.value]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def read_request(
    source: LoadSource, pk: Any, columns: Any, on_missing: Any, options: JobOptions
) -> LoadRequest:
    """Check what a user gave, as far as that can be without the table."""
    if not isinstance(pk, str) or not pk:
        raise UserInputError(f"pk must be the name of one column, not {pk!r}.")
    if not isinstance(columns, str | Sequence):
        raise UserInputError(f"columns must be names of columns, not {columns!r}.")
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UserInputError(f"columns must be names of columns, not {columns!r}.")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserInputError(f"Column {twice!r} is named twice in columns.")
    if pk in names:
        raise UserInputError(f"Column {pk!r} is the key: it can't be loaded as well.")
    try:
        rule = OnMissing(on_missing)
    except ValueError:
        known = [rule.value for rule in OnMissing]
        raise UserInputError(
            f"on_missing must be {', '.join(map(repr, known))}, not {on_missing!r}."
            f"{did_you_mean(str(on_missing), known)}"
        ) from None
    return LoadRequest(source, pk, names, rule, options)


def check_request(ref: TableRef, dataset: Dataset, request: LoadRequest) -> SourceSchema:
    """Refuse what can't be loaded; return the columns of the source, in the table's types."""
    source, table = request.source, visible_schema(dataset.schema)
    check_columns(source.schema, [request.key, *request.columns], source.name)
    if request.key not in table.names:
        raise ColumnNotFoundError(missing_column(request.key, table))
    key = pa.field(request.key, _plain_type(table.field(request.key).type), nullable=False)
    _check_key(ref, key, source)
    view = read_view(dataset.schema)
    filled = query_columns(ref, view.query) if view is not None else set()
    computed = {column.name: column.expression for column in read_computed_columns(dataset.schema)}
    values = []
    for name in request.columns:
        if name in computed:
            raise UserInputError(
                f"Column {name!r} of table {ref.name!r} is computed, by {computed[name]}: what "
                "was loaded into it would be computed over. Load into a column of another name, "
                f"or drop this one first, with drop_columns([{name!r}])."
            )
        if name in filled:
            raise UserInputError(
                f"Column {name!r} of view {ref.name!r} comes from its query. Load it into the "
                "table that the view is of, and refresh the view."
            )
        if name in table.names:
            values.append(_existing(ref, table.field(name), request))
        else:
            refuse_two_of_a_name([field.name for field in values], name)
            values.append(_new(ref, dataset, name, source))
    return SourceSchema(key, tuple(values))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """A type without dictionary: as values are staged."""
    return kind.value_type if pt.is_dictionary(kind) else kind


def _check_key(ref: TableRef, key: pa.Field, source: LoadSource) -> None:
    given = _plain_type(source.schema.field(key.name).type)
    for kind, where in ((key.type, f"table {ref.name!r}"), (given, source.name)):
        if not _can_be_key(kind):
            raise TypeMismatchError(
                f"Column {key.name!r} of {where} can't be a key: it is {kind}. Keys are whole "
                "numbers, texts, bytes, decimals, dates and times."
            )
    _check_castable(given, key, f"{source.name}, the key of table {ref.name!r}")


def _can_be_key(kind: pa.DataType) -> bool:
    return bool(
        pt.is_integer(kind)
        or is_text(kind)
        or is_binary(kind)
        or pt.is_fixed_size_binary(kind)
        or pt.is_decimal(kind)
        or pt.is_date(kind)
        or pt.is_time(kind)
        or pt.is_timestamp(kind)
    )


def _check_castable(given: pa.DataType, field: pa.Field, where: str) -> None:
    try:
        check_castable(given, field.type)
    except (Unfit, pa.ArrowException) as error:
        raise TypeMismatchError(
            f"Column {field.name!r} of {where}: {error}. Cast it in the source."
        ) from None


def _existing(ref: TableRef, field: pa.Field, request: LoadRequest) -> pa.Field:
    source = request.source
    given = source.schema.field(field.name)
    _refuse_kind(field, f"table {ref.name!r}")
    _refuse_kind(given, source.name)
    if not field.nullable and request.on_missing is OnMissing.NULL:
        raise UserInputError(
            f"Column {field.name!r} of table {ref.name!r} can't be NULL, as on_missing='null' "
            "would make it in rows that the source has no key for."
        )
    staged = pa.field(field.name, _plain_type(field.type), nullable=field.nullable)
    where = f"{source.name}, for table {ref.name!r}"
    _check_castable(given.type, staged, where)
    lacking = _lacking(given.type, staged.type)
    if lacking is not None:
        raise TypeMismatchError(
            f"Column {field.name!r} of {where}: it has no field {lacking!r}. A load replaces whole "
            f"values: what rows have in {lacking!r} would be lost. Put the field into the source, "
            "or load into a column of another name."
        )
    return staged


def _lacking(given: pa.DataType, kind: pa.DataType) -> str | None:
    """A field of the structs in a type that those of another one don't have, by its path."""
    given, kind = _plain_type(given), _plain_type(kind)
    if isinstance(given, pa.BaseExtensionType) or isinstance(kind, pa.BaseExtensionType):
        return None
    if pt.is_struct(kind) and pt.is_struct(given):
        there = {field.name: field.type for field in given}
        for field in kind:
            if field.name not in there:
                return str(field.name)
            below = _lacking(there[field.name], field.type)
            if below is not None:
                return f"{field.name}.{below}"
        return None
    if pt.is_nested(kind) and pt.is_nested(given):
        pairs = zip(_inside(given), _inside(kind), strict=True)
        return next((found for pair in pairs if (found := _lacking(*pair)) is not None), None)
    return None


def _inside(kind: pa.DataType) -> list[pa.DataType]:
    """The types of the items of a list, or of the keys and values of a map."""
    return [kind.key_type, kind.item_type] if pt.is_map(kind) else [kind.value_type]


def _new(ref: TableRef, dataset: Dataset, name: str, source: LoadSource) -> pa.Field:
    check_column_name(name)
    refuse_names_of_lance([name])
    if name in dataset.schema.names:
        raise UserInputError(f"Column {name!r} of table {ref.name!r} is Geneva's own.")
    refuse_taken_name(ref.name, dataset.schema, name)
    given = source.schema.field(name)
    _refuse_kind(given, source.name)
    kind = _plain_type(_stored_type(given.type))
    problem = why_not_storable(str(dataset.data_storage_version), kind)
    if problem is None and pt.is_null(kind):
        problem = "all of it is NULL, so that nobody knows the type. Add the column first"
    if problem is not None:
        raise TypeMismatchError(
            f"Column {name!r} of {source.name} is {given.type}, which table {ref.name!r}, of "
            f"storage version {dataset.data_storage_version}, can't hold: {problem}."
        )
    return pa.field(name, kind)


def _stored_type(kind: pa.DataType) -> pa.DataType:
    """A type as tables have it: views of texts and bytes are a layout in memory."""
    if pt.is_string_view(kind):
        return pa.string()
    return pa.binary() if pt.is_binary_view(kind) else kind


def _holds_json(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return kind.extension_name.endswith(".json")
    below = (kind.field(i).type for i in range(kind.num_fields)) if pt.is_nested(kind) else ()
    return any(map(_holds_json, below))


def _refuse_kind(field: pa.Field, where: str) -> None:
    """Refuse columns that can't be stored as they are, or are something else when read back."""
    if pt.is_run_end_encoded(field.type):
        raise TypeMismatchError(
            f"Column {field.name!r} of {where} is {field.type}, which tables don't have. Decode it "
            "in the source, with pyarrow.compute.run_end_decode."
        )
    if _holds_json(field.type):
        raise TypeMismatchError(
            f"Column {field.name!r} of {where} is {field.type}, JSON, which load_columns can't "
            "load. Load it as string, into a column of another name."
        )
    if holds_blob(field):
        raise UserInputError(
            f"Column {field.name!r} of {where} is a blob column, which load_columns can't load. "
            "Load it as large_binary, into a column of another name."
        )


# ------------------------------------------------------------------------------------ the subject


@dataclass(frozen=True, slots=True)
class LoadSubject:
    """Columns of a table that are filled from a staged source."""

    ref: TableRef
    key: str
    columns: tuple[str, ...]
    version: str
    program: Load

    @classmethod
    def of(cls, ref: TableRef, request: LoadRequest, keys: StagedKeys) -> LoadSubject:
        """What was asked for, as a computation."""
        program = Load(keys, request.on_missing)
        return cls(ref, request.key, request.columns, request.version, program)

    def bind(self, dataset: Dataset, snapshot: TableSnapshot) -> Computation:
        """The computation at one version of the table."""
        missing = [n for n in (self.key, *self.columns) if n not in snapshot.field_ids]
        if missing:
            raise ColumnChangedError(
                f"Column {missing[0]!r} of table {self.ref.name!r} was dropped or renamed while "
                "columns were being loaded. Look at the table, then load them again."
            )
        outputs = tuple(bound_output(snapshot, name) for name in self.columns)
        identity = ["load_columns", *((output.name, output.field_ids) for output in outputs)]
        computation = Computation(
            id=hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
            name=", ".join(self.columns),
            version=self.version,
            outputs=outputs,
            program=self.program,
            inputs=(Input(self.key, snapshot.field_ids[self.key]),),
        )
        verify_column(snapshot.schema, self.ref, computation)
        return computation

    def source_check(self, dataset: Dataset, computation: Computation) -> SourceCheck | None:
        """There is no source table."""
        return None
