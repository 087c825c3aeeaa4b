"""Queries: what they give, here and now; what they refuse; the definition that they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from geneva import UDF, udf
from geneva.errors import (
    ColumnExistsError,
    ColumnNotFoundError,
    InvalidFilterError,
    InvalidUDFError,
    TypeMismatchError,
    UDFExecutionError,
    UserInputError,
)
from geneva.model.tables import TableRef
from geneva.model.view_query import ColumnKind, ViewQuery
from geneva.query import Query
from geneva.storage.columns.definitions import read_definition
from geneva.storage.lance.dataset import open_dataset
from geneva.storage.views.definition import append_placeholders, create_view_table, reads_source
from geneva.udf.chunker import chunker
from support import Calls, counted, make_table

if TYPE_CHECKING:
    from geneva import Connection, Table

POINT = pa.struct([("x", pa.int64()), ("y", pa.int64())])
WORD = pa.schema([("at", pa.int64()), ("word", pa.string())])


@udf(data_type=pa.int64())
def double(id: int) -> int:
    return id * 2


@udf(data_type=pa.string())
def shout(name: pa.Array) -> pa.Array:
    import pyarrow.compute as pc

    return pc.utf8_upper(name)


@chunker(output_schema=WORD)
def words(name: str) -> Iterator[tuple[int, str]]:
    yield from enumerate(name.split())


def rows(start: int, end: int) -> pa.Table:
    ids = range(start, end)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "name": pa.array([" ".join("abcdef"[: i % 4]) for i in ids], pa.string()),
            "point": pa.array([{"x": i, "y": -i} for i in ids], POINT),
        }
    )


@pytest.fixture(params=[True, False], ids=["stable ids", "addresses"])
def table(request: pytest.FixtureRequest, local_db: Connection) -> Table:
    return make_table(local_db, [rows(0, 4), rows(4, 10)], stable_row_ids=request.param)


@pytest.fixture
def query(table: Table) -> Query:
    return Query(table)


def test_a_query_gives_all_of_the_table(query: Query) -> None:
    assert query.to_arrow().equals(rows(0, 10).combine_chunks())
    assert query.schema == rows(0, 0).schema
    assert query.count_rows() == 10
    assert query.to_pandas()["id"].tolist() == list(range(10))
    assert query.to_list()[3] == rows(3, 4).to_pylist()[0]


@pytest.mark.parametrize("flatten", [None, False, True, 1, 2, 5])
def test_lancedbs_words_of_a_search(local_db: Connection, flatten: Any) -> None:
    struct = {"a": 1, "inner": {"b": 2, "deep": {"c": 3}}}
    table = local_db.create_table("nested", [{"id": i, "s": struct} for i in range(3)])
    for where in ({}, {"prefilter": True}, {"prefilter": False}):
        found = table.search(None).where("id > 0", **where).to_pandas(flatten=flatten)
        theirs = table.search().where("id > 0", **where).to_pandas(flatten=flatten)
        assert found.equals(theirs)
    with pytest.raises(UserInputError, match="flatten must be"):
        table.search(None).to_pandas(flatten=0)


def test_an_address_leads_to_its_row(query: Query) -> None:
    every = query.select({"id": "id", "at": "_rowaddr"}).to_list()
    for row in (every[0], every[-1]):
        found = query.where(f"_rowaddr IN ({row['at']})").select({"id": "id", "at": "_rowaddr"})
        assert found.to_list() == [row]
    with pytest.raises(UserInputError, match="another value each time"):
        query.where("_rowaddr = 0").check_viewable()


def test_filters_add_up(query: Query) -> None:
    some = query.where("id > 2").where("id < 5 OR id = 8 -- or so")
    assert [r["id"] for r in some.to_list()] == [3, 4, 8]
    assert [r["id"] for r in query.where("CASE WHEN id > 7 THEN true END").to_list()] == [8, 9]
    assert query.count_rows() == 10, "queries never change"


def test_columns_are_chosen_named_and_computed(query: Query) -> None:
    made = query.select(
        {
            "key": "id",
            "x": "point.x",
            "next": "id + 1",
            "size": "CASE WHEN id > 4 THEN 'big' ELSE 'small' END",
            "hash": "left(md5(name), 4)",
            "twice": double,
            "loud": (shout, ["name"]),
        }
    )
    assert made.schema.names == ["key", "x", "next", "size", "hash", "twice", "loud"]
    assert made.schema.field("hash").type == pa.string()
    got = made.where("id = 7").to_list()
    assert got == [
        {
            "key": 7,
            "x": 7,
            "next": 8,
            "size": "big",
            "hash": got[0]["hash"],
            "twice": 14,
            "loud": "A B C",
        }
    ]
    assert made.to_arrow().schema == made.schema


def test_a_list_selects_columns(query: Query) -> None:
    assert query.select(["name", "point.y"]).schema.names == ["name", "y"]
    assert query.add_column(double).select(["double", "id"]).limit(2).to_list() == [
        {"double": 0, "id": 0},
        {"double": 2, "id": 1},
    ]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((double,), "double"),
        (((double, ["id"]),), "double"),
        (("twice", double), "twice"),
        (("twice", "id * 2"), "twice"),
        (("twice", (double, ["point.x"])), "twice"),
        (({"twice": double},), "twice"),
        (({"twice": "id * 2"},), "twice"),
    ],
)
def test_columns_are_added(query: Query, arguments: tuple[Any, ...], name: str) -> None:
    made = query.add_column(*arguments)
    assert made.schema.names == ["id", "name", "point", name]
    assert made.to_arrow().column(name).to_pylist() == [i * 2 for i in range(10)]


def test_a_shuffle_keeps_its_order(query: Query, table: Table) -> None:
    shuffled = [r["id"] for r in query.shuffle(seed=5).to_list()]
    assert shuffled != sorted(shuffled) == list(range(10))
    assert [r["id"] for r in Query(table).shuffle(5).to_list()] == shuffled
    assert [r["id"] for r in query.shuffle(6).to_list()] != shuffled
    assert [r["id"] for r in query.shuffle(5).offset(2).limit(3).to_list()] == shuffled[2:5]
    drawn = query.shuffle()
    assert drawn.to_list() == drawn.to_list()
    assert drawn.definition().shuffle_seed is not None


def test_limits_count_after_the_filter(query: Query) -> None:
    some = query.where("id >= 3").offset(2).limit(3)
    assert [r["id"] for r in some.to_list()] == [5, 6, 7]
    assert some.count_rows() == 3
    assert query.limit(0).to_list() == []
    assert query.offset(20).to_arrow().schema == query.schema
    assert query.limit(3).limit(None).count_rows() == 10


def test_batches_have_the_size_asked_for(query: Query) -> None:
    sizes = [batch.num_rows for batch in query.add_column(double).to_batches(4)]
    assert sizes == [4, 4, 2]
    with pytest.raises(UserInputError, match="batch_size"):
        query.to_batches(0)


def test_a_function_is_called_once_a_row(query: Query, calls: Calls) -> None:
    def triple(id: int) -> int:
        return id * 3

    made = query.add_column(counted(calls, triple)).where("id < 3")
    assert calls.count == 0
    made.to_arrow()
    assert sorted(calls.rows) == [0, 1, 2]


def test_batch_functions_see_their_batch_size(query: Query) -> None:
    seen: list[int] = []

    @udf(data_type=pa.int64(), batch_size=4)
    def size(id: pa.Array) -> pa.Array:
        seen.append(len(id))
        return id

    query.add_column(size).to_arrow()
    assert seen == [4, 4, 2]


@pytest.mark.parametrize("width", [1, 3])
def test_batch_functions_of_numbers(query: Query, width: int) -> None:
    """What such a function returned is no array of Arrow yet when the call is over."""

    @udf(data_type=pa.list_(pa.float32(), width), batch_size=4)
    def vector(id: pa.Array) -> np.ndarray[Any, Any]:
        return np.repeat(id.to_numpy().astype(np.float32), width).reshape(-1, width)

    found = query.add_column(vector).to_arrow()["vector"].to_pylist()
    assert found == [[float(i)] * width for i in range(10)]


def test_a_failing_function_says_so(query: Query) -> None:
    @udf(data_type=pa.int64())
    def fails(id: int) -> int:
        raise ValueError("no")

    with pytest.raises(UDFExecutionError, match="fails"):
        query.add_column(fails).to_arrow()


def test_the_version_is_that_of_the_handle(table: Table) -> None:
    query = Query(table)
    version = table.version
    table.add(rows(10, 12))
    assert query.count_rows() == 12
    table.checkout(version)
    assert query.count_rows() == 10
    assert query.source_version == version


def test_deletes_and_updates_are_seen(table: Table) -> None:
    table.delete("id IN (0, 5)")
    table.update(where="id = 3", values={"name": "changed"})
    got = {r["id"]: r["name"] for r in Query(table).to_list()}
    assert sorted(got) == [1, 2, 3, 4, 6, 7, 8, 9]
    assert got[3] == "changed"


def test_chunks_are_rows(query: Query) -> None:
    made = query.select(["id", "name"]).add_column(words)
    assert made.schema == pa.schema([*rows(0, 0).select(["id", "name"]).schema, *WORD])
    expected = [
        {"id": i, "name": name, "at": at, "word": word}
        for i, name in zip(*rows(0, 10).select(["id", "name"]).to_pydict().values(), strict=True)
        for at, word in enumerate(name.split())
    ]
    assert made.to_list() == expected
    assert made.count_rows() == len(expected)
    assert made.select({"key": "id"}).schema.names == ["key", "at", "word"]
    # A limit is of source rows: those without chunks count.
    assert {r["id"] for r in made.limit(3).to_list()} == {1, 2}
    assert made.where("id = 0").to_arrow().schema == made.schema


def test_a_query_has_one_chunker(query: Query) -> None:
    with pytest.raises(InvalidUDFError, match="one chunker"):
        query.add_column(words).add_column({"more": (other_words, ["name"])})
    with pytest.raises(ColumnExistsError, match="'name'"):
        query.add_column({"name": other_words})
    with pytest.raises(ColumnExistsError, match=r"Chunker 'words' yields a column 'at', .*'AT'"):
        query.select({"AT": "id"}).add_column(words)


@chunker(output_schema=pa.schema([("piece", pa.string())]))
def other_words(name: str) -> Iterator[tuple[str]]:
    yield (name,)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda q: q.where("idd > 3"), ColumnNotFoundError, "Did you mean 'id'"),
        (lambda q: q.where("id >"), InvalidFilterError, "can't be used"),
        (lambda q: q.where("id + 1"), InvalidFilterError, "no condition"),
        (lambda q: q.where(" "), UserInputError, "SQL condition"),
        (lambda q: q.where(7), UserInputError, "SQL condition"),
        (lambda q: q.select(["nme"]), ColumnNotFoundError, "Did you mean 'name'"),
        (lambda q: q.select(["point.z"]), ColumnNotFoundError, "point.z"),
        (lambda q: q.select(["id + 1"]), ColumnNotFoundError, "needs a name"),
        (lambda q: q.select("id"), UserInputError, "list of columns"),
        (lambda q: q.select([]), UserInputError, "list of columns"),
        (lambda q: q.select([7]), UserInputError, "names of columns"),
        (lambda q: q.select({7: "id"}), UserInputError, "string"),
        (lambda q: q.select(["id", "id"]), ColumnExistsError, "'id'"),
        (lambda q: q.select({"a": "id", "A": "id"}), ColumnExistsError, "'a'"),
        (lambda q: q.select({"__a": "id"}), UserInputError, "Geneva's own"),
        (lambda q: q.select({"a.b": "id"}), UserInputError, "'.'"),
        (lambda q: q.select({"a": "idd + 1"}), ColumnNotFoundError, "Did you mean 'id'"),
        (lambda q: q.select({"a": "id +"}), UserInputError, "can't be used"),
        (lambda q: q.select({"a": "id + point"}), UserInputError, "can't be used"),
        (lambda q: q.select({"a": "count(*)"}), UserInputError, "can't be used"),
        (lambda q: q.select({"a": "NULL"}), UserInputError, "CAST"),
        (lambda q: q.select({"a": " "}), UserInputError, "empty"),
        (lambda q: q.select({"a": len}), InvalidUDFError, "@udf"),
        (lambda q: q.add_column(len), InvalidUDFError, "@udf"),
        (lambda q: q.add_column("a"), UserInputError, "needs a UDF"),
        (lambda q: q.add_column({"id": double}), ColumnExistsError, "'id'"),
        (lambda q: q.add_column("a", (double, ["nme"])), ColumnNotFoundError, "'name'"),
        (lambda q: q.add_column("a", (double, ["id", "id"])), InvalidUDFError, "takes 1"),
        (lambda q: q.add_column("a", (double, ["name"])), TypeMismatchError, "name"),
        (lambda q: q.limit(-1), UserInputError, "limit"),
        (lambda q: q.offset(1.5), UserInputError, "offset"),
        (lambda q: q.limit(True), UserInputError, "limit"),
        (lambda q: q.shuffle("x"), UserInputError, "seed"),
        *((lambda q, c=c: q.without(c), UserInputError, "list of names") for c in (5, None, [5])),
        (lambda q: q.with_fragments(None), UserInputError, "list of numbers"),
        (lambda q: q.with_fragments([["id"]]), UserInputError, "list of numbers"),
        (lambda q: q.with_fragments(True), UserInputError, "list of numbers"),
        (lambda q: q.rerank(), AttributeError, "table.search"),
    ],
)
def test_mistakes_are_refused_before_any_work(
    query: Query, build: Callable[[Query], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build(query)


def test_one_column_is_left_out_by_its_name_alone(query: Query) -> None:
    left = query.select({"i": "id", "id": "id", "name": "name"}).without("id")
    assert left.schema.names == ["i", "name"]


def test_a_column_that_lance_can_not_read_is_said_before_any_work(local_db: Connection) -> None:
    uri = local_db.create_table("odd", rows(0, 3)).ref.uri
    lance.write_dataset(rows(0, 3).append_column("a`b", rows(0, 3)["id"]), uri, mode="overwrite")
    query = local_db.open_table("odd").query().where("id > 1")
    with pytest.raises(ColumnNotFoundError, match=r"'a`b' can't be read.*Rename it.*leave it out"):
        query.to_batches()
    for left in (query.select(["id"]), query.without(["a`b", "name", "point"])):
        assert left.to_list() == [{"id": 2}]
    assert query.count_rows() == 1


def test_the_definition_says_what_is_read(query: Query, table: Table) -> None:
    made = (
        query.where("id > 2 AND point.x < 9")
        .select({"key": "id", "y": "point.y", "label": "name || 'x'", "twice": double})
        .add_column({"loud": (shout, ["name"])})
        .shuffle(3)
        .limit(5)
        .offset(1)
    )
    stored = made.definition()
    assert (stored.base_table, stored.base_db_uri) == (table.name, table._connection.uri)
    assert stored.where == "id > 2 AND point.x < 9"
    assert stored.where_inputs == ("id", "point.x")
    assert [(c.name, c.kind, c.expression, c.inputs) for c in stored.columns] == [
        ("key", ColumnKind.COLUMN, "id", ("id",)),
        ("y", ColumnKind.COLUMN, "point.y", ("point.y",)),
        ("label", ColumnKind.SQL, "name || 'x'", ("name",)),
        ("twice", ColumnKind.UDF, "", ("id",)),
        ("loud", ColumnKind.UDF, "", ("name",)),
    ]
    assert (stored.seed, stored.limit, stored.offset) == (3, 5, 1)
    assert (stored.columns[3].udf_name, stored.columns[3].udf_version) == ("double", double.version)
    assert len(stored.columns[3].udf_digest) == 64
    assert ViewQuery.from_json(stored.to_json()) == stored
    assert made.udfs().keys() == {"twice", "loud"}


def test_a_chunker_is_one_column_of_the_definition(query: Query) -> None:
    made = query.select(["id"]).add_column(words)
    chunked = made.definition().chunker
    assert chunked is not None
    assert (chunked.name, chunked.inputs, chunked.udf_name) == ("words", ("name",), "words")
    assert made.chunker is not None
    assert isinstance(made.udfs()["words"], UDF)
    assert made.view_schema({"words": "d"}).names == ["id", "at", "word"]


def test_the_schema_of_a_view_has_the_definitions(query: Query, table: Table) -> None:
    table.add_columns({"computed": double})
    made = Query(table).add_column("loud", (shout, ["name"]))
    schema = made.view_schema({"loud": "digest"})
    assert schema.names == ["id", "name", "point", "computed", "loud"]
    definition = read_definition(schema, "loud")
    assert definition is not None
    assert (definition.inputs, definition.udf_digest) == (("name",), "digest")
    assert reads_source(schema.field("loud"))
    assert read_definition(schema, "computed") is None, "a copy is no computed column"


@pytest.mark.parametrize(
    "build",
    [
        lambda q: q.where("id < random() * 10"),
        lambda q: q.select({"a": "id + random()"}),
        lambda q: q.select({"a": "_rowid + id"}),
    ],
)
def test_what_has_another_value_each_time_is_no_view(
    query: Query, build: Callable[[Query], Query]
) -> None:
    made = build(query)
    made.to_arrow()
    with pytest.raises(UserInputError, match="can't be part of a view"):
        made.check_viewable()
    query.check_viewable()


def test_a_query_explains_itself(query: Query, table: Table) -> None:
    text = query.where("id > 2").select({"n": "id + 1", "d": double}).shuffle(3).limit(4).explain()
    assert text.splitlines() == [
        f"rows of 't' at version {table.version}",
        "  where id > 2  [reads id]",
        "  in the order of shuffle 3",
        "  at most 4 rows",
        "  n: sql id + 1  [reads id]",
        "  d: udf double  [reads id]",
    ]


def test_a_view_is_made_by_the_connection(query: Query, table: Table) -> None:
    class Recorder:
        def create_materialized_view(self, name: str, given: Query, **options: Any) -> Any:
            return name, given, options

    some = query.where("id > 3")
    made = some.create_materialized_view(conn=Recorder(), view_name="v")  # type: ignore[arg-type]
    assert made == ("v", some, {})


def test_system_columns_of_a_view_are_hidden(local_db: Connection) -> None:
    source = make_table(local_db, [3], stable_row_ids=True)
    stored = Query(source).definition()
    ref = TableRef("v", f"{local_db.uri}/v.lance")
    create_view_table(ref, Query(source).view_schema({}), stored, 1, "2")
    append_placeholders(ref, open_dataset(ref), np.arange(3, dtype=np.uint64))
    over = Query(local_db.open_table("v"))
    assert over.schema.names == ["id"]
    assert over.to_list() == [{"id": None}] * 3
    with pytest.raises(UserInputError, match="Geneva's own"):
        over.select(["__source_row_id"])


@pytest.mark.parametrize("ask", ["where", "select", "add_column"])
def test_what_merely_has_to_sql_is_no_expression(table: Table, ask: str) -> None:
    import lancedb.expr  # noqa: F401  with it an expression would be known
    import pandas as pd

    frame = pd.DataFrame({"id": [1]})
    with pytest.raises(UserInputError, match=r"DataFrame|must be an SQL condition"):
        getattr(table.query(), ask)(frame if ask == "where" else {"a": frame})
