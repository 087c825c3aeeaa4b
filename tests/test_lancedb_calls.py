"""LanceDB's calls, made through its own objects and through ours: what comes back is the same.

Our table has a column that a function has computed, and so columns of Geneva's own, which nobody
is to see; LanceDB's has the same column computed by SQL.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from lancedb.index import FTS, BTree, IvfFlat, IvfPq
from lancedb.query import MatchQuery
from lancedb.rerankers import RRFReranker

import geneva
from geneva.execution.runner import InProcessRunner

pytestmark = pytest.mark.slow

ROWS = 300
VECTOR = [0.5] * 4
STABLE = {"new_table_enable_stable_row_ids": "true"}
BLOB = {"lance-encoding:blob": "true"}
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("s", pa.string()),
        ("v", pa.list_(pa.float32(), 4)),
        pa.field("b", pa.large_binary(), metadata=BLOB),
    ]
)
MORE = [{"id": 1000, "s": "new", "v": VECTOR, "b": b"q"}]
PART = pa.table({"id": pa.array([1, 2000], pa.int64()), "s": ["m", "n"]})


@geneva.udf(data_type=pa.int64())
def triple(id: int) -> int:
    return id * 3


def rows() -> pa.Table:
    random = np.random.default_rng(1)
    columns = {
        "id": range(ROWS),
        "s": [f"word{i % 7} all text{i}" for i in range(ROWS)],
        "v": list(random.random((ROWS, 4), np.float32)),
        "b": [bytes([i % 256]) * 5 for i in range(ROWS)],
    }
    return pa.table(columns, schema=SCHEMA)


def plain(found: Any) -> Any:
    """What a call returned, as something that can be compared."""
    if isinstance(found, pa.Table):
        return {name: found[name].to_pylist() for name in found.schema.names}
    if type(found).__module__.startswith("pandas"):
        return list(found.columns), json.dumps(found.to_dict("records"), default=str)
    if isinstance(found, list | tuple):
        return [plain(item) for item in found]
    if isinstance(found, dict):
        return {key: plain(value) for key, value in found.items()}
    if isinstance(found, int | float | str | bytes | None):
        return found
    return type(found).__name__


def indexed(table: Any, column: str, config: Any) -> Any:
    table.create_index(column, config=config)
    return table.list_indices()[0]


def branched(table: Any) -> Any:
    branch = table.branches.create("trial")
    branch.delete("id < 10")
    found = branch.count_rows(), table.count_rows(), branch.current_branch()
    names, again = sorted(table.branches.list()), table.branches.checkout("trial").schema.names
    table.branches.delete("trial")
    return *found, names, again, sorted(table.branches.list())


def tagged(table: Any) -> Any:
    table.tags.create("a", 1)
    table.tags.create("b", 2)
    table.tags.update("b", 1)
    table.tags.delete("a")
    table.checkout("b")
    return table.version, list(table.tags.list()), table.tags.get_version("b")


def text_searched(table: Any, ask: Callable[[Any], Any]) -> Any:
    table.create_fts_index("s")
    return ask(table)


def viewed(db: Any, table: Any) -> Any:
    view = db.create_materialized_view("m", "t", select=["id", "x"], where="id < 10")
    found = view.name, view.table.count_rows()
    table.delete("id = 0")
    mode, names = view.refresh().mode, db.list_materialized_views()
    again = db.open_materialized_view("m").table.to_arrow()["x"].to_pylist()
    db.drop_materialized_view("m")
    return *found, mode, names, sorted(again), db.table_names()


def in_namespace(db: Any) -> Any:
    db.create_namespace(["n"])
    made = db.create_table("inner", [{"a": 1}], namespace_path=["n"]).count_rows()
    opened = db.open_table("inner", namespace_path=["n"]).count_rows()
    names = db.list_namespaces().namespaces, db.table_names(namespace_path=["n"])
    db.drop_table("inner", namespace_path=["n"])
    db.drop_namespace(["n"])
    return made, opened, names, db.list_namespaces().namespaces


def after(done: Any, *found: Any) -> Any:
    """What is there after something was done."""
    return [each() if callable(each) else each for each in found]


SYNC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda db, t: after(t.add(MORE), t.count_rows),
    "add_columns": lambda db, t: after(t.add_columns({"y": "id + 1"}), lambda: t.schema.names),
    "add_columns of fields": lambda db, t: after(
        t.add_columns(pa.schema([("n", pa.int32())])), lambda: t.schema.names
    ),
    "add_columns of computed": lambda db, t: after(
        t.add_columns(computed={"n": "id * 2"}),
        lambda: t.refresh_column("n").rows_filled,
        lambda: t.search().select(["id", "n"]).to_arrow(),
    ),
    "refresh_column_async": lambda db, t: after(
        t.add_columns(computed={"n": "id"}), lambda: t.refresh_column_async("n").wait().rows_filled
    ),
    "alter_columns": lambda db, t: after(
        t.alter_columns({"path": "s", "rename": "text"}), lambda: t.schema.names
    ),
    "drop_columns": lambda db, t: after(t.drop_columns(["x"]), lambda: t.schema.names),
    "blobs": lambda db, t: [file.read() for file in t.fetch_blob_files("b", [0, 1])],
    "blob_columns": lambda db, t: t.blob_columns(),
    "branches": lambda db, t: branched(t),
    "tags": lambda db, t: tagged(t),
    "checkout": lambda db, t: after(t.delete("id = 1"), lambda: t.checkout(1), t.count_rows),
    "restore": lambda db, t: after(t.delete("id < 50"), lambda: t.restore(1), t.count_rows),
    "count_rows": lambda db, t: (t.count_rows(), t.count_rows("id < 9"), len(t)),
    "an index of vectors": lambda db, t: (
        indexed(t, "v", IvfFlat(num_partitions=1)).columns,
        t.index_stats(t.list_indices()[0].name).num_indexed_rows,
        [row["id"] for row in t.search(VECTOR).nprobes(2).limit(5).to_list()],
    ),
    "an index in older words": lambda db, t: after(
        t.create_index(
            metric="cosine", num_partitions=1, num_sub_vectors=2, vector_column_name="v"
        ),
        lambda: t.list_indices()[0].columns,
    ),
    "an index of quantized vectors": lambda db, t: (
        indexed(t, "v", IvfPq(num_partitions=1, num_sub_vectors=2)).columns,
        len(t.search(VECTOR).refine_factor(4).bypass_vector_index().limit(5).to_list()),
    ),
    "a scalar index": lambda db, t: after(
        t.create_scalar_index("x", index_type="BITMAP"), lambda: t.list_indices()[0].columns
    ),
    "an index behind": lambda db, t: after(
        t.create_index_async("id", config=BTree()).wait(), lambda: len(t.list_indices())
    ),
    "an index waited for and dropped": lambda db, t: after(
        indexed(t, "id", BTree()),
        lambda: t.wait_for_index([t.list_indices()[0].name], timeout=timedelta(seconds=60)),
        lambda: t.prewarm_index(t.list_indices()[0].name),
        lambda: t.drop_index(t.list_indices()[0].name),
        lambda: len(t.list_indices()),
    ),
    "delete": lambda db, t: after(t.delete("id < 5"), t.count_rows),
    "head": lambda db, t: t.head(3),
    "facts": lambda db, t: (t.id, t.name, t.namespace, t.uri.rsplit("/", 1)[1], t.schema.names),
    "merge_insert": lambda db, t: (
        t.merge_insert("id").when_matched_update_all().execute(PART).num_updated_rows,
        t.count_rows(),
    ),
    "merge_insert with a condition": lambda db, t: (
        t.merge_insert("id")
        .when_matched_update_all(where="target.id < 1")
        .execute(PART)
        .num_updated_rows
    ),
    "merge_insert that deletes": lambda db, t: (
        t.merge_insert("id").when_not_matched_by_source_delete("id > 9").execute(PART),
        t.count_rows(),
    )[1],
    "optimize": lambda db, t: after(t.add(MORE), lambda: t.optimize() and None, t.count_rows),
    "metadata of fields": lambda db, t: after(
        t.update_field_metadata({"path": "id", "metadata": {"k": "v"}}),
        lambda: t.schema.field("id").metadata[b"k"],
    ),
    "search()": lambda db, t: (
        t.search().where("id < 3").select(["id", "x"]).limit(2).offset(1).to_arrow()
    ),
    "search() as a frame": lambda db, t: t.search().where("id < 3").select(["id"]).to_pandas(),
    "search() of all columns": lambda db, t: t.search().limit(1).to_arrow().schema.names,
    "search() explained": lambda db, t: isinstance(t.search().explain_plan(), str),
    "search of a vector": lambda db, t: [row["id"] for row in t.search(VECTOR).limit(4).to_list()],
    "its columns": lambda db, t: (
        t.search(VECTOR).with_row_id(True).limit(1).to_arrow().schema.names
    ),
    "search with words": lambda db, t: (
        t.search(VECTOR).where("id > 50", prefilter=True).distance_type("cosine").limit(3).to_list()
    ),
    "search in a range": lambda db, t: len(t.search(VECTOR).distance_range(0, 0.1).to_list()),
    "search in batches": lambda db, t: sum(
        batch.num_rows for batch in t.search(VECTOR).limit(9).to_batches()
    ),
    "search of several": lambda db, t: len(t.search([VECTOR, VECTOR]).limit(2).to_list()),
    "full text": lambda db, t: text_searched(
        t, lambda t: t.search("text17", query_type="fts").limit(2).to_arrow().drop_columns(["b"])
    ),
    "full text as a frame": lambda db, t: text_searched(
        t,
        lambda t: (
            t.search("text17", query_type="fts").select(["id", "x"]).limit(2).to_pandas(),
            t.search("text17", query_type="fts").output_schema().names,
        ),
    ),
    "a match": lambda db, t: text_searched(
        t, lambda t: [row["id"] for row in t.search(MatchQuery("text17", "s")).to_list()]
    ),
    "hybrid": lambda db, t: text_searched(
        t,
        lambda t: (
            t.search(query_type="hybrid")
            .vector(VECTOR)
            .text("word1")
            .rerank(RRFReranker())
            .limit(3)
            .to_arrow()
            .schema.names
        ),
    ),
    "take_offsets": lambda db, t: t.take_offsets([3, 1]).to_arrow().drop_columns(["b"]),
    "take_row_ids": lambda db, t: t.take_row_ids([3, 1]).with_row_id().select(["id"]).to_list(),
    "stats": lambda db, t: t.stats().num_rows,
    "to_arrow": lambda db, t: t.to_arrow().drop_columns(["b"]),
    "to_pandas": lambda db, t: list(t.to_pandas().columns),
    "to_lance": lambda db, t: t.to_lance().count_rows(),
    "update": lambda db, t: (
        t.update(where="id = 1", values={"s": "changed"}).rows_updated,
        t.update(where="id = 2", values_sql={"s": "upper(s)"}).rows_updated,
        t.count_rows("s = 'changed'"),
    ),
    "what is a service's": lambda db, t: t.function_errors(),
    "clone_table": lambda db, t: db.clone_table("c", t.uri).count_rows(),
    "create_table": lambda db, t: (
        db.create_table("n", [{"a": 1}]).count_rows(),
        db.create_table("n", [{"a": 1}], mode="overwrite").count_rows(),
        db.create_table("n", schema=pa.schema([("a", pa.int64())]), exist_ok=True).count_rows(),
    ),
    "create_table of batches": lambda db, t: db.create_table(
        "n", iter([pa.record_batch({"a": [1]})]), schema=pa.schema([("a", pa.int64())])
    ).count_rows(),
    "create_table twice": lambda db, t: db.create_table("t", [{"a": 1}]),
    "drop_table": lambda db, t: after(db.drop_table("t"), db.table_names),
    "drop_table of none": lambda db, t: db.drop_table("nope"),
    "drop_table of none, ignored": lambda db, t: db.drop_table("nope", ignore_missing=True),
    "drop_table_async": lambda db, t: after(db.drop_table_async("t").wait(), db.table_names),
    "drop_all_tables": lambda db, t: after(db.drop_all_tables(), db.table_names),
    "namespaces": lambda db, t: in_namespace(db),
    "names": lambda db, t: (db.table_names(), db.list_tables().tables, len(db), "t" in db),
    "views": viewed,
    "views of all columns": lambda db, t: after(
        t.drop_columns(["b"]),  # LanceDB makes no views of blobs
        lambda: db.create_materialized_view("m", "t").table.schema.names,
        lambda: db.create_materialized_view("n", "t", with_no_data=True).refresh().mode,
        lambda: db.open_table("n").search().where("id < 3").select(["id", "x"]).to_list(),
    ),
    "views behind": lambda db, t: after(
        db.create_materialized_view_async("m", "t", select=["id"]).wait(),
        db.table_names,
        lambda: db.drop_materialized_view_async("m").wait(),
        db.table_names,
    ),
    "a service's views": lambda db, t: db.create_view("vw", "select * from t"),
    "a service's functions": lambda db, t: db.list_functions(),
    "a service's secrets": lambda db, t: db.list_secrets(),
    "a service's jobs": lambda db, t: db.open_job("x"),
    "a service's queries": lambda db, t: db.execute_query("select 1"),
    "rename_table": lambda db, t: db.rename_table("t", "u"),
    "serialize": lambda db, t: type(db.serialize()).__name__,
    "namespace_client": lambda db, t: db.namespace_client(),
}


def opened(path: Path, kind: str) -> tuple[Any, Any]:
    if kind == "lancedb":
        theirs = lancedb.connect(path / kind)
        table = theirs.create_table("t", rows(), storage_options=STABLE)
        table.add_columns({"x": "id * 3"})
        return theirs, table
    ours = geneva.connect(path / kind, runner=InProcessRunner)
    made = ours.create_table("t", rows())
    made.add_columns({"x": triple})
    made.backfill("x")
    return ours, made


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives, or the kind of error that it raises."""
    try:
        return plain(call())
    except Exception as error:  # noqa: BLE001  whatever LanceDB raises, ours does
        return f"{type(error).__name__}: {error}".partition(", /")[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", list(SYNC))
def test_a_call(tmp_path: Path, name: str) -> None:
    db, table = opened(tmp_path, "lancedb")
    wanted = outcome(lambda: SYNC[name](db, table))
    own, made = opened(tmp_path, "geneva")
    assert outcome(lambda: SYNC[name](own, made)) == wanted


# ------------------------------------------------------------------------------- an event loop


async def async_branches(db: Any, t: Any) -> Any:
    branch = await t.branches.create("trial")
    await branch.delete("id < 10")
    found = await branch.count_rows(), await t.count_rows(), sorted(await t.branches.list())
    again = (await (await t.branches.checkout("trial")).schema()).names
    await t.branches.delete("trial")
    return *found, again


async def async_tags(db: Any, t: Any) -> Any:
    await t.tags.create("a", 1)
    await t.checkout("a")
    found = await t.version(), await t.tags.get_version("a"), list(await t.tags.list())
    await t.checkout_latest()
    return *found, (await t.schema()).names


async def async_index(db: Any, t: Any) -> Any:
    await t.create_index("id", config=BTree())
    (index,) = await t.list_indices()
    stats = await t.index_stats(index.name)
    await t.drop_index(index.name)
    return index.columns, stats.num_indexed_rows, len(await t.list_indices())


async def async_text(db: Any, t: Any) -> Any:
    await t.create_index("s", config=FTS())
    found = await (await t.search("text17", query_type="fts")).limit(3).to_arrow()
    by_query = await t.query().nearest_to_text("text17").limit(3).to_list()
    queries = [
        t.query().nearest_to(VECTOR),
        t.query().nearest_to_text("word1"),
        t.query().nearest_to(VECTOR).nearest_to_text("word1").rerank(RRFReranker()),
        t.query().nearest_to_text("word1").nearest_to(VECTOR),
        t.vector_search(VECTOR).nearest_to_text("word1"),
        t.vector_search(VECTOR).select(["id", "s"]).nearest_to_text("word1"),
        (await t.search(VECTOR)).nearest_to_text("word1"),
        (await t.search("word1", query_type="fts")).nearest_to(VECTOR),
        (await t.search("word1", query_type="fts")).nearest_to(VECTOR).select(["id"]),
    ]
    names = [(await query.limit(3).to_arrow()).schema.names for query in queries]
    words = [await t.search("text17", query_type="fts"), t.query().nearest_to_text("text17")]
    words.append((await t.search("text17", query_type="fts")).select(["id"]))
    for query in words:
        schema = (await query.output_schema()).names
        # Without the blobs, of which LanceDB makes no frame here.
        names += [schema, list((await query.select(["id", "x"]).to_pandas()).columns)]
    return found.schema.names, [r["id"] for r in by_query], names


async def async_columns(db: Any, t: Any) -> Any:
    await t.add_columns({"y": "id + 1"})
    await t.add_columns(computed={"n": "id * 2"})
    filled = (await t.refresh_column("n")).rows_filled
    await t.alter_columns({"path": "s", "rename": "text"})
    await t.drop_columns(["y"])
    return filled, (await t.schema()).names


async def async_batches(db: Any, t: Any) -> Any:
    return sum([b.num_rows async for b in await t.query().limit(10).to_batches()])


async def async_views(db: Any, t: Any) -> Any:
    await t.drop_columns(["b"])  # LanceDB makes no views of blobs
    whole = (await (await db.create_materialized_view("all", "t")).table.schema()).names
    await db.drop_materialized_view("all")
    await (await db.create_materialized_view_async("behind", "t", where="id < 3")).wait()
    whole += (await (await db.open_table("behind")).schema()).names
    await db.drop_materialized_view("behind")
    view = await db.create_materialized_view("m", "t", select=["id"], where="id < 10")
    await t.delete("id = 0")
    mode = (await view.refresh()).mode
    again = (await db.open_materialized_view("m")).table
    names = list(await db.list_materialized_views())
    await db.drop_materialized_view("m")
    return whole, mode, await again.count_rows(), names, list(await db.table_names())


async def async_namespaces(db: Any, t: Any) -> Any:
    await db.create_namespace(["n"])
    made = await db.create_table("inner", [{"a": 1}], namespace_path=["n"])
    names = list(await db.table_names(namespace_path=["n"]))
    opened = await db.open_table("inner", namespace_path=["n"])
    return await made.count_rows(), names, await opened.count_rows()


async def async_create(db: Any, t: Any) -> Any:
    made = await db.create_table("n", [{"a": 1}])
    made = await db.create_table("n", [{"a": 1}, {"a": 2}], mode="overwrite")
    clone = await db.clone_table("c", await t.uri())
    return await made.count_rows(), (await clone.schema()).names, list(await db.table_names())


async def async_writes(db: Any, t: Any) -> Any:
    await t.add(MORE)
    changed = (await t.update({"s": "z"}, where="id = 1")).rows_updated
    merged = await t.merge_insert("id").when_matched_update_all().execute(PART)
    await t.delete("id < 5")
    await t.optimize()
    return changed, merged.num_updated_rows, await t.count_rows()


async def async_closed(db: Any, t: Any) -> Any:
    with t:
        count = await t.count_rows()
    with db:
        return count, t.is_open(), db.is_open()


async def async_read(db: Any, t: Any) -> Any:
    query = t.query().where("id < 3").select(["id", "x"])
    return (
        await query.to_arrow(),
        (await t.query().limit(1).to_arrow()).schema.names,
        (await t.query().with_row_id().limit(1).to_arrow()).schema.names,
        (await t.vector_search(VECTOR).limit(2).to_arrow()).schema.names,
        [r["id"] for r in await t.query().nearest_to(VECTOR).limit(3).to_list()],
        (await (await t.search(VECTOR)).limit(2).to_arrow()).schema.names,
        (await t.take_offsets([3, 1]).to_arrow()).schema.names,
        await t.take_row_ids([3, 1]).select(["id", "x"]).to_arrow(),
        (await t.to_arrow()).schema.names,
        list((await t.to_pandas()).columns),
        (await t.head(2)).schema.names,
        await t.count_rows("id < 9"),
        await t.version() > 0,
    )


async def async_restore(db: Any, t: Any) -> Any:
    await t.delete("id < 50")
    await t.restore(1)
    return await t.count_rows()


ASYNC = (
    *(async_branches, async_tags, async_index, async_text, async_columns, async_batches),
    *(async_views, async_namespaces, async_create, async_writes, async_closed, async_read),
    async_restore,
)


async def opened_async(path: Path, kind: str) -> tuple[Any, Any]:
    await asyncio.to_thread(opened, path, kind)
    if kind == "lancedb":
        theirs = await lancedb.connect_async(path / kind)
        return theirs, await theirs.open_table("t")
    ours = await geneva.connect_async(path / kind, runner=InProcessRunner)
    return ours, await ours.open_table("t")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("call", ASYNC, ids=lambda call: call.__name__)
def test_a_call_of_an_event_loop(tmp_path: Path, call: Callable[[Any, Any], Any]) -> None:
    async def asked(kind: str) -> Any:
        return plain(await call(*await opened_async(tmp_path, kind)))

    assert asyncio.run(asked("geneva")) == asyncio.run(asked("lancedb"))
