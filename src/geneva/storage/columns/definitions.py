"""Computed columns: their definitions in field metadata. Reading a definition runs no user code."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import lance
import pyarrow as pa

from geneva.errors import ColumnChangedError, ColumnNotFoundError
from geneva.model.computation import (
    Computation,
    Input,
    Output,
    Resources,
    Udf,
    joined_name,
    receipt_name,
)
from geneva.model.tables import ColumnDefinition, CommitId, Doubt, Sizes, TableRef
from geneva.render.text import did_you_mean, listed, shown_columns
from geneva.storage.columns.following import Place, followed
from geneva.storage.columns.receipts import RECEIPT_TYPE
from geneva.storage.lance.commit import retry_conflicts
from geneva.storage.lance.dataset import (
    FieldsNow,
    TableSnapshot,
    has_path,
    nodes_of,
    open_dataset,
)
from geneva.storage.lance.history import MAX_COMMITS_BACK, SchemaSeen
from geneva.udf.declare import UDF
from geneva.udf.types import value_type

_PREFIX = "virtual_column"
_LANCEDB_COMPUTED = "computed_column"
"""Field metadata of LanceDB's own computed columns."""
LANCEDB_VIEW_KEY = b"mv.definition"
"""Schema metadata of LanceDB's own views. Their columns have the field metadata of the source's."""
_FORMAT = "geneva-spark/1"
_OPTIONS = ("num_cpus", "num_gpus", "memory", "timeout", "memoize", "auto_backfill", "manifest")
_MAX_FORMER_VERSIONS = 8
"""How many earlier versions of a column's UDF are kept, to say why its values are stale."""
_MAX_RETRIES = 20
RECEIPT_OF = "geneva.receipt_of"
"""Field metadata of a column of receipts: the UUID of the column that they are for."""


@dataclass(frozen=True, slots=True)
class ComputedColumn:
    """A computed column, whoever computes it."""

    name: str
    kind: str
    """`udf`: Geneva's, for `backfill`. `sql`, or another of LanceDB's: for `refresh_column`."""
    function: str
    """The function's name, or the expression."""
    inputs: tuple[str, ...]
    expression: str
    """The call, or the expression."""
    siblings: tuple[str, ...] = ()
    """The other columns that the same call fills."""
    doubt: Doubt | None = None
    """Where nobody can tell which column to read: jobs ask."""


@dataclass(frozen=True, slots=True)
class FunctionSource:
    """Where a function is stored, and what it is fed from."""

    inputs: tuple[str, ...]
    """Column paths, in the order of its parameters."""
    digest: str
    reads_all: bool = False
    """Whether no inputs were named: these are all columns that there are."""


def read_computed_columns(
    schema: pa.Schema, definitions: Mapping[str, ColumnDefinition] | None = None
) -> list[ComputedColumn]:
    """All computed columns of a table: Geneva's and LanceDB's own, in the table's order.

    `definitions` are Geneva's, where they are read already.
    """
    ours = read_definitions(schema) if definitions is None else definitions
    found = (_computed_column(schema, field, ours.get(field.name)) for field in schema)
    return [column for column in found if column is not None]


def _computed_column(
    schema: pa.Schema, field: pa.Field, own: ColumnDefinition | None
) -> ComputedColumn | None:
    if own is not None:
        call = f"{own.udf_name}({', '.join(own.inputs)})"
        call += f".{own.output}" if own.output else ""
        others = tuple(name for name in columns_of(schema, own) if name != own.name)
        return ComputedColumn(own.name, "udf", own.udf_name, own.inputs, call, others, own.doubt)
    stored = {k.decode(): v.decode() for k, v in (field.metadata or {}).items()}
    if _LANCEDB_COMPUTED not in stored:
        return None
    expression = stored.get(f"{_LANCEDB_COMPUTED}.expression", "")
    return ComputedColumn(
        name=field.name,
        kind=stored.get(f"{_LANCEDB_COMPUTED}.kind", "sql"),
        function=expression,
        inputs=tuple(json.loads(stored.get(f"{_LANCEDB_COMPUTED}.inputs", "[]"))),
        expression=expression,
    )


def define_columns(
    fields: FieldsNow, names: Mapping[str, str], udf: UDF, source: FunctionSource, prefix: str = ""
) -> list[ColumnDefinition]:
    """Describe new columns that one call of `udf` fills, each with an identity of its own.

    `names` are those of the columns, and of the fields of the function's record that they hold: of
    a function of one value just one, and no field. `fields` are those of the table that the inputs
    are in.
    """
    group = uuid.uuid4().hex if udf.unpacks else ""
    made = {field.name: field for field in udf.outputs}
    return [
        ColumnDefinition(
            name=name,
            arrow_field=new_field(name, made[output]),
            uuid=uuid.uuid4().hex,
            inputs=source.inputs,
            reads_all=source.reads_all,
            input_fields=_fields_behind(fields, source.inputs),
            fields_at=fields.history.newest,
            group=group,
            output=output,
            prefix=prefix,
            has_receipts=True,
            **_udf_part(udf, source.digest),
        )
        for name, output in names.items()
    ]


def define_sibling(known: ColumnDefinition, name: str, made: pa.Field) -> ColumnDefinition:
    """One more column of a group, filled by the same calls as `known`; `made` is what it holds."""
    return replace(
        known,
        name=name,
        arrow_field=new_field(name, made),
        uuid=uuid.uuid4().hex,
        output=made.name,
        own_field=None,
        has_receipts=True,
    )


def new_field(name: str, made: pa.Field) -> pa.Field:
    """The field of a new computed column.

    Lance adds columns as NULL, so that it is nullable whatever the function promises.
    """
    return pa.field(name, made.type, nullable=True, metadata=made.metadata or None)


def redefine_column(
    fields: FieldsNow,
    current: ColumnDefinition,
    udf: UDF,
    source: FunctionSource,
    *,
    keep: bool = False,
) -> ColumnDefinition:
    """The same column, computed by another function from the version of `fields` on.

    `keep`: what counts as right stays so. What an earlier change made stale is not revived by it,
    unless that was the change to this very function: then it is the change that keeps.
    """
    right = (*current.kept_versions, current.udf_version)
    if udf.version == current.udf_version:  # the last change once more
        right = tuple(dict.fromkeys((*current.right_before, *right)))
    known = (*current.former_versions, *right)
    kept = tuple(v for v in right if v != udf.version) if keep else ()
    former = tuple(dict.fromkeys(v for v in known if v not in (*kept, udf.version)))
    behind = _fields_behind(fields, source.inputs)
    is_same = (current.inputs, current.input_fields) == (source.inputs, behind)
    return replace(
        current,
        inputs_changed=current.inputs_changed or not is_same,
        inputs=source.inputs,
        input_names=(),
        reads_all=source.reads_all,
        input_fields=behind,
        own_field=fields.nodes.get(current.name),
        fields_at=fields.history.newest,
        former_versions=former[-_MAX_FORMER_VERSIONS:],
        kept_versions=kept,
        right_before=right,
        **_udf_part(udf, source.digest),
    )


def with_kept_version(definition: ColumnDefinition, version: str) -> ColumnDefinition:
    """The definition, by which values of one more version of the function count as right."""
    kept = dict.fromkeys((*definition.kept_versions, version))
    kept.pop(definition.udf_version, None)
    former = tuple(v for v in definition.former_versions if v != version)
    return replace(definition, former_versions=former, kept_versions=tuple(kept))


def _fields_behind(fields: FieldsNow, inputs: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    return tuple((fields.nodes[path], fields.kinds[path]) for path in inputs)


def with_present_inputs(definition: ColumnDefinition, fields: FieldsNow) -> ColumnDefinition:
    """The definition with its inputs as they are called now, and as they were called.

    An input is the field that had its name and id when these were written down. Where they don't
    lead to the same field any more, the schemas since then tell where it has gone (`followed`).
    Where some of these can't be read any more, its name and its id may mean different columns:
    then the definition has a `doubt`, which files and receipts may settle (`doubts.settled`).
    """
    definition = replace(definition, doubt=None) if definition.doubt is not None else definition
    if definition.own_field is None or _is_as_written(definition, fields):
        return definition
    if definition.fields_at is None:
        return _without_commit(definition, fields)
    changes = fields.history.changes_since(definition.fields_at)
    if changes.complete:
        return _placed(definition, followed(_places(definition), changes.schemas), fields)
    if changes.since_overwrite:
        return _as_overwritten(definition, changes.since_overwrite, fields)
    if _known_from(definition, fields) is None:
        return definition
    return _by_names_or_ids(definition, fields)


def by_history(definition: ColumnDefinition, fields: FieldsNow) -> ColumnDefinition:
    """The same for a definition without doubt, whose names and ids may agree by chance.

    A table that was overwritten in another order, and whose columns were renamed, may look as if
    nothing had happened. Where the history is gone, it is taken for that.
    """
    if definition.own_field is None or definition.fields_at is None:
        return definition
    changes = fields.history.changes_since(definition.fields_at)
    if not changes.complete:
        return definition
    return _placed(definition, followed(_places(definition), changes.schemas), fields)


def _is_as_written(definition: ColumnDefinition, fields: FieldsNow) -> bool:
    """Whether names and ids lead to the same fields as when they were written down."""
    found = tuple((fields.nodes.get(p), fields.kinds.get(p)) for p in definition.inputs)
    own = fields.nodes.get(definition.name)
    return (own, found) == (definition.own_field, definition.input_fields)


def _places(definition: ColumnDefinition) -> list[Place]:
    pairs = zip(definition.inputs, definition.input_fields, strict=True)
    return [(path, node) for path, (node, _) in pairs]


def _placed(
    definition: ColumnDefinition, paths: tuple[str, ...], fields: FieldsNow
) -> ColumnDefinition:
    """The definition with its inputs at these paths, and their ids if they are there."""
    there = all(path in fields.nodes and path in fields.kinds for path in paths)
    moved = fed_from(definition, paths)
    return rebound(moved, fields) if there else moved


def _without_commit(definition: ColumnDefinition, fields: FieldsNow) -> ColumnDefinition:
    """The same of an earlier release, which didn't say when ids were written down.

    It may have been after an overwrite: so ids count only where there was none since the column
    has its receipts.
    """
    paths = _by_ids(definition, fields)
    if paths != definition.inputs:
        changes = fields.history.changes_since(receipt_name(definition.uuid))
        if not changes.complete or changes.since_overwrite:
            return _by_names_or_ids(definition, fields)
    doubt = _cast_away(definition, fields)
    return fed_from(definition, paths) if doubt is None else replace(definition, doubt=doubt)


def _as_overwritten(
    definition: ColumnDefinition, schemas: Sequence[SchemaSeen], fields: FieldsNow
) -> ColumnDefinition:
    """The same where the table was overwritten, and nobody knows what was called how just before.

    By name it is the field that had its name then. By id it is the one in the same place, unless
    the column itself is in another.
    """
    first = replace(schemas[0], overwrote=False)
    by_name = followed(_places(definition), schemas)
    by_id = followed(_places(definition), (first, *schemas[1:]))
    if by_name == by_id or _known_from(definition, fields) is None:
        return _placed(definition, by_name, fields)
    doubt = _doubt(definition, by_name, [by_id], fields, overwritten=True)
    return replace(definition, doubt=doubt)


def _by_names_or_ids(definition: ColumnDefinition, fields: FieldsNow) -> ColumnDefinition:
    """The same where nobody knows whether ids mean what they meant."""
    paths = _by_ids(definition, fields)
    if paths == definition.inputs:
        return replace(definition, doubt=_cast_away(definition, fields))
    return replace(definition, doubt=_doubt(definition, definition.inputs, [paths], fields))


def _by_ids(definition: ColumnDefinition, fields: FieldsNow) -> tuple[str, ...]:
    """What the inputs are called now, by their field ids; those without one by their names.

    A field is gone where it was dropped or cast: a cast makes a new one.
    """
    receipts = _known_from(definition, fields)
    if receipts is None:
        return definition.inputs
    paths = []
    for path, field in zip(definition.inputs, definition.input_fields, strict=True):
        found = fields.named(field)
        # Lance gives the highest id away again once its column was dropped: such an id may be
        # the input's where another column has got its name.
        may_be_it = field[0] < receipts or path in fields.nodes
        paths.append(found if found is not None and may_be_it else path)
    return tuple(paths)


def _known_from(definition: ColumnDefinition, fields: FieldsNow) -> int | None:
    """The field id of a column's receipts: lower ones mean what they meant when it was declared.

    None: no ids do, because the column has another one, or no receipts.
    """
    is_own = definition.own_field == fields.nodes.get(definition.name)
    return fields.nodes.get(receipt_name(definition.uuid)) if is_own else None


def _cast_away(definition: ColumnDefinition, fields: FieldsNow) -> Doubt | None:
    """Inputs that may be cast and renamed, while older columns have got their names.

    A cast makes a new field in the old one's place, younger than the column's receipts, and before
    them. Where there is none, the input was dropped, and the one that has its name is read.
    """
    receipts = _known_from(definition, fields)
    if receipts is None:
        return None
    nodes = list(fields.nodes.items())
    before = nodes[: nodes.index((receipt_name(definition.uuid), receipts))]
    cast = [path for path, node in before if node > receipts]
    inputs = zip(definition.inputs, definition.input_fields, strict=True)
    gone = {
        path
        for path, field in inputs
        if fields.named(field) is None
        and fields.nodes.get(path, receipts) < receipts
        and fields.nodes[path] != field[0]
    }
    others = [tuple(new if p in gone else p for p in definition.inputs) for new in cast]
    if not gone or not cast:
        return None
    found = _doubt(definition, definition.inputs, others, fields)
    return found if len(gone) == 1 else replace(found, readings=())


def _doubt(
    definition: ColumnDefinition,
    by_name: tuple[str, ...],
    others: Sequence[tuple[str, ...]],
    fields: FieldsNow,
    *,
    overwritten: bool = False,
) -> Doubt:
    """The doubt about inputs that names and ids read differently."""
    unsure = [i for i, path in enumerate(by_name) if any(path != each[i] for each in others)]
    found = dict.fromkeys(each[i] for i in unsure for each in (by_name, *others))
    readings = tuple(r for r in (by_name, *others) if fields.nodes.keys() >= {*r})
    return Doubt(
        path=definition.inputs[unsure[0]],
        candidates=tuple(name for name in found if name in fields.nodes),
        readings=readings,
        by_name=by_name in readings,
        overwritten=overwritten,
    )


def unsure_input(table: str, definition: ColumnDefinition, doubt: Doubt) -> ColumnChangedError:
    """The error of a request for what can't be done while nobody knows which column to read."""
    candidates = " or ".join(map(repr, doubt.candidates))
    return ColumnChangedError(
        f"Column {definition.name!r} of table {table!r} is computed from {doubt.path!r}. Others "
        "have cast, renamed or moved columns since, and neither the history nor receipts tell "
        f"which one that is now ({candidates}). Say which column to read, with "
        f'alter_columns({{"path": {definition.name!r}, "udf": ..., "input_columns": [...]}}).'
    )


def fed_from(definition: ColumnDefinition, paths: tuple[str, ...]) -> ColumnDefinition:
    """The definition with its inputs under other names, and those that the function knows."""
    if paths == definition.inputs:
        return definition
    names = definition.input_names or definition.inputs
    return replace(definition, inputs=paths, input_names=names)


def columns_of(schema: pa.Schema, definition: ColumnDefinition) -> tuple[str, ...]:
    """The columns that are filled together with one, itself among them, in the table's order."""
    if not definition.group:
        return (definition.name,)
    return tuple(field.name for field in schema if _group_of(field) == definition.group)


def group_definitions(
    schema: pa.Schema, definition: ColumnDefinition
) -> tuple[ColumnDefinition, ...]:
    """The definitions of the columns that are filled together with one, as they are stored."""
    if not definition.group:
        return (definition,)
    found = (read_definition(schema, name) for name in columns_of(schema, definition))
    return tuple(each for each in found if each is not None)


def _group_of(field: pa.Field) -> str:
    return (field.metadata or {}).get(f"{_PREFIX}.group".encode(), b"").decode()


def computation_of(snapshot: TableSnapshot, definition: ColumnDefinition) -> Computation:
    """A column's computation from columns of its own table, bound to one version of it.

    It fills all columns of the group; `definition` says with which function.
    """
    columns = group_definitions(snapshot.schema, definition)
    receipts = [receipt_name(column.uuid) for column in columns]
    has_receipts = all(name in snapshot.field_ids for name in receipts)
    return Computation(
        id=definition.computation_id,
        name=joined_name([column.name for column in columns]),
        version=definition.udf_version,
        outputs=tuple(_column_output(snapshot, column, definition) for column in columns),
        program=Udf(
            name=definition.udf_name,
            digest=definition.udf_digest,
            nullable=definition.nullable,
            on_error=definition.on_error,
            memoize=bool(definition.memoize),
            manifest=_name_and_checksum(definition.manifest),
        ),
        inputs=tuple(
            Input(path, snapshot.field_ids[path], name, snapshot.fields.kind_with_names(path))
            for path, name in zip(
                definition.inputs, definition.input_names or definition.inputs, strict=True
            )
        ),
        receipts=tuple(bound_output(snapshot, n) for n in receipts) if has_receipts else (),
        former_versions=definition.former_versions,
        kept_versions=definition.kept_versions,
        older_than_receipts=not definition.has_receipts,
        is_override=definition.overrides,
        assumed=definition.assumed,
        sizes=definition.sizes,
        resources=Resources(definition.num_cpus, definition.num_gpus, definition.memory),
    )


def _column_output(
    snapshot: TableSnapshot, column: ColumnDefinition, definition: ColumnDefinition
) -> Output:
    own = definition if column.uuid == definition.uuid else column
    return replace(
        bound_output(snapshot, column.name),
        column_id=column.uuid,
        field=column.output,
        declaration=own.declaration,
    )


def bound_output(snapshot: TableSnapshot, name: str) -> Output:
    """A column of a table as an output, bound to one version of it."""
    kind = value_type(snapshot.schema.field(name).type)
    return Output(name, snapshot.field_ids[name], kind)


def _udf_part(udf: UDF, digest: str) -> dict[str, Any]:
    return {
        "udf_name": udf.name,
        "udf_version": udf.version,
        "udf_digest": digest,
        "nullable": udf.nullable,
        "declaration": "",  # that of another function says nothing of this one
        "sizes": Sizes(
            batch_size=udf.batch_size,
            checkpoint_size=udf.checkpoint_size,
            min_checkpoint_size=udf.min_checkpoint_size,
            max_checkpoint_size=udf.max_checkpoint_size,
            task_size=udf.task_size,
        ),
        "on_error": udf.on_error.to_json(),
        **{option: getattr(udf, option) for option in _OPTIONS},
        "manifest": _snapshot(udf.manifest),
    }


def _snapshot(manifest: Any) -> str | None:
    """A manifest as it is now, for the metadata; of variables only the names."""
    if manifest is None:
        return None
    facts = manifest.as_dict() if hasattr(manifest, "as_dict") else {"name": str(manifest)}
    if "env_vars" in facts:
        facts["env_vars"] = dict.fromkeys(facts["env_vars"])
    return json.dumps(facts, sort_keys=True)


def _name_and_checksum(snapshot: str | None) -> tuple[str, str | None] | None:
    if snapshot is None:
        return None
    facts = json.loads(snapshot)
    return str(facts.get("name")), facts.get("checksum")


def definition_metadata(definition: ColumnDefinition) -> dict[str, str]:
    """The definition as field metadata."""
    given = {o: getattr(definition, o) for o in _OPTIONS}
    options = {o: value for o, value in given.items() if value is not None and value is not False}
    if definition.on_error:
        options["on_error"] = json.loads(definition.on_error)
    sizes = {key: value for key, value in asdict(definition.sizes).items() if value is not None}
    return {
        _PREFIX: "true",
        f"{_PREFIX}.format": _FORMAT,
        f"{_PREFIX}.uuid": definition.uuid,
        f"{_PREFIX}.udf": f"_udfs/{definition.udf_digest}",
        f"{_PREFIX}.udf_name": definition.udf_name,
        f"{_PREFIX}.udf_version": definition.udf_version,
        f"{_PREFIX}.udf_inputs": json.dumps(list(definition.inputs)),
        f"{_PREFIX}.udf_input_names": json.dumps(_former_names(definition)),
        f"{_PREFIX}.udf_reads_all": json.dumps(definition.reads_all),
        f"{_PREFIX}.udf_input_fields": json.dumps(definition.input_fields),
        f"{_PREFIX}.udf_inputs_changed": json.dumps(definition.inputs_changed),
        f"{_PREFIX}.udf_nullable": json.dumps(definition.nullable),
        f"{_PREFIX}.udf_former": json.dumps(list(definition.former_versions)),
        f"{_PREFIX}.udf_kept": json.dumps(list(definition.kept_versions)),
        f"{_PREFIX}.udf_right_before": json.dumps(list(definition.right_before)),
        f"{_PREFIX}.field": json.dumps(definition.own_field),
        f"{_PREFIX}.fields_at": json.dumps(definition.fields_at),
        f"{_PREFIX}.receipts": json.dumps(definition.has_receipts),
        f"{_PREFIX}.udf_options": json.dumps({**sizes, **options}, sort_keys=True),
        f"{_PREFIX}.udf_declaration": definition.declaration,
        **_group_metadata(definition),
    }


def _former_names(definition: ColumnDefinition) -> tuple[str, ...]:
    """What the inputs were called when the function was declared, if that is not what they are."""
    return definition.input_names if definition.input_names != definition.inputs else ()


def _group_metadata(definition: ColumnDefinition) -> dict[str, str]:
    """What a column of a group says of its place there; of one that is alone nothing."""
    if not definition.group:
        return {}
    return {
        f"{_PREFIX}.group": definition.group,
        f"{_PREFIX}.output": definition.output,
        f"{_PREFIX}.prefix": definition.prefix,
    }


def declared_fields(
    schema: pa.Schema, declare: Callable[[ColumnDefinition], ColumnDefinition]
) -> pa.Schema:
    """A schema whose computed columns say who declares them."""
    definitions = read_definitions(schema)
    return pa.schema(
        [
            field
            if field.name not in definitions
            else field.with_metadata(
                {
                    **(field.metadata or {}),
                    f"{_PREFIX}.udf_declaration": declare(definitions[field.name]).declaration,
                }
            )
            for field in schema
        ],
        metadata=schema.metadata,
    )


def by_names(definition: ColumnDefinition, fields: FieldsNow) -> ColumnDefinition:
    """The definition with its inputs as they are called now, and no ids: for another table."""
    present = with_present_inputs(definition, fields)
    return replace(present, own_field=None, fields_at=None)


def defined_field(definition: ColumnDefinition) -> pa.Field:
    """The Arrow field of a column, with the definition on it."""
    own = {k.decode(): v.decode() for k, v in (definition.arrow_field.metadata or {}).items()}
    return definition.arrow_field.with_metadata({**own, **definition_metadata(definition)})


def read_definition(schema: pa.Schema, name: str) -> ColumnDefinition | None:
    """The definition of a column; None for a plain one. Runs no user code.

    LanceDB computes all columns of its own views, with the metadata of those that they are from.
    """
    if LANCEDB_VIEW_KEY in (schema.metadata or {}):
        return None
    arrow_field = schema.field(name)
    metadata = {k.decode(): v.decode() for k, v in (arrow_field.metadata or {}).items()}
    if metadata.get(_PREFIX) != "true" or f"{_PREFIX}.uuid" not in metadata:
        return None
    options: Mapping[str, Any] = json.loads(metadata.get(f"{_PREFIX}.udf_options", "{}"))
    return ColumnDefinition(
        name=name,
        arrow_field=arrow_field,
        uuid=metadata[f"{_PREFIX}.uuid"],
        udf_name=metadata[f"{_PREFIX}.udf_name"],
        udf_version=metadata[f"{_PREFIX}.udf_version"],
        udf_digest=metadata[f"{_PREFIX}.udf"].removeprefix("_udfs/"),
        inputs=tuple(json.loads(metadata[f"{_PREFIX}.udf_inputs"])),
        input_names=tuple(json.loads(metadata.get(f"{_PREFIX}.udf_input_names", "[]"))),
        reads_all=json.loads(metadata.get(f"{_PREFIX}.udf_reads_all", "false")),
        input_fields=tuple(
            (int(node), str(kind))
            for node, kind in json.loads(metadata[f"{_PREFIX}.udf_input_fields"])
        ),
        inputs_changed=_may_have_changed(metadata),
        group=metadata.get(f"{_PREFIX}.group", ""),
        output=metadata.get(f"{_PREFIX}.output", ""),
        prefix=metadata.get(f"{_PREFIX}.prefix", ""),
        nullable=json.loads(metadata.get(f"{_PREFIX}.udf_nullable", "true")),
        former_versions=_former_versions(metadata),
        kept_versions=tuple(json.loads(metadata.get(f"{_PREFIX}.udf_kept", "[]"))),
        right_before=_right_before(metadata),
        own_field=json.loads(metadata.get(f"{_PREFIX}.field", "null")),
        fields_at=_commit_in(metadata.get(f"{_PREFIX}.fields_at", "null")),
        has_receipts=json.loads(metadata.get(f"{_PREFIX}.receipts", "false")),
        sizes=Sizes(**{f: options.get(f) for f in Sizes.__dataclass_fields__}),
        on_error=json.dumps(options["on_error"]) if "on_error" in options else "",
        declaration=metadata.get(f"{_PREFIX}.udf_declaration", ""),
        **_chosen(options),
    )


def _commit_in(text: str) -> CommitId | None:
    """A commit in metadata. A version alone, which an earlier release wrote, says nothing of it."""
    found = json.loads(text)
    return CommitId(*found) if isinstance(found, list) else None


def _former_versions(metadata: Mapping[str, str]) -> tuple[str, ...]:
    known = metadata.get(f"{_PREFIX}.udf_former")
    if known is not None:
        return tuple(json.loads(known))
    # Before there were receipts, only the table's version of the change was kept.
    return ("",) if metadata.get(f"{_PREFIX}.udf_since", "0") != "0" else ()


def _right_before(metadata: Mapping[str, str]) -> tuple[str, ...]:
    known = metadata.get(f"{_PREFIX}.udf_right_before")
    if known is not None:
        return tuple(json.loads(known))
    # An earlier release didn't say: where nothing is kept, it was at least the function before.
    is_kept = json.loads(metadata.get(f"{_PREFIX}.udf_kept", "[]"))
    return _former_versions(metadata)[-1:] if not is_kept else ()


def _may_have_changed(metadata: Mapping[str, str]) -> bool:
    """Whether the column may have read others before. Earlier releases didn't write it down."""
    known = metadata.get(f"{_PREFIX}.udf_inputs_changed")
    return bool(_former_versions(metadata)) if known is None else bool(json.loads(known))


def _chosen(options: Mapping[str, Any]) -> dict[str, Any]:
    return {option: options.get(option) for option in _OPTIONS}


def read_definitions(schema: pa.Schema) -> dict[str, ColumnDefinition]:
    """Every computed column of a table, by name."""
    found = {name: read_definition(schema, name) for name in schema.names}
    return {name: definition for name, definition in found.items() if definition is not None}


def commit_new_columns(dataset: lance.LanceDataset, definitions: list[ColumnDefinition]) -> None:
    """Add the columns and those of their receipts, NULL everywhere, in one commit."""
    known = _with_own_fields(definitions, _next_field_id(dataset))
    fields = [defined_field(definition) for definition in known]
    dataset.add_columns([*fields, *(receipt_field(d.uuid) for d in definitions)])
    nodes = nodes_of(dataset.lance_schema)
    wrong = [d for d in known if d.own_field != nodes[d.name]]
    if wrong:
        found = [replace(d, own_field=nodes[d.name]) for d in wrong]
        dataset.update_field_metadata({d.name: definition_metadata(d) for d in found})


def _next_field_id(dataset: lance.LanceDataset) -> int:
    """The id that Lance will give to the next field: behind all that schema and files have."""
    named = nodes_of(dataset.lance_schema).values()
    stored = (i for f in dataset.get_fragments() for file in f.metadata.files for i in file.fields)
    return max((*named, *stored), default=-1) + 1


def _with_own_fields(definitions: Iterable[ColumnDefinition], first: int) -> list[ColumnDefinition]:
    """The definitions with the field ids that they will get, one after the other."""
    known = []
    for definition in definitions:
        known.append(replace(definition, own_field=first))
        first += _field_count(definition.arrow_field.type)
    return known


def _field_count(kind: pa.DataType) -> int:
    """How many fields Lance counts for a type: its own, and those below it."""
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_fixed_size_list(kind) and not pa.types.is_struct(kind.value_type):
        return 1
    if not pa.types.is_nested(kind):
        return 1
    return 1 + sum(_field_count(kind.field(i).type) for i in range(kind.num_fields))


def receipt_field(column_id: str) -> pa.Field:
    """The hidden column of a computed column's receipts."""
    metadata = {RECEIPT_OF: column_id}
    return pa.field(receipt_name(column_id), RECEIPT_TYPE, nullable=True, metadata=metadata)


def present_column(schema: pa.Schema, column_id: str, name: str) -> str | None:
    """What a computed column is called now; None: it is gone. Another of its `name` is not it."""
    place = schema.get_field_index(name)
    if place >= 0 and column_uuid(schema.field(place)) == column_id:
        return name
    return next((field.name for field in schema if column_uuid(field) == column_id), None)


def column_uuid(arrow_field: pa.Field) -> str | None:
    """The identity of a computed column, by its field; None for any other."""
    found = (arrow_field.metadata or {}).get(f"{_PREFIX}.uuid".encode())
    return found.decode() if found is not None else None


def commit_receipt_columns(
    dataset: lance.LanceDataset, definitions: Iterable[ColumnDefinition]
) -> frozenset[str]:
    """Give receipts to columns that have none; return the names of these columns.

    They were declared before there were receipts, or the table was overwritten without them.
    """
    names = dataset.schema.names
    missing = [d for d in definitions if receipt_name(d.uuid) not in names]
    if missing:
        dataset.add_columns([receipt_field(definition.uuid) for definition in missing])
    return frozenset(definition.name for definition in missing)


def rebound(definition: ColumnDefinition, fields: FieldsNow) -> ColumnDefinition:
    """The definition with the field ids that it and its inputs, by their names, have now."""
    return replace(
        definition,
        own_field=fields.nodes.get(definition.name),
        input_fields=_fields_behind(fields, definition.inputs),
        fields_at=fields.history.newest,
    )


def commit_rebound(
    dataset: lance.LanceDataset, inputs: Mapping[str, tuple[str, ...] | None]
) -> None:
    """Write down the field ids of columns and of their inputs, in one commit.

    `inputs` are where these are now, by the names of the columns; None: where they are said to be.
    """
    schema = dataset.schema
    fields = FieldsNow.of(dataset)
    stored = {name: read_definition(schema, name) for name in inputs if name in schema.names}
    found = [fed_from(d, inputs[n] or d.inputs) for n, d in stored.items() if d is not None]
    there = [d for d in found if all(has_path(schema, p) for p in d.inputs)]
    commit_definitions(dataset, [rebound(definition, fields) for definition in there])


def commit_definitions(dataset: lance.LanceDataset, definitions: list[ColumnDefinition]) -> None:
    """Write down definitions of columns, in one commit."""
    if definitions:
        dataset.update_field_metadata({d.name: definition_metadata(d) for d in definitions})


def pinned(
    definition: ColumnDefinition, paths: tuple[str, ...], fields: FieldsNow
) -> ColumnDefinition:
    """The definition with the field ids that its inputs, at these paths, have now.

    It is the same where it says that already, so that nobody has to ask the history, or one of
    them is gone.
    """
    if any(path not in fields.nodes or path not in fields.kinds for path in paths):
        return definition
    ids = (fields.nodes.get(definition.name), _fields_behind(fields, paths))
    is_known = paths == definition.inputs and ids == (definition.own_field, definition.input_fields)
    if is_known and not _is_long_ago(definition, fields):
        return definition
    return rebound(fed_from(definition, paths), fields)


def _is_long_ago(definition: ColumnDefinition, fields: FieldsNow) -> bool:
    """Whether field ids were written down so long ago that soon no history reaches back there."""
    at = definition.fields_at
    return at is None or fields.version - at.version > MAX_COMMITS_BACK // 2


def written_inputs(definition: ColumnDefinition) -> tuple[object, ...]:
    """What a definition says of its inputs, and of when that was so."""
    inputs = (definition.inputs, definition.input_names, definition.input_fields)
    return (*inputs, definition.own_field, definition.fields_at)


def known_paths(definition: ColumnDefinition, fields: FieldsNow) -> tuple[str, ...] | None:
    """Where the inputs of a column are; None: nobody can tell."""
    present = with_present_inputs(definition, fields)
    return present.inputs if present.doubt is None else None


PathsOf: TypeAlias = Callable[[ColumnDefinition, FieldsNow], tuple[str, ...] | None]
"""Where the inputs of a column are; None: leave it as it is."""


def to_pin(schema: pa.Schema, fields: FieldsNow, paths_of: PathsOf) -> list[ColumnDefinition]:
    """The definitions that don't say yet where the inputs of their columns are."""
    changed = []
    for found in read_definitions(schema).values():
        paths = paths_of(found, fields)
        now = found if paths is None else pinned(found, paths, fields)
        changed += [now] if now is not found else []
    return changed


def commit_pinned(ref: TableRef, paths_of: PathsOf) -> None:
    """Write down where the inputs of columns are.

    A cast makes a new field of a column, and so does adding it anew: by its id it would be found
    no longer, and by its name just as long as it has that. One that has another name is found by
    its id, as long as the history proves that the table was not overwritten.
    """

    def attempt() -> None:
        dataset = open_dataset(ref)
        commit_definitions(dataset, to_pin(dataset.schema, FieldsNow.of(dataset), paths_of))

    retry_conflicts(attempt, _MAX_RETRIES)


def commit_has_receipts(dataset: lance.LanceDataset, computation: Computation) -> None:
    """Write down that every value of a column has a receipt: those without are people's now."""
    changed = {
        name: {f"{_PREFIX}.receipts": json.dumps(True)}
        for name, found in read_definitions(dataset.schema).items()
        if found.computation_id == computation.id and not found.has_receipts
    }
    if changed:
        dataset.update_field_metadata(changed)


def commit_redefinitions(dataset: lance.LanceDataset, definitions: list[ColumnDefinition]) -> None:
    """Point the columns at their new functions, in one commit."""
    commit_receipt_columns(dataset, definitions)
    commit_definitions(dataset, definitions)


def not_defined(schema: pa.Schema, table: str, name: str, remedy: str = "") -> ColumnNotFoundError:
    """The error of a request for a column that a table doesn't have."""
    known = shown_columns(schema.names)
    return ColumnNotFoundError(
        f"Column {name!r} is not defined in this table ({table!r} has {listed(known)})."
        f"{did_you_mean(name, known)}{remedy}"
    )


def required_definition(schema: pa.Schema, table: str, name: str) -> ColumnDefinition:
    """The definition of a column that must be a computed one."""
    if name not in schema.names:
        raise not_defined(schema, table, name, " Run table.add_columns() first.")
    definition = read_definition(schema, name)
    theirs = _computed_column(schema, schema.field(name), definition)
    if definition is None and theirs is not None:
        raise ColumnNotFoundError(
            f"Column {name!r} is one of LanceDB's own computed columns ({theirs.expression}): "
            f"table.refresh_column({name!r}) computes it, and backfill doesn't."
        )
    if definition is None:
        raise ColumnNotFoundError(
            f"Column {name!r} is not defined in this table as a computed column: it has no UDF. "
            "Give one with backfill(..., udf=...), or declare one with alter_columns()."
        )
    return definition
