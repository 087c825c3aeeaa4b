"""Declaring computed columns: what is refused, what is stored. Metadata only; no UDF runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import pyarrow as pa

from geneva.errors import (
    ColumnNotFoundError,
    InvalidUDFError,
    TypeMismatchError,
    UserInputError,
)
from geneva.execution.backfill.subjects import ColumnSubject
from geneva.execution.column_changes import refuse_hidden, top_name
from geneva.model.computation import MakePermit
from geneva.model.sql import check_readable
from geneva.model.tables import ColumnDefinition, TableRef
from geneva.model.view_query import CHUNKS
from geneva.planning.graph import find_cycle
from geneva.storage.columns.definitions import (
    FunctionSource,
    columns_of,
    commit_new_columns,
    commit_pinned,
    commit_redefinitions,
    define_columns,
    define_sibling,
    group_definitions,
    known_paths,
    not_defined,
    read_definition,
    read_definitions,
    redefine_column,
    required_definition,
    unsure_input,
    with_kept_version,
    with_present_inputs,
)
from geneva.storage.columns.dictionaries import has_narrow_dictionary
from geneva.storage.columns.functions import load_udf, stage_udf
from geneva.storage.lance.blobs import stored_field
from geneva.storage.lance.dataset import (
    Dataset,
    FieldsNow,
    check_column_name,
    has_path,
    open_dataset,
    read_snapshot,
    refuse_names_of_lance,
    refuse_taken_name,
    refuse_two_of_a_name,
)
from geneva.storage.lance.fragments import holds_blob, is_blob
from geneva.storage.lance.trial import why_not_storable
from geneva.storage.views.definition import (
    ViewKind,
    present_definitions,
    reads_source,
    view_kind,
    visible_schema,
)
from geneva.udf.chunker import Chunker
from geneva.udf.declare import UDF, resolve_inputs, serialize_udf, udf_digest, with_fingerprint
from geneva.udf.records import UnpackedUDF
from geneva.udf.table_function import UDTF
from geneva.udf.transforms import NewColumns, NewFunction, as_udf, refuse_several
from geneva.udf.types import value_type

Declare: TypeAlias = Callable[[ColumnDefinition], ColumnDefinition]
"""Adds to a definition who declares it, signed where the connection has a key."""


def as_it_is(definition: ColumnDefinition) -> ColumnDefinition:
    """Add nothing to a definition."""
    return definition


def add_udf_columns(
    ref: TableRef, columns: Sequence[NewColumns], declare: Declare = as_it_is
) -> None:
    """Add computed columns in one commit, NULL everywhere.

    Of a function of several columns that the table has some of, just the missing ones are added: to
    those that it fills already.
    """
    dataset = open_dataset(ref)
    schema, fields = dataset.schema, FieldsNow.of(dataset)
    _refuse_lancedb_view(ref, schema)
    present = present_definitions(dataset)
    added = set[str]()
    resolved: list[tuple[NewColumns, tuple[str, ...], ColumnDefinition | None]] = []
    for new in columns:
        known = _group_to_join(new, schema, present.values()) if new.udf.unpacks else None
        if known is not None:
            _refuse_doubt(ref, known)
            new = replace(new, names=_missing(new, known, present.values()))
        for name, field in new.fields.items():
            _check_new_column(ref, dataset, name, field, new.udf)
            refuse_two_of_a_name(added, name)
            added.add(name)
        inputs = inputs_of(new.udf, new.input_columns, schema, new.names) if known is None else ()
        resolved.append((new, known.inputs if known is not None else inputs, known))
    _refuse_cycles(
        ref, dataset, {name: inputs for new, inputs, _ in resolved for name in new.names}
    )
    if any(known is not None for _, _, known in resolved):
        # What a group reads is written down alike for all of its columns.
        commit_pinned(ref, partial(_present_paths, {k.computation_id for _, _, k in resolved if k}))
        dataset = open_dataset(ref)
        present = present_definitions(dataset)
    definitions: list[ColumnDefinition] = []
    for new, inputs, known in resolved:
        if known is not None:
            known = present[known.name]
            definitions += [
                define_sibling(known, f.name, _made(new, f.name)) for f in new.fields.values()
            ]
            continue
        udf = with_fingerprint(new.udf)
        source = FunctionSource(inputs, stage_udf(ref, udf), _reads_all(new))
        definitions += define_columns(fields, new.names, udf, source, new.prefix)
    commit_new_columns(
        dataset, [declare(_stored(dataset, definition)) for definition in definitions]
    )
    for new, _, _ in resolved:
        warn_of_narrow_dictionaries(ref, {name: f.type for name, f in new.fields.items()})


def _present_paths(
    ids: Collection[str], definition: ColumnDefinition, fields: FieldsNow
) -> tuple[str, ...] | None:
    """Where the inputs of a column are; None: of one that is of no interest, or of a view's."""
    if definition.computation_id not in ids or reads_source(definition.arrow_field):
        return None
    return known_paths(definition, fields)


def _stored(dataset: Dataset, definition: ColumnDefinition) -> ColumnDefinition:
    """The definition of a new column, of the type that the table's format has for it."""
    return replace(definition, arrow_field=stored_field(dataset, definition.arrow_field))


def _made(new: NewColumns, name: str) -> pa.Field:
    """The field of the function's record that a column holds."""
    return next(field for field in new.udf.outputs if field.name == new.names[name])


def _group_to_join(
    new: NewColumns, schema: pa.Schema, present: Collection[ColumnDefinition]
) -> ColumnDefinition | None:
    """A column of the group that a function's columns are added to; None: they are a new group.

    This very function fills it, from the same inputs, and something of its record is missing there:
    no two columns of a group hold the same. Of several groups it is the one that has most of the
    other columns under their names.
    """
    groups = [
        known
        for known in present
        if known.group
        and known.prefix == new.prefix
        and known.udf_version == new.udf.version
        and _missing(new, known, present)
    ]
    # Of all columns that there were: which ones is written down.
    same = [known for known in groups if known.reads_all] if _reads_all(new) else []
    if groups and not same:
        inputs = inputs_of(new.udf, new.input_columns, schema, new.names)
        same = [known for known in groups if known.inputs == inputs]

    def named_alike(known: ColumnDefinition) -> int:
        return sum(c.group == known.group and c.name in new.names for c in present)

    return max(same, key=named_alike, default=None)


def _reads_all(new: NewColumns | NewFunction) -> bool:
    """Whether neither the call nor the function says which columns it reads."""
    return new.input_columns is None and new.udf.input_columns is None


def _missing(
    new: NewColumns, known: ColumnDefinition, present: Iterable[ColumnDefinition]
) -> dict[str, str]:
    """The columns of a function that a group has not got, under any name."""
    there = {column.output for column in present if column.group == known.group}
    return {name: output for name, output in new.names.items() if output not in there}


def _check_new_column(
    ref: TableRef,
    dataset: Dataset,
    name: str,
    field: pa.Field,
    udf: UDF,
) -> None:
    refuse_names_of_lance([name])
    check_column_name(name)
    if name.startswith("__"):
        raise UserInputError(
            f"Column name {name!r} can't start with '__': such names are Geneva's own, and hidden."
        )
    refuse_blob_inside(name, field)
    _refuse_unstorable(ref, dataset, name, field)
    refuse_taken_name(
        ref.name,
        dataset.schema,
        name,
        f" UnpackedUDF({udf.name}, prefix=...) gives its columns other names."
        if udf.unpacks
        else "",
    )


def warn_of_narrow_dictionaries(ref: TableRef, kinds: Mapping[str, pa.DataType]) -> None:
    """Warn of columns that a write by others can make unreadable, in the name of who asked us."""
    for name, kind in kinds.items():
        if has_narrow_dictionary([kind]):
            warnings.warn(
                f"Column {name!r} of table {ref.name!r} is of type {kind}. Lance joins "
                "the dictionaries of rows that it writes together: a later compaction or update by "
                "other means than Geneva's compact_files and optimize, can make the table "
                "unreadable. Use int32 indices instead.",
                UserWarning,
                stacklevel=4,
            )


def refuse_blob_inside(name: str, made: pa.Field) -> None:
    """A function may return blobs, but none inside of structs or lists."""
    if holds_blob(made) and not is_blob(made):
        raise InvalidUDFError(
            f"Column {name!r} can't be of type {made.type}: there are blobs inside of it. A "
            "function returns one blob per row, or plain large_binary values inside of structs."
        )
    if is_blob(made) and made.type != pa.large_binary():
        raise InvalidUDFError(
            f"Column {name!r} can't be a blob column (lance-encoding:blob) of type {made.type}: "
            "declare it with data_type=pa.large_binary()."
        )


def _refuse_unstorable(ref: TableRef, dataset: Dataset, name: str, field: pa.Field) -> None:
    """Refuse a type that the table's format can't hold."""
    kind = field.type
    if is_blob(field):
        return
    problem = why_not_storable(str(dataset.data_storage_version), kind)
    if problem is not None:
        raise InvalidUDFError(
            f"Column {name!r} can't be of type {kind} in table {ref.name!r}, of storage version "
            f"{dataset.data_storage_version}: {problem}. Compute a column of another type, or "
            "make the table anew with a later data_storage_version."
        )


def _refuse_lancedb_view(ref: TableRef, schema: pa.Schema) -> None:
    """Refuse to compute columns of one of LanceDB's own views: it refreshes none with others."""
    if view_kind(schema) is ViewKind.LANCEDB:
        raise UserInputError(
            f"{ref.name!r} is a view of LanceDB's own, which computes its columns itself "
            f"(open_materialized_view({ref.name!r}).refresh()), and could not be refreshed any "
            "more with one that is computed here. Make a view of a query instead, which can have "
            "such columns: create_materialized_view(name, table.search(None).select(...))."
        )


def alter_udf_columns(
    ref: TableRef, columns: Mapping[str, NewFunction], declare: Declare = as_it_is
) -> None:
    """Give columns other UDFs, in one commit. Their values stay until the next backfill.

    A column that is filled together with others gets a function of all of them.
    """
    dataset = open_dataset(ref)
    _refuse_lancedb_view(ref, dataset.schema)
    commit_redefinitions(dataset, _redefined(ref, dataset, columns, declare))


def _redefined(
    ref: TableRef, dataset: Dataset, columns: Mapping[str, NewFunction], declare: Declare
) -> list[ColumnDefinition]:
    """The columns with their new functions, which are stored; nothing refers to them yet."""
    schema = dataset.schema
    fields, changes = FieldsNow.of(dataset), dict[str, ColumnDefinition]()
    existing = {name: _existing(schema, ref, name, new.udf) for name, new in columns.items()}
    together = {
        name: columns_of(schema, found) if found is not None else (name,)
        for name, found in existing.items()
    }
    fed = {
        name: inputs_of(new.udf, new.input_columns, schema, together[name])
        for name, new in columns.items()
    }
    _refuse_cycles(ref, dataset, {c: inputs for n, inputs in fed.items() for c in together[n]})
    for name, new in columns.items():
        current = existing[name]
        if current is not None and new.keep:
            _check_same_inputs(ref, with_present_inputs(current, fields), fed[name])
        udf = with_fingerprint(new.udf)
        source = FunctionSource(fed[name], stage_udf(ref, udf), _reads_all(new))
        if current is None:
            made = define_columns(fields, {name: ""}, udf, source)
            changed = [replace(column, own_field=fields.nodes[name]) for column in made]
        else:
            changed = [
                redefine_column(fields, column, udf, source, keep=new.keep)
                for column in group_definitions(schema, current)
            ]
        twice = [column.name for column in changed if column.name in changes]
        if twice:
            raise UserInputError(
                f"Column {twice[0]!r} of table {ref.name!r} would get two UDFs by this call: one "
                f"call of a UDF fills {', '.join(map(repr, together[name]))}. Give one of them."
            )
        changes |= {column.name: declare(column) for column in changed}
    return list(changes.values())


def declare_again(ref: TableRef, columns: Collection[str] | None, declare: Declare) -> list[str]:
    """Write down anew who declares functions, which stay as they are; return their columns."""
    dataset = open_dataset(ref)
    every = present_definitions(dataset).values()
    chosen = [d for d in every if columns is None or d.name in columns or d.udf_name in columns]
    ids = {d.computation_id for d in chosen}
    found = [d for d in every if d.computation_id in ids]
    if found:
        commit_redefinitions(dataset, [declare(definition) for definition in found])
    return [d.udf_name if d.name == CHUNKS else d.name for d in found]


def _check_same_inputs(ref: TableRef, current: ColumnDefinition, inputs: Sequence[str]) -> None:
    """Refuse to keep values of other inputs: when they go stale could not be told."""
    if tuple(inputs) != current.inputs:
        raise UserInputError(
            f"Values of column {current.name!r} of {ref.name!r} can be kept under another UDF only "
            f"if it reads the same columns in the same order. They were computed from "
            f"{list(current.inputs)}, and the new UDF reads {list(inputs)}. Name the columns with "
            "input_columns, or give the new UDF with alter_columns, without keep."
        )


def _refuse_cycles(ref: TableRef, dataset: Dataset, fed: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse columns that would be computed from each other."""
    reads = {
        name: definition.inputs
        for name, definition in present_definitions(dataset).items()
        if not reads_source(definition.arrow_field)
    }
    cycle = find_cycle({**reads, **fed})
    if cycle is not None:
        raise InvalidUDFError(
            f"Columns of table {ref.name!r} can't be computed from each other: "
            f"{' reads '.join(map(repr, cycle))}."
        )


def _existing(schema: pa.Schema, ref: TableRef, name: str, udf: UDF) -> ColumnDefinition | None:
    """The definition of a column that gets another function; None: it was a plain one."""
    if name not in schema.names:
        raise not_defined(schema, ref.name, name)
    current = read_definition(schema, name)
    if current is not None and current.group:
        _check_same_columns(ref, group_definitions(schema, current), udf)
        return current
    refuse_several(udf, name)
    kind = value_type(schema.field(name).type)
    if udf.data_type != kind:
        raise TypeMismatchError(
            f"Type mismatch for column {name!r}: it is {kind}, and UDF {udf.name!r} returns "
            f"{udf.data_type}. Declare the UDF with data_type={kind}, or drop the column and add "
            "it anew."
        )
    return current


def _check_same_columns(ref: TableRef, columns: Sequence[ColumnDefinition], udf: UDF) -> None:
    """Refuse a function that can't fill what another one fills together."""
    names = ", ".join(repr(column.name) for column in columns)
    made = {field.name: field.type for field in udf.outputs} if udf.unpacks else {}
    for column in columns:
        if column.output not in made:
            raise TypeMismatchError(
                f"Columns {names} of table {ref.name!r} are filled by one call: another UDF for "
                f"them returns geneva.Columns[...] with a field {column.output!r}, too, and UDF "
                f"{udf.name!r} has {list(made) or 'no fields'}. Add it, or drop column "
                f"{column.name!r} first."
            )
        if made[column.output] != column.arrow_field.type:
            raise TypeMismatchError(
                f"Type mismatch for column {column.name!r}: it is {column.arrow_field.type}, and "
                f"field {column.output!r} of UDF {udf.name!r} is {made[column.output]}. Declare "
                "the field with the column's type, or drop the column and add it anew."
            )


def inputs_of(
    udf: UDF, own: list[str] | None, schema: pa.Schema, columns: Collection[str]
) -> tuple[str, ...]:
    """The columns that a UDF reads to fill `columns`, checked against the table."""
    bound = udf.with_inputs(own) if own is not None else udf
    if bound.input_columns is None:
        made_of_it = _made_from(schema, columns)
        others = [field for field in visible_schema(schema) if field.name not in made_of_it]
        schema = pa.schema([field for field in others if not holds_blob(field)])
    found = resolve_inputs(bound, schema)
    check_readable([each.root for each in found], schema)
    inputs = tuple(each.path for each in found)
    for path in inputs:
        itself = next((c for c in columns if c in (path, path.split(".")[0])), None)
        if itself is not None:
            raise InvalidUDFError(f"Column {itself!r} can't be computed from itself.")
    return inputs


def _made_from(schema: pa.Schema, columns: Collection[str]) -> set[str]:
    """Some columns, and the computed columns that are made from them."""
    found, definitions = set(columns), read_definitions(schema)
    while more := {
        name
        for name, definition in definitions.items()
        if name not in found and any(top_name(path) in found for path in definition.inputs)
    }:
        found |= more
    return found


def function_to_try(
    ref: TableRef, dataset: Dataset, source: Any, permit: MakePermit
) -> tuple[UDF, tuple[str, ...]]:
    """The UDF that was given, or that of a computed column, and the columns that it reads."""
    if isinstance(source, str):
        definition = definition_for(ref, dataset, source, None, store=False)
        computation = ColumnSubject(ref, definition).bind(dataset, read_snapshot(dataset, ref))
        permitted = permit(ref, computation)
        stored = load_udf(ref, definition.udf_digest, permitted)
        return stored.with_inputs(computation.declared_paths), computation.input_paths
    maker, *inputs = source if isinstance(source, tuple | list) and source else (source,)
    if isinstance(maker, UDTF):
        raise InvalidUDFError(
            f"{maker!r} says itself what it reads: @udtf(input_columns=[...], partition_by=...)."
        )
    if isinstance(maker, Chunker):
        maker.check_bound()
        source = (maker.udf, *inputs) if inputs else maker.udf
    function = maker.udf if isinstance(maker, UnpackedUDF) else maker
    if not isinstance(function, UDF | Chunker):
        hint = " Decorate it with @udf." if callable(function) else ""
        raise InvalidUDFError(
            "What can be tried is a UDF, (udf, [input columns]), a chunker, a table function, or "
            f"the name of a computed column, not {type(function).__name__}.{hint}"
        )
    udf, own = as_udf("preview", source)
    paths = inputs_of(udf, own, visible_schema(dataset.schema), ())
    return udf.with_inputs(paths), paths


def check_column_was_there(ref: TableRef, dataset: Dataset, column: str) -> None:
    """Refuse an older version of a table from before a column was added."""
    if column in dataset.schema.names:
        return
    latest = open_dataset(ref)
    if column in latest.schema.names:
        raise ColumnNotFoundError(
            f"Column {column!r} did not exist yet in version {dataset.version} of table "
            f"{ref.name!r}: it was added later, and can't be computed as of then. Leave "
            f"read_version out, or give a version that has it (the latest is {latest.version})."
        )


def own_definition(
    ref: TableRef, schema: pa.Schema, fields: FieldsNow, column: str
) -> ColumnDefinition:
    """The definition that a computed column has, with its inputs as they are called now."""
    definition = with_present_inputs(required_definition(schema, ref.name, column), fields)
    if definition.doubt is None:  # else receipts may tell
        _check_inputs_present(definition, schema)
    return definition


def definition_for(
    ref: TableRef,
    dataset: Dataset,
    column: str,
    udf: UDF | tuple[UDF, Sequence[str]] | None,
    *,
    store: bool,
    retry_failed: bool = False,
    declare: Declare = as_it_is,
) -> ColumnDefinition:
    """The definition that a backfill goes by: the column's own, or one made of the given UDF.

    A plain column that is backfilled with a UDF becomes a computed one. With `retry_failed`, a UDF
    for one run is for the rows on which the column's own failed, and its values count as right.
    With `store=False`, for planning, nothing is written.
    """
    schema = dataset.schema
    fields = FieldsNow.of(dataset)
    refuse_hidden(ref, schema, [column])
    _refuse_lancedb_view(ref, schema)
    if column in schema.names and reads_source(schema.field(column)):
        raise UserInputError(
            f"Column {column!r} of view {ref.name!r} is computed from the view's source: use "
            "refresh(). (To change its UDF use alter_columns, then refresh.)"
        )
    if udf is None:
        return own_definition(ref, schema, fields, column)
    function, own = as_udf(column, udf)
    current = _existing(schema, ref, column, function)
    together = columns_of(schema, current) if current is not None else (column,)
    inputs = inputs_of(function, own, schema, together)
    _refuse_cycles(ref, dataset, dict.fromkeys(together, inputs))
    function = with_fingerprint(function)
    digest = stage_udf(ref, function) if store else udf_digest(serialize_udf(function))
    source = FunctionSource(inputs, digest, _reads_all(NewFunction(function, own)))
    if current is not None:
        override = declare(redefine_column(fields, current, function, source))
        if retry_failed:
            present = with_present_inputs(current, fields)
            _check_same_inputs(ref, present, inputs)
            override = _beside(current, override)
            if store:
                _keep_values_of(ref, column, override)
        return replace(override, overrides=True)
    (made,) = define_columns(fields, {column: ""}, function, source)
    definition = declare(replace(made, own_field=fields.nodes[column]))
    if store:
        commit_redefinitions(dataset, [definition])
    return definition


def _beside(current: ColumnDefinition, override: ColumnDefinition) -> ColumnDefinition:
    """Another function for some rows of a column, whose own function's values stay right."""
    kept = dict.fromkeys((*current.kept_versions, current.udf_version))
    kept.pop(override.udf_version, None)
    return replace(override, former_versions=current.former_versions, kept_versions=tuple(kept))


def _keep_values_of(ref: TableRef, column: str, override: ColumnDefinition) -> None:
    """Write down that values of a function for one run count as right."""
    dataset = open_dataset(ref)
    stored = read_definition(dataset.schema, column)
    if stored is None or stored.uuid != override.uuid:
        return
    version = override.udf_version
    every = group_definitions(dataset.schema, stored)
    kept = [(found, with_kept_version(found, version)) for found in every]
    changed = [now for before, now in kept if now != before]
    if changed:
        commit_redefinitions(dataset, changed)


def _refuse_doubt(ref: TableRef, definition: ColumnDefinition) -> None:
    if definition.doubt is not None:
        raise unsure_input(ref.name, definition, definition.doubt)


def _check_inputs_present(definition: ColumnDefinition, schema: pa.Schema) -> None:
    for path in definition.inputs:
        if not has_path(schema, path):
            raise ColumnNotFoundError(
                f"UDF expects input columns [{path!r}] which are not found in the table: column "
                f"{definition.name!r} is computed from it. Point the UDF at another column with "
                f'alter_columns({{"path": {definition.name!r}, "udf": ..., '
                '"input_columns": [...]}).'
            )


@dataclass(frozen=True, slots=True)
class OfQuery:
    """Other functions for columns that a view, or its hidden one, computes from a source."""

    ref: TableRef
    source: TableRef
    columns: Mapping[str, NewFunction]


def alter_view_columns(
    ref: TableRef,
    of_query: Sequence[OfQuery],
    own: Mapping[str, NewFunction],
    declare: Declare = as_it_is,
) -> None:
    """Give columns of a view's query, and those that it has besides (`own`), other functions.

    All are checked before the first one is changed.
    """
    datasets = {part.ref: open_dataset(part.ref) for part in of_query}
    changes = {
        part.ref: _redefined_of_query(part, datasets[part.ref], declare) for part in of_query
    }
    if own:
        view = datasets.setdefault(ref, open_dataset(ref))
        changes[ref] = [*changes.get(ref, []), *_redefined(ref, view, own, declare)]
    for changed, definitions in changes.items():
        commit_redefinitions(datasets[changed], definitions)


def _redefined_of_query(part: OfQuery, view: Dataset, declare: Declare) -> list[ColumnDefinition]:
    """The columns of a view's query, and those filled with them, with their new functions."""
    source = open_dataset(part.source)
    now, changes = FieldsNow.of(source), dict[str, ColumnDefinition]()
    for name, new in part.columns.items():
        current = _existing(view.schema, part.ref, name, new.udf)
        if current is None:
            raise InvalidUDFError(
                f"Column {name!r} of view {part.ref.name!r} is not computed by a UDF."
            )
        inputs = inputs_of(new.udf, new.input_columns, source.schema, (name,))
        if new.keep:
            _check_same_inputs(part.ref, current, inputs)
        udf = with_fingerprint(new.udf)
        made = FunctionSource(inputs, stage_udf(part.ref, udf))
        for column in group_definitions(view.schema, current):
            changes[column.name] = declare(redefine_column(now, column, udf, made, keep=new.keep))
    return list(changes.values())
