"""Opening tables, and the facts about one pinned version that everything else builds on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias, TypeVar

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from geneva.config import without_collecting
from geneva.errors import (
    ColumnExistsError,
    TableNotFoundError,
    UnreadableFragmentsError,
    UserInputError,
)
from geneva.model.addresses import split_by_fragment
from geneva.model.computation import RECEIPT_PREFIX
from geneva.model.rows import RowIds, RowSet
from geneva.model.sql import ROW_META, is_readable_name, quoted_name
from geneva.model.tables import TableRef
from geneva.model.uris import local_path
from geneva.storage.lance.damage import is_damage, is_file_gone, is_missing
from geneva.storage.lance.history import History
from geneva.storage.lance.session import session_of
from geneva.udf.paths import steps_to
from geneva.udf.types import is_blob_type

Dataset: TypeAlias = lance.LanceDataset
"""An open version of a table, for those rooms that only hand it on."""
Planned = TypeVar("Planned")
_MAX_PLANS = 10


class FileFacts(NamedTuple):
    """One data file of a fragment, and the fields that are read from it.

    A tuple, because a table has many: a frozen dataclass takes twice as long to make.
    """

    path: str
    fields: frozenset[int]
    size_bytes: int | None
    base_id: int | None = None
    """In which other table's folder it is; None: in the table's own. A branch or a shallow clone
    begins with the files of what it was made from."""


@dataclass(frozen=True, slots=True)
class FragmentFacts:
    """One fragment, as the manifest lists it."""

    id: int
    physical_rows: int
    deleted_rows: int
    files: tuple[FileFacts, ...]
    deletions: str = ""
    """Which rows are deleted, as the name of the file that says so; empty: none."""
    leaving: RowSet | None = None
    """Rows that will be deleted before a plan for the fragment runs; None: none."""
    source_ids: RowIds | None = field(default=None, compare=False)
    """Of a fragment that a view will have: the source rows that its placeholders stand for."""

    @property
    def live_rows(self) -> int:
        """Rows that are not deleted."""
        return self.physical_rows - self.deleted_rows

    def files_of(self, field_ids: Iterable[int]) -> tuple[FileFacts, ...]:
        """The files that hold any of the fields."""
        wanted = frozenset(field_ids)
        return tuple([file for file in self.files if not wanted.isdisjoint(file.fields)])


@dataclass(frozen=True)
class FieldsNow:
    """The fields of one version of a table, found by name, or by id and type."""

    nodes: Mapping[str, int]
    """Per column path, the field's own id."""
    kinds: Mapping[str, str]
    """Per column path, the field's type as text."""
    version: int
    """The version of the table."""
    history: History = field(repr=False, compare=False)
    """What is behind it."""

    @classmethod
    def of(cls, dataset: lance.LanceDataset) -> FieldsNow:
        """Those of the version that a dataset is checked out at."""
        history = History(dataset)
        nodes, kinds = nodes_of(dataset.lance_schema), kinds_of(dataset.schema)
        return cls(nodes, kinds, history.version, history)

    @cached_property
    def _present(self) -> dict[tuple[int, str], str]:
        return {
            (node, self.kinds[path]): path
            for path, node in self.nodes.items()
            if path in self.kinds
        }

    def kind_with_names(self, path: str) -> str:
        """The type of a field as text, where fields of structs are named in it; else empty."""
        kind = self.kinds.get(path, "")
        return kind if "struct<" in kind else ""

    def named(self, field: tuple[int, str]) -> str | None:
        """What the field of an id and a type is called; None: there is none."""
        return self._present.get(field)


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """One version of a table: its schema, its fields' ids, its fragments."""

    ref: TableRef
    version: int
    schema: pa.Schema
    fragments: tuple[FragmentFacts, ...]
    field_ids: dict[str, tuple[int, ...]]
    """Per column path: the ids of the fields that data files list for it."""
    fields: FieldsNow = field(compare=False)
    """The fields themselves, by name and by id."""


_NO_SUCH_VERSION = ("not found", "ref is invalid", "int too big", "negative int")
"""What Lance says of a version that is not there, and of numbers and tags that none can have."""


def open_dataset(ref: TableRef, version: int | str | None = None) -> lance.LanceDataset:
    """Open a table at a version, given by its number or tag, or at its latest."""
    try:
        return lance.dataset(
            ref.uri,
            version=version,
            storage_options=ref.storage_options.plain(),
            session=session_of(ref.uri),
        )
    except (ValueError, OverflowError) as error:
        if not any(sign in str(error).lower() for sign in _NO_SUCH_VERSION):
            raise
        where = f" at version {version}" if version is not None else ""
        raise TableNotFoundError(f"There is no table {ref.name!r}{where}.") from error


def planned_anew(
    refs: Callable[[], Sequence[TableRef]],
    plan: Callable[[], Planned],
    overtaken: Callable[[Planned], Sequence[object]] = lambda planned: (),
) -> Planned:
    """Plan something, and again where what was read was cleaned up meanwhile.

    `plan` begins with the newest versions of the tables. After an error it is tried once more, and
    then only as long as these have later ones than before: in a table that nobody changes, a file
    that is gone stays gone. `overtaken`: what a plan leaves out that such a clean-up may have taken
    away. What two plans in a row leave out is not there.
    """
    seen: list[int] | None = None
    left_out: Sequence[object] = ()
    for _ in range(_MAX_PLANS):
        try:
            planned = plan()
            before, left_out = left_out, overtaken(planned)
            if not left_out or left_out == before:
                return planned
        except BaseException as error:
            if not (is_file_gone(error) or isinstance(error, UnreadableFragmentsError)):
                raise
            now = _latest_versions(refs())
            if now is None or now == seen:
                raise
            seen = now
    return plan()


def _latest_versions(refs: Sequence[TableRef]) -> list[int] | None:
    """None: one of the tables can't be opened, or is gone."""
    try:
        return [int(open_dataset(ref).version) for ref in refs]
    except (OSError, ValueError):
        return None


def has_later(ref: TableRef, version: int) -> bool:
    """Whether a table has later versions than one."""
    return int(open_dataset(ref).version) > version


def has_versions(ref: TableRef, version: int | None = None) -> bool:
    """Whether there is a table at a place, and not only what a job left in a dropped one.

    `version`: whether it has that one.
    """
    try:
        open_dataset(ref, version)
    except TableNotFoundError:
        return False
    return True


@contextmanager
def noticing_deletion(find: Callable[[], TableRef]) -> Iterator[None]:
    """Say that a table is gone, in place of whatever is raised by reading a deleted folder.

    `find` says where the table is: asked when something was raised, and not before.
    """
    try:
        yield
    except BaseException as error:
        if not (is_damage(error) or isinstance(error, UnreadableFragmentsError)):
            raise
        ref, gone = find(), False
        with suppress(OSError, ValueError):  # of a store that can't be reached nothing is known
            gone = not has_versions(ref)
        if not gone:
            raise
        raise table_is_gone(ref) from error


def check_folder_is_there(ref: TableRef) -> None:
    """Refuse a table whose folder was deleted; of one in an object store nothing is asked."""
    folder = local_path(ref.uri)
    if folder is not None and not (folder / "_versions").is_dir():
        raise table_is_gone(ref)


def table_is_gone(ref: TableRef) -> TableNotFoundError:
    """The error of a call on a table that was dropped, or its folder deleted."""
    return TableNotFoundError(
        f"Table {ref.name!r} is not there any more: it was dropped, or its folder deleted. If it "
        "was made anew since, open it again."
    )


def check_not_dropped(ref: TableRef, dataset: lance.LanceDataset) -> None:
    """Make sure that a table that a job works on is still there, and no other in its place.

    Lance would commit to that one: it may have the same versions.
    """
    if is_replaced(ref, dataset):
        raise dropped_meanwhile(ref)


def is_replaced(ref: TableRef, dataset: lance.LanceDataset) -> bool:
    """Whether the table of a handle is gone, or another one is in its place."""
    return is_another(ref, int(dataset.version), first_file(dataset))


def is_another(ref: TableRef, version: int, first: str) -> bool:
    """Whether a table is gone that had a version with this first file, or was made anew."""
    try:
        return first_file(open_dataset(ref, version)) != first
    except TableNotFoundError:
        pass
    try:
        return int(open_dataset(ref).version) < version  # else it was only cleaned up
    except TableNotFoundError:
        return True


def first_file(dataset: lance.LanceDataset) -> str:
    """The name of a version's first data file, which no other table has; empty without rows."""
    fragments = dataset.get_fragments()
    return file_path(fragments[0].metadata.files[0]) if fragments else ""


@dataclass(frozen=True, slots=True)
class VersionSeen:
    """A version of a table in a local folder: a table that is made anew has another of its number.

    Lance would write with what it remembers of the one before: a table whose files are gone.
    """

    version: int
    modified: int
    """When it was made, in nanoseconds."""
    size: int


def version_seen(uri: str, version: int) -> VersionSeen | None:
    """What tells a version from another of its number; None: it is not there, or not local."""
    folder = local_path(uri)
    if folder is None:
        return None
    # By the present way to name versions, and by the former.
    for name in (f"{2**64 - 1 - version:020}", f"{version}"):
        with suppress(FileNotFoundError, NotADirectoryError):
            found = (folder / "_versions" / f"{name}.manifest").stat()
            return VersionSeen(version, found.st_mtime_ns, found.st_size)
    return None


def is_dropped(dataset: lance.LanceDataset, version: int) -> bool:
    """Whether a table is gone that had this version, or another one is in its place.

    To be asked before a commit: Lance would commit to a folder that was deleted.
    """
    try:
        return int(dataset.latest_version) < version
    except (OSError, ValueError) as error:
        if not is_missing(error):
            raise
        return True


def dropped_meanwhile(ref: TableRef) -> TableNotFoundError:
    """The error of a job one of whose tables was dropped, or its folder deleted."""
    return TableNotFoundError(
        f"{ref.name!r} was dropped while a job was at work on it. Nothing more is written to it."
    )


@lru_cache(maxsize=8)
def open_pinned(ref: TableRef, version: int, job_id: str) -> lance.LanceDataset:
    """Open a fixed version; workers that run many tasks of one job share the handle.

    Of one job: a table that was dropped and made anew has the same versions again.
    """
    return open_dataset(ref, version)


def read_snapshot(dataset: lance.LanceDataset, ref: TableRef) -> TableSnapshot:
    """Collect the facts of the version that `dataset` is checked out at."""
    schema, seen = dataset.schema, FieldSets()
    with without_collecting():
        fragments = tuple(fragment_facts(f.metadata, seen) for f in dataset.get_fragments())
    return TableSnapshot(
        ref=ref,
        version=dataset.version,
        schema=schema,
        fragments=fragments,
        field_ids=field_ids_of(dataset),
        fields=FieldsNow.of(dataset),
    )


class FieldSets(dict[tuple[int, ...], frozenset[int]]):
    """Sets of field ids, each made once: most files of a table hold the same fields."""

    def __missing__(self, fields: tuple[int, ...]) -> frozenset[int]:
        """Make a set that was not asked for before."""
        return self.setdefault(fields, frozenset(fields))


def fragment_facts(metadata: Any, seen: FieldSets | None = None) -> FragmentFacts:
    """Turn Lance's fragment metadata into plain facts. Facts with the same `seen` share sets."""
    seen = FieldSets() if seen is None else seen
    deletions = metadata.deletion_file
    return FragmentFacts(
        id=metadata.id,
        physical_rows=metadata.physical_rows,
        deleted_rows=deletions.num_deleted_rows if deletions is not None else 0,
        files=tuple(
            [
                FileFacts(
                    file_path(file), seen[tuple(file.fields)], file.file_size_bytes, file.base_id
                )
                for file in metadata.files
            ]
        ),
        deletions=f"{deletions.read_version}-{deletions.id}" if deletions is not None else "",
    )


def file_path(data_file: Any) -> str:
    """The path of a data file. Asked for as an attribute, pylance 14 makes a class each time."""
    known = getattr(data_file, "_path", None)
    return str(data_file.path) if known is None else str(known)


def file_uri(ref: TableRef, dataset: lance.LanceDataset, file: FileFacts) -> str:
    """Where a data file of a table is: in its own folder, or in that of one of its bases."""
    base = None if file.base_id is None else dataset.base_paths().get(file.base_id)
    if base is None:
        return f"{ref.uri}/data/{file.path}"
    folder = base.path.rstrip("/")
    return f"{folder}/data/{file.path}" if base.is_dataset_root else f"{folder}/{file.path}"


def base_refs(ref: TableRef) -> list[TableRef]:
    """The tables that a branch or a clone was made from, which own some of its files."""
    bases = open_dataset(ref).base_paths().values()
    return [
        TableRef(ref.name, base.path.rstrip("/"), ref.storage_options)
        for base in bases
        if base.is_dataset_root
    ]


def file_version(dataset: lance.LanceDataset) -> tuple[int, int]:
    """The table's file format version, as two numbers."""
    major, minor = dataset.data_storage_version.split(".")
    return int(major), int(minor)


def field_ids_of(dataset: lance.LanceDataset) -> dict[str, tuple[int, ...]]:
    """Per column path, the field ids a data file lists: every node on 2.0, leaves from 2.1 on.

    A blob is a leaf, whatever Lance counts below it.
    """
    every_node = file_version(dataset) < (2, 1)
    ids: dict[str, tuple[int, ...]] = {}

    def walk(node: Any, path: str, kind: pa.DataType | None) -> tuple[int, ...]:
        children = [] if kind is not None and is_blob_type(kind) else node.children()
        own = (node.id(),) if every_node or not children else ()
        below = tuple(
            i
            for child in children
            for i in walk(child, f"{path}.{child.name()}", _child_type(kind, child.name()))
        )
        ids.setdefault(path, own + below)
        return own + below

    schema = dataset.schema
    for top in dataset.lance_schema.fields():
        walk(top, top.name(), schema.field(top.name()).type)
    return ids


def _child_type(kind: pa.DataType | None, name: str) -> pa.DataType | None:
    """The type of a struct's field; None where that is of no interest: it holds no blobs."""
    if kind is None or not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
        return None
    return kind.field(kind.get_field_index(name)).type


def nodes_of(schema: Any) -> dict[str, int]:
    """Per column path, the field's own id, which outlives a renaming and new struct fields."""
    nodes: dict[str, int] = {}

    def walk(node: Any, path: str) -> None:
        nodes.setdefault(path, node.id())
        for child in node.children():
            walk(child, f"{path}.{child.name()}")

    for top in schema.fields():
        walk(top, top.name())
    return nodes


def kinds_of(schema: pa.Schema) -> dict[str, str]:
    """The type of every column path, as text."""
    kinds: dict[str, str] = {}

    def walk(arrow_field: pa.Field, path: str) -> None:
        kinds.setdefault(path, str(arrow_field.type))
        if pa.types.is_struct(arrow_field.type):
            for i in range(arrow_field.type.num_fields):
                child = arrow_field.type.field(i)
                walk(child, f"{path}.{child.name}")

    for top in schema:
        walk(top, top.name)
    return kinds


def has_column(schema: pa.Schema, name: str) -> bool:
    """Whether there is a top-level column of a name. `schema.names` lists all to answer that."""
    return bool(schema.get_field_index(name) >= 0)


def quote_path(path: str, schema: pa.Schema) -> str:
    """A column path as Lance SQL reads it; a name that contains dots is one name."""
    steps = steps_to(schema, path) or path.split(".")
    return ".".join(map(quoted_name, steps))


def has_path(schema: pa.Schema, path: str) -> bool:
    """Whether a column path, dotted into structs, leads to a field that Lance can read."""
    steps = steps_to(schema, path)
    return steps is not None and is_readable_name(steps[0])


def check_column_name(name: str) -> None:
    """Refuse names that Lance can store but never read back, and those of receipts."""
    if name.startswith(RECEIPT_PREFIX):
        raise UserInputError(f"Column names that begin with {RECEIPT_PREFIX!r} are Geneva's own.")
    if not name or name != name.strip():
        raise UserInputError(
            f"A column name can't be empty or start or end with a space: {name!r}."
        )
    for bad, why in ((".", "it separates struct fields"), ("`", "it quotes names in SQL")):
        if bad in name:
            raise UserInputError(f"Column name {name!r} can't contain {bad!r}: {why}.")


def refuse_taken_name(table: str, schema: pa.Schema, name: str, hint: str = "") -> None:
    """Refuse a new column that is there already, or that SQL could take for one that is."""
    if name in schema.names:
        raise ColumnExistsError(
            f"Column {name!r} already exists in table {table!r}. To give it another UDF use "
            f"alter_columns, or drop it first.{hint}"
        )
    clash = next((own for own in schema.names if own.lower() == name.lower()), None)
    if clash is not None:
        raise ColumnExistsError(
            f"Table {table!r} has a column {clash!r}, which differs from {name!r} only in case: "
            f"SQL takes one for the other. Use that one, or another name.{hint}"
        )


def refuse_two_of_a_name(added: Iterable[str], name: str) -> None:
    """Refuse a new column beside another new one that SQL could take for it."""
    for other in added:
        if other.lower() == name.lower():
            raise ColumnExistsError(
                f"Columns {other!r} and {name!r} can't be added together: names of columns differ, "
                "and in more than upper and lower case. Give one of them another name."
            )


def refuse_names_of_lance(names: Iterable[str]) -> None:
    """Refuse columns named like what Lance knows of every row: such a table can't be read."""
    for name in names:
        if name.lower() in ROW_META:
            raise UserInputError(
                f"Column name {name!r} is Lance's own, for what it knows of every row: a table "
                "with such a column can't be read. Choose another name."
            )


def read_live_rows(
    dataset: lance.LanceDataset, fragments: Sequence[FragmentFacts]
) -> dict[int, RowSet]:
    """Which rows of each fragment are not deleted, and will not be before a plan runs."""
    live = {f.id: RowSet.full(f.physical_rows) for f in fragments}
    with_deletions = [f for f in fragments if f.deleted_rows]
    if with_deletions:
        live.update(_collect_rows(dataset, with_deletions))
    return {f.id: live[f.id].minus(f.leaving) if f.leaving else live[f.id] for f in fragments}


def _collect_rows(
    dataset: lance.LanceDataset, fragments: Sequence[FragmentFacts]
) -> dict[int, RowSet]:
    whole_table = len(fragments) == len(dataset.get_fragments())
    scanner = dataset.scanner(
        columns=[],
        with_row_address=True,
        fragments=None if whole_table else [dataset.get_fragment(f.id) for f in fragments],
    )
    addresses = (batch.column("_rowaddr").to_numpy() for batch in scanner.to_batches())
    return rows_at(addresses, fragments)


def rows_at(
    addresses: Iterable[npt.NDArray[np.uint64]], fragments: Sequence[FragmentFacts]
) -> dict[int, RowSet]:
    """Rows by address, as sets of rows of each fragment."""
    masks = {f.id: np.zeros(f.physical_rows, dtype=np.bool_) for f in fragments}
    for some in addresses:
        for fragment_id, offsets in split_by_fragment(some):
            if fragment_id in masks:
                masks[fragment_id][offsets] = True
    return {fragment_id: RowSet.from_mask(mask) for fragment_id, mask in masks.items()}
