"""What people do to a table, each as a record: how it is written, and what it means.

`write` does it to the Lance table, with our table, plain LanceDB or plain Lance; `applied` does it
to the model. Nobody ever mentions the hidden columns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol

import lance
import lancedb
import pyarrow as pa
from lancedb.index import FTS, BTree, IvfFlat

from geneva import Connection, Table
from oracle.functions import make_udf, plain
from oracle.model import Column, Job, Row, State, Value, new_row

NAME = "t"
OURS, LANCEDB, LANCE = "ours", "lancedb", "lance"


@dataclass(frozen=True)
class Tables:
    """One table, as each library opens it, always at its latest version."""

    db: Connection

    @property
    def uri(self) -> str:
        return f"{self.db.uri}/{NAME}.lance"

    def lance(self) -> lance.LanceDataset:
        return lance.dataset(self.uri)

    def ours(self) -> Table:
        return self.db.open_table(NAME)

    @cached_property
    def _lancedb(self) -> Any:
        return lancedb.connect(self.db.uri)

    def lancedb(self) -> Any:
        return self._lancedb.open_table(NAME)

    def create(self, data: pa.Table, **options: Any) -> None:
        """Overwrite the table with plain LanceDB."""
        self._lancedb.create_table(NAME, data, mode="overwrite", **options)

    def either(self, via: str) -> Any:
        """Our table or LanceDB's: they take the same calls."""
        return self.ours() if via == OURS else self.lancedb()

    def rows(self, state: State) -> dict[int, Row]:
        """Return what a reader sees, by id, with the names of the columns replaced by roles."""
        from oracle.functions import canonical

        names = {name: role for role, name in state.names.items()}
        data = self.lance().to_table(columns=list(names)).to_pylist()
        rows = [{names[n]: canonical(v) for n, v in row.items()} for row in data]
        return {row["id"]: new_row(row) for row in rows}  # type: ignore[misc]


Values = Mapping[int, Mapping[str, Value]]


def arrow(tables: Tables, state: State, values: Values) -> pa.Table:
    """Return rows for the table, with the columns of the first of them; all have the same."""
    schema = tables.lance().schema
    roles = ["id", *next(iter(values.values()))]
    names = [state.names[role] for role in roles]
    data = {
        name: [key if role == "id" else plain(row[role]) for key, row in values.items()]
        for role, name in zip(roles, names, strict=True)
    }
    fields = [pa.field(name, schema.field(name).type) for name in names]
    return pa.Table.from_pydict(data, schema=pa.schema(fields))


def selecting(ids: Collection[int]) -> str:
    return f"id IN ({', '.join(map(str, ids))})"


class Write(Protocol):
    """Something that a person does to a table."""

    @property
    def touched(self) -> Collection[int]:
        """The rows that it changes, at most."""

    def write(self, tables: Tables, state: State) -> None: ...

    def applied(self, state: State) -> State: ...


@dataclass(frozen=True)
class Append:
    """Rows come, with or without some of their computed values."""

    values: Values
    via: str = LANCE

    @property
    def touched(self) -> Collection[int]:
        return self.values.keys()

    def write(self, tables: Tables, state: State) -> None:
        data = arrow(tables, state, self._new(state))
        if self.via == LANCE:
            lance.write_dataset(data, tables.uri, mode="append")
        else:
            tables.either(self.via).add(data)

    def applied(self, state: State) -> State:
        return state.upserted(self._new(state))

    def _new(self, state: State) -> Values:
        return {k: v for k, v in self.values.items() if k not in state.rows}


@dataclass(frozen=True)
class Delete:
    """Rows go."""

    ids: tuple[int, ...]
    via: str = LANCEDB

    @property
    def touched(self) -> Collection[int]:
        return self.ids

    def write(self, tables: Tables, state: State) -> None:
        tables.either(self.via).delete(selecting(self.ids))

    def applied(self, state: State) -> State:
        left = {k: v for k, v in state.rows.items() if k not in self.ids}
        return replace(state, rows=left)


@dataclass(frozen=True)
class Update:
    """One value is written into a column of some rows; Lance moves these rows."""

    ids: tuple[int, ...]
    role: str
    value: Value
    via: str = LANCEDB

    @property
    def touched(self) -> Collection[int]:
        return self.ids

    def write(self, tables: Tables, state: State) -> None:
        values = {state.names[self.role]: plain(self.value)}
        tables.either(self.via).update(where=selecting(self.ids), values=values)

    def applied(self, state: State) -> State:
        return state.mapped(lambda row: row.put({self.role: self.value}), self.ids)


@dataclass(frozen=True)
class Upsert:
    """Some columns of some rows are written by key.

    With an index on the key Lance rewrites the columns where they are; without, it moves the rows.
    """

    values: Values
    insert: bool = True
    via: str = LANCEDB

    @property
    def touched(self) -> Collection[int]:
        return self.values.keys()

    def write(self, tables: Tables, state: State) -> None:
        table = tables.lance() if self.via == LANCE else tables.either(self.via)
        merge = table.merge_insert("id").when_matched_update_all()
        if self.insert:
            merge = merge.when_not_matched_insert_all()
        merge.execute(arrow(tables, state, self.values))

    def applied(self, state: State) -> State:
        kept = {k: v for k, v in self.values.items() if self.insert or k in state.rows}
        return state.upserted(kept)


class _NoRows:
    """A write that changes no value."""

    @property
    def touched(self) -> Collection[int]:
        return ()

    def applied(self, state: State) -> State:
        return state


@dataclass(frozen=True)
class Index(_NoRows):
    """An index is made, or made anew."""

    role: str
    kind: str = "btree"

    def write(self, tables: Tables, state: State) -> None:
        configs: dict[str, Callable[[], Any]] = {
            "btree": BTree,
            "fts": FTS,
            "vector": lambda: IvfFlat(num_partitions=1),
        }
        tables.lancedb().create_index(state.names[self.role], config=configs[self.kind]())


@dataclass(frozen=True)
class DropIndex(_NoRows):
    """All indexes on a column go."""

    role: str

    def write(self, tables: Tables, state: State) -> None:
        table = tables.lancedb()
        for index in table.list_indices():
            if index.columns == [state.names[self.role]]:
                table.drop_index(index.name)


@dataclass(frozen=True)
class Compact(_NoRows):
    """Fragments are merged."""

    options: Mapping[str, Any]
    via: str = LANCE

    def write(self, tables: Tables, state: State) -> None:
        if self.via == OURS:
            tables.ours().compact_files(**self.options)
        else:
            tables.lance().optimize.compact_files(**self.options)


@dataclass(frozen=True)
class Optimize(_NoRows):
    """LanceDB's own housekeeping: compaction and indexes."""

    via: str = LANCEDB

    def write(self, tables: Tables, state: State) -> None:
        tables.either(self.via).optimize()


@dataclass(frozen=True)
class Cleanup(_NoRows):
    """Old versions go, down to the latest one."""

    delete_unverified: bool = False

    def write(self, tables: Tables, state: State) -> None:
        tables.lance().cleanup_old_versions(
            older_than=timedelta(0),
            delete_unverified=self.delete_unverified,
            error_if_tagged_old_versions=False,
        )


@dataclass(frozen=True)
class Tag(_NoRows):
    """A version gets a name, or a branch goes off from it."""

    name: str
    branch: bool = False

    def write(self, tables: Tables, state: State) -> None:
        dataset = tables.lance()
        if self.branch:
            dataset.create_branch(self.name, dataset.version)
        else:
            dataset.tags.create(self.name, dataset.version)


@dataclass(frozen=True)
class Rename(_NoRows):
    """A column gets another name; who reads it goes on reading it."""

    role: str
    name: str
    via: str = LANCEDB

    def write(self, tables: Tables, state: State) -> None:
        change = {"path": state.names[self.role], "rename": self.name}
        tables.either(self.via).alter_columns(change)

    def applied(self, state: State) -> State:
        return replace(state, names={**state.names, self.role: self.name})


@dataclass(frozen=True)
class AddPlain(_NoRows):
    """A column without a function comes, perhaps under the old name of another."""

    role: str
    name: str
    via: str = LANCEDB

    def write(self, tables: Tables, state: State) -> None:
        tables.either(self.via).add_columns({self.name: "id + 100"})

    def applied(self, state: State) -> State:
        named = replace(state, names={**state.names, self.role: self.name})
        return named.mapped(lambda row: row.put({self.role: _number(row) + 100}))


def _number(row: Row) -> int:
    number = row.value("id")
    assert isinstance(number, int)
    return number


@dataclass(frozen=True)
class Cast(_NoRows):
    """An input gets another type that holds the same values. In Lance it is another field then."""

    role: str
    type_name: str
    via: str = LANCEDB

    def write(self, tables: Tables, state: State) -> None:
        DropIndex(self.role).write(tables, state)  # Lance casts no column that has one
        wanted = pa.type_for_alias(self.type_name)
        change = {"path": state.names[self.role], "data_type": wanted}
        tables.either(self.via).alter_columns(change)

    def applied(self, state: State) -> State:
        return replace(state, loose=state.loose | {self.role})


@dataclass(frozen=True)
class ReplaceInput(_NoRows):
    """An input is dropped with plain LanceDB, and another one comes under its name."""

    role: str
    offset: int

    def write(self, tables: Tables, state: State) -> None:
        table, name = tables.lancedb(), state.names[self.role]
        table.drop_columns([name])
        table.add_columns({name: f"id + {self.offset}"})

    def applied(self, state: State) -> State:
        loose = replace(state, loose=state.loose | {self.role})
        return loose.mapped(lambda row: row.put({self.role: _number(row) + self.offset}))


def udf_of(state: State, column: Column) -> Any:
    names = [state.names[role] for role in column.inputs]
    return make_udf(column.role, column.function, names)


@dataclass(frozen=True)
class DropAndAdd(_NoRows):
    """A computed column is dropped and declared again: nothing of it is left."""

    role: str
    via: str = OURS

    def write(self, tables: Tables, state: State) -> None:
        name = state.names[self.role]
        tables.either(self.via).drop_columns([name])
        tables.ours().add_columns({name: udf_of(state, state.columns[self.role])})

    def applied(self, state: State) -> State:
        emptied = state.mapped(lambda row: row.without(self.role))
        return replace(emptied, loose=state.loose | {self.role})


@dataclass(frozen=True)
class Alter(_NoRows):
    """A computed column gets another version of its function."""

    role: str
    factor: int

    def write(self, tables: Tables, state: State) -> None:
        column = self._column(state)
        change = {"path": state.names[self.role], "udf": udf_of(state, column)}
        tables.ours().alter_columns(change)

    def applied(self, state: State) -> State:
        return replace(state, columns={**state.columns, self.role: self._column(state)})

    def _column(self, state: State) -> Column:
        column = state.columns[self.role]
        return replace(column, function=replace(column.function, factor=self.factor))


@dataclass(frozen=True)
class Overwrite:
    """All rows are replaced.

    With `keep_columns` the schema is the old one, with what it says of the computed columns, and
    some of their values may come along. Without, the columns are declared again.
    """

    values: Values
    keep_columns: bool

    @property
    def touched(self) -> Collection[int]:
        return self.values.keys()

    def write(self, tables: Tables, state: State) -> None:
        data = arrow(tables, state, self.values)
        if self.keep_columns:
            tables.create(self._completed(data, tables.ours().schema))
            return
        tables.create(data)
        for column in state.columns.values():  # inputs come before who reads them
            tables.ours().add_columns({state.names[column.role]: udf_of(state, column)})

    def _completed(self, data: pa.Table, schema: pa.Schema) -> pa.Table:
        fields = [f for f in schema if not f.name.startswith("__")]
        columns = [
            data[f.name] if f.name in data.schema.names else pa.nulls(len(data), f.type)
            for f in fields
        ]
        return pa.Table.from_arrays(columns, schema=pa.schema(fields))

    def applied(self, state: State) -> State:
        rows = replace(state, rows={}).upserted(self.values)
        if self.keep_columns:
            return replace(rows, loose=state.loose | state.names.keys())
        present = {"id", *next(iter(self.values.values())), *state.columns}
        return replace(rows, names={r: n for r, n in state.names.items() if r in present})


@dataclass(frozen=True)
class Recompute(_NoRows):
    """Another process backfills a column."""

    role: str

    def write(self, tables: Tables, state: State) -> None:
        tables.ours().backfill(state.names[self.role])

    def applied(self, state: State) -> State:
        job = Job(state.chain(self.role, upstream=True), failing=False)
        rows = {
            key: frozenset(o.row for row in possible for o in job.run(row))
            for key, possible in state.rows.items()
        }
        return replace(state, rows=rows)


def write_patiently(write: Write, tables: Tables, state: State) -> None:
    """Write, again where somebody else was faster: Lance tells its users to do so."""
    for attempt in range(10):
        try:
            return write.write(tables, state)
        except (OSError, RuntimeError, ValueError) as error:
            if attempt == 9 or "conflict" not in str(error).lower():
                raise
            time.sleep(0.01)
    return None
