"""Data files that somebody deletes: a clean-up of what is not committed yet, or a person."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import lance
import pyarrow as pa
import pytest

import geneva
from geneva import Columns, Connection, Table, chunker, udf, udtf
from geneva.config import Settings
from geneva.errors import TableChangedError, UnreadableFragmentsError
from geneva.execution.backfill import validity_checks
from geneva.execution.backfill.committer import publish_columns
from geneva.execution.backfill.prepare import PreparedBackfill
from geneva.execution.runner import InProcessRunner
from geneva.model.tables import Reason
from geneva.storage.columns.lost_files import missing_files
from geneva.storage.columns.publish import CommitOutcome
from geneva.storage.columns.staged_files import StagedFile, drop_staged
from geneva.view import MaterializedView
from s3_server import Bucket, bucket, s3_endpoint
from support import Calls, by_id, counted, make_table, publishing

__all__ = ["bucket", "s3_endpoint"]

ROWS = 40
Happens = Callable[[PreparedBackfill, Sequence[str]], None]


def double(id: int) -> int:
    return id * 2


def clean_up(prepared: PreparedBackfill, paths: Sequence[str]) -> None:
    """What Lance's own clean-up does to files that are in no version."""
    options = prepared.ref.storage_options.plain()
    dataset = lance.dataset(prepared.ref.uri, storage_options=options)
    dataset.cleanup_old_versions(
        timedelta(0), delete_unverified=True, error_if_tagged_old_versions=False
    )


def delete_first(prepared: PreparedBackfill, paths: Sequence[str]) -> None:
    assert drop_staged(prepared.ref, paths[0]) == [paths[0]]


def once(
    *, before: Happens | None = None, after: Happens | None = None
) -> Callable[..., CommitOutcome]:
    """Publish, with something that happens before or after the first commit."""
    todo = [True]

    def publish(
        prepared: PreparedBackfill, files: Sequence[StagedFile], job_id: str, retries: int
    ) -> CommitOutcome:
        first, todo[:] = bool(todo), []
        if first and before is not None:
            before(prepared, [file.path for file in files])
        outcome = publish_columns(prepared, files, job_id, retries)
        if first and after is not None:
            after(prepared, [file.path for file in outcome.landed])
        return outcome

    return publish


@pytest.fixture
def remote_db(bucket: Bucket) -> Connection:
    options = bucket.storage_options
    quiet = Settings(local_slots=2, jvm_archive=False, progress=False)
    return geneva.connect(
        bucket.uri, runner=InProcessRunner, settings=quiet, storage_options=options
    )


def filled(db: Connection, calls: Calls) -> Table:
    fragments = [pa.table({"id": range(i, i + 10)}) for i in range(0, ROWS, 10)]
    options = db._storage_options.plain()
    for place, data in enumerate(fragments):
        lance.write_dataset(
            data,
            f"{db.uri}/t.lance",
            mode="append" if place else "create",
            enable_stable_row_ids=True,
            storage_options=options,
        )
    table = db.open_table("t")
    table.add_columns({"y": counted(calls, double, data_type=pa.int64(), version="1")})
    return table


HAPPENINGS = [
    pytest.param({"before": clean_up}, ROWS, id="before-all"),
    pytest.param({"before": delete_first}, 10, id="before-one"),
    pytest.param({"after": delete_first}, 10, id="after-one"),
]


def check(db: Connection, calls: Calls, happening: dict[str, Happens], again: int) -> None:
    table = filled(db, calls)
    with publishing(db, once(**happening)):
        result = table.backfill("y", commit_granularity=100)
    assert result.progress.committed == ROWS
    rows = table.to_arrow().to_pylist()
    assert {row["id"]: row["y"] for row in rows} == {i: i * 2 for i in range(ROWS)}
    assert len(calls.taken()) <= ROWS + again
    assert table.plan_backfill("y").is_empty


@pytest.mark.parametrize(("happening", "again"), HAPPENINGS)
def test_a_table_never_has_files_that_are_gone(
    local_db: Connection, calls: Calls, happening: dict[str, Happens], again: int
) -> None:
    check(local_db, calls, happening, again)


@pytest.mark.slow
@pytest.mark.parametrize(("happening", "again"), HAPPENINGS)
def test_nor_in_a_store(
    remote_db: Connection, calls: Calls, happening: dict[str, Happens], again: int
) -> None:
    check(remote_db, calls, happening, again)


@pytest.mark.parametrize("happening", [{"before": clean_up}, {"after": delete_first}])
def test_nor_with_a_clause(
    local_db: Connection, calls: Calls, happening: dict[str, Happens]
) -> None:
    table = filled(local_db, calls)
    with publishing(local_db, once(**happening)):
        table.backfill("y", where="id % 10 < 5", commit_granularity=100)
    asked = {i: i * 2 if i % 10 < 5 else None for i in range(ROWS)}
    assert by_id(table, "y") == asked
    calls.clear()
    table.backfill("y")
    assert by_id(table, "y") == {i: i * 2 for i in range(ROWS)}
    assert calls.rows == [i for i in range(ROWS) if i % 10 >= 5]


def compact_and_clean_up(prepared: PreparedBackfill, paths: Sequence[str]) -> None:
    dataset = lance.dataset(prepared.ref.uri)
    dataset.optimize.compact_files()
    dataset.cleanup_old_versions(timedelta(0), error_if_tagged_old_versions=False)


def delete_rows_and_clean_up(prepared: PreparedBackfill, paths: Sequence[str]) -> None:
    dataset = lance.dataset(prepared.ref.uri)
    dataset.delete("id < 10")
    dataset.cleanup_old_versions(timedelta(0), error_if_tagged_old_versions=False)


@pytest.mark.parametrize("happens", [compact_and_clean_up, delete_rows_and_clean_up])
@pytest.mark.parametrize("where", [None, "id % 10 < 5"])
def test_files_that_were_replaced_are_not_missed(
    local_db: Connection,
    calls: Calls,
    caplog: pytest.LogCaptureFixture,
    happens: Happens,
    where: str | None,
) -> None:
    table = filled(local_db, calls)
    with publishing(local_db, once(after=happens)):
        table.backfill("y", where=where, commit_granularity=100)
    assert len(calls.taken()) == (ROWS if where is None else ROWS // 2)
    assert "were deleted" not in caplog.text
    values = by_id(table, "y")
    assert {i: y for i, y in values.items() if y is not None}.items() <= {
        i: i * 2 for i in range(ROWS)
    }.items()


@pytest.mark.parametrize(("happening", "again"), HAPPENINGS)
@pytest.mark.parametrize("bound", ["num_frags", "read_version"])
def test_a_bounded_job_says_what_was_deleted(
    local_db: Connection, calls: Calls, bound: str, happening: dict[str, Happens], again: int
) -> None:
    table = filled(local_db, calls)
    options: dict[str, Any] = {bound: 4 if bound == "num_frags" else table.version}
    with (
        publishing(local_db, once(**happening)),
        pytest.raises(TableChangedError, match="were deleted meanwhile"),
    ):
        table.backfill("y", commit_granularity=100, **options)
    calls.clear()
    table.backfill("y")
    assert len(calls.taken()) == again
    assert by_id(table, "y") == {i: i * 2 for i in range(ROWS)}


def corrected(db: Connection, calls: Calls) -> Table:
    """A table of which a person has corrected three values since they were computed."""
    table = filled(db, calls)
    table.backfill("y")
    lance.dataset(table.ref.uri).update({"y": "1000"}, where="id < 3")
    calls.clear()
    return db.open_table("t")


def check_corrected(table: Table, changed: dict[int, int] | None = None) -> None:
    """The values are right, nothing is left to do, and every file of the table can be read."""
    assert by_id(table, "y") == CORRECTED | (changed or {})
    assert table.plan_backfill("y").is_empty
    assert lance.dataset(table.ref.uri).to_table().num_rows == ROWS


CORRECTED = {i: 1000 if i < 3 else i * 2 for i in range(ROWS)}


def lose_receipts(table: Table) -> None:
    """Delete the file that has the receipts of the corrected values, and nothing else."""
    fragment = lance.dataset(table.ref.uri).get_fragments()[-1]
    (receipts,) = (f for f in fragment.data_files() if f.path.startswith("geneva-"))
    assert len(receipts.fields) == 1
    Path(table.ref.uri, "data", receipts.path).unlink()


@pytest.mark.parametrize("happening", [{"before": clean_up}, {"after": delete_first}])
def test_receipts_that_are_gone_are_written_again(
    local_db: Connection, calls: Calls, happening: dict[str, Happens]
) -> None:
    table = corrected(local_db, calls)
    with publishing(local_db, once(**happening)):
        table.backfill("y")
    check_corrected(table)
    assert calls.taken() == []


def test_a_later_plan_notices_that_receipts_are_gone(local_db: Connection, calls: Calls) -> None:
    table = corrected(local_db, calls)
    table.backfill("y")
    lose_receipts(table)
    plan = table.plan_backfill("y")
    assert (plan.rows_to_compute, plan.rows_to_adopt) == (0, 3)
    table.backfill("y")
    check_corrected(table)
    assert calls.taken() == []


def test_so_do_workers_that_read_receipts(
    local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validity_checks, "MUCH_BYTES", 1)
    table = corrected(local_db, calls)
    table.backfill("y")
    lose_receipts(table)
    table.backfill("y")
    check_corrected(table)
    assert calls.taken() == []


def test_a_clause_keeps_values_whose_receipts_are_gone(local_db: Connection, calls: Calls) -> None:
    table = corrected(local_db, calls)
    table.backfill("y")
    lose_receipts(table)
    table.backfill("y", where="id = 1")
    assert by_id(table, "y") == CORRECTED | {1: 2}
    table.backfill("y")
    check_corrected(table, {1: 2})
    assert calls.taken() == [1]


class Both(NamedTuple):
    w: int
    h: int


def test_of_several_outputs_one_is_computed_and_another_is_kept(
    local_db: Connection, calls: Calls
) -> None:
    """In one fragment the values of `w` are gone, and of `h` just the receipts."""

    def both(id: int) -> Columns[Both]:
        calls.note([id])
        return Both(2 * id, 3 * id)

    table = make_table(local_db, [10], stable_row_ids=True)
    table.add_columns(udf(both))
    table.backfill("w")
    dataset = lance.dataset(table.ref.uri)
    (fragment,) = dataset.get_fragments()
    corrections = pa.table({"id": range(3), "h": [1000] * 3})
    updated, fields = fragment.update_columns(corrections, left_on="id")
    operation = lance.LanceOperation.Update(updated_fragments=[updated], fields_modified=fields)
    lance.LanceDataset.commit(dataset, operation, read_version=dataset.version)
    table = local_db.open_table("t")
    table.backfill("h")
    calls.clear()
    (fragment,) = lance.dataset(table.ref.uri).get_fragments()
    for file in fragment.data_files():
        if file.path.startswith("geneva-"):
            Path(table.ref.uri, "data", file.path).unlink()
    table.backfill("w")
    assert calls.taken() == list(range(10))
    assert by_id(table, "w") == {i: 2 * i for i in range(10)}
    assert by_id(table, "h") == {i: 1000 if i < 3 else 3 * i for i in range(10)}
    assert table.plan_backfill("w").is_empty
    assert lance.dataset(table.ref.uri).to_table().num_rows == 10


def test_files_that_a_refresh_does_not_write_keep_no_view_from_being_up_to_date(
    local_db: Connection, calls: Calls
) -> None:
    source = make_table(local_db, [10, 10], "s", stable_row_ids=True)
    view = local_db.create_materialized_view("v", source.query().select(["id"]))
    view.refresh()
    view.load_columns(pa.table({"id": range(20), "z": range(20)}), "id", ["z"])
    view.refresh()
    version = view.version
    _data_file(view, 0).unlink()
    assert view.plan_refresh().is_empty
    view.refresh()
    assert view.version == version


@pytest.mark.parametrize("happening", [{"before": clean_up}, {"after": delete_first}])
def test_nor_does_a_view(local_db: Connection, calls: Calls, happening: dict[str, Happens]) -> None:
    source = make_table(local_db, [10, 10], "s", stable_row_ids=True)
    y = counted(calls, double, data_type=pa.int64(), version="1")
    view = local_db.create_materialized_view("v", source.query().select({"id": "id", "y": y}))
    with publishing(local_db, once(**happening)):
        view.refresh()
    assert by_id(view, "y") == {i: i * 2 for i in range(20)}


def _data_file(table: Table, fragment: int) -> Path:
    """The file of the values that were computed last."""
    found = lance.dataset(table.ref.uri).get_fragment(fragment)
    return Path(table.ref.uri, "data", found.data_files()[-1].path)


def test_values_that_are_gone_are_computed_again(local_db: Connection, calls: Calls) -> None:
    table = filled(local_db, calls)
    table.backfill("y")
    calls.clear()
    _data_file(table, 1).unlink()
    plan = table.plan_backfill("y")
    assert [(f.fragment_id, f.reason) for f in plan.fragments] == [(1, Reason.LOST)]
    table.backfill("y")
    assert calls.taken() == list(range(10, 20))
    assert by_id(table, "y") == {i: i * 2 for i in range(ROWS)}
    assert table.plan_backfill("y").is_empty


def test_a_clause_leaves_the_rest_of_them_to_be_computed(
    local_db: Connection, calls: Calls
) -> None:
    table = filled(local_db, calls)
    table.backfill("y")
    calls.clear()
    _data_file(table, 1).unlink()
    table.backfill("y", where="id in (3, 13)")
    assert calls.taken() == [3, 13]
    assert by_id(table, "y") == {i: i * 2 if i // 10 != 1 or i == 13 else None for i in range(ROWS)}
    table.backfill("y")
    assert calls.taken() == [i for i in range(10, 20) if i != 13]
    assert by_id(table, "y") == {i: i * 2 for i in range(ROWS)}


def test_values_of_a_view_that_are_gone_come_again(local_db: Connection, calls: Calls) -> None:
    source = make_table(local_db, [10, 10], "s", stable_row_ids=True)
    y = counted(calls, double, data_type=pa.int64(), version="1")
    view = local_db.create_materialized_view("v", source.query().select({"id": "id", "y": y}))
    view.refresh()
    for file in lance.dataset(view.ref.uri).get_fragment(0).data_files()[1:]:
        Path(view.ref.uri, "data", file.path).unlink()
    view.refresh()
    assert by_id(view, "y") == {i: i * 2 for i in range(20)}


def test_a_view_whose_rows_are_gone_says_so(local_db: Connection) -> None:
    source = make_table(local_db, [10, 10], "s", stable_row_ids=True)
    view = local_db.create_materialized_view("v", source.query().select(["id"]))
    view.refresh()
    rows = lance.dataset(view.ref.uri).get_fragment(0).data_files()[0].path
    assert not rows.startswith("geneva-")
    Path(view.ref.uri, "data", rows).unlink()
    with pytest.raises(UnreadableFragmentsError, match="create it again") as caught:
        view.refresh()
    assert rows in str(caught.value)


def test_so_does_one_that_only_a_function_fills(local_db: Connection, calls: Calls) -> None:
    """What says which of its rows are filled is in a file of its own."""
    source = make_table(local_db, [10], "s", stable_row_ids=True)
    y = counted(calls, double, data_type=pa.int64(), version="1", input_columns=["id"])
    view = local_db.create_materialized_view("v", source.query().select({"y": y}))
    view.refresh()
    values = sorted(view.to_arrow()["y"].to_pylist())
    files = lance.dataset(view.ref.uri).get_fragment(0).data_files()
    (flags,) = (f.path for f in files if f.path.startswith("geneva-") and len(f.fields) == 1)
    Path(view.ref.uri, "data", flags).unlink()
    calls.clear()
    view.refresh()
    assert sorted(view.to_arrow()["y"].to_pylist()) == values
    assert lance.dataset(view.ref.uri).to_table().num_rows == 10
    assert calls.taken() == []


@chunker(output_schema=pa.schema([("word", pa.string()), ("place", pa.int64())]))
def words(text: str) -> Iterator[tuple[str, int]]:
    for place, word in enumerate(text.split()):
        yield word, place


def chunked(db: Connection) -> MaterializedView:
    """A chunked view of which a row was changed since it was made."""
    texts = pa.table({"id": range(6), "text": [f"a{i} b{i}" for i in range(6)]})
    lance.write_dataset(texts, f"{db.uri}/s.lance", enable_stable_row_ids=True)
    view = db.create_udtf_view("v", db.open_table("s").query().select(["id"]), words)
    view.refresh()
    change_text(db, 1, "x y z")
    view.refresh()
    return view


def change_text(db: Connection, row: int, text: str) -> None:
    lance.dataset(f"{db.uri}/s.lance").update({"text": f"'{text}'"}, where=f"id = {row}")


def words_of(view: Table) -> list[tuple[int, int, str]]:
    return sorted((row["id"], row["place"], row["word"]) for row in view.to_arrow().to_pylist())


@pytest.mark.parametrize("changes", [False, True])
def test_a_chunked_view_whose_rows_are_gone_says_so(local_db: Connection, *, changes: bool) -> None:
    view = chunked(local_db)
    rows = lance.dataset(view.ref.uri).get_fragment(0).data_files()[0].path
    Path(view.ref.uri, "data", rows).unlink()
    if changes:
        change_text(local_db, 2, "q r s")
    for call in (view.plan_refresh, view.refresh):
        with pytest.raises(UnreadableFragmentsError, match=r"Rows of view 'v' .* create it again"):
            call()


def test_so_does_a_view_of_a_table_function(local_db: Connection) -> None:
    @udtf(output_schema=pa.schema([("n", pa.int64())]), partition_by="id")
    def counting(source: Any) -> Iterator[dict[str, int]]:
        yield {"n": source.count_rows()}

    source = make_table(local_db, [3, 3], "s", stable_row_ids=True)
    view = local_db.create_udtf_view("v", source.query(), counting)
    view.refresh()
    rows = lance.dataset(view.ref.uri).get_fragments()[0].data_files()[0].path
    Path(view.ref.uri, "data", rows).unlink()
    with pytest.raises(UnreadableFragmentsError, match=r"Rows of view 'v' .* create it again"):
        view.refresh()


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("which", [0, 1])
def test_lists_of_a_chunked_view_that_are_gone_come_again(
    local_db: Connection, which: int, *, changes: bool
) -> None:
    view = chunked(local_db)
    before = words_of(view)
    lists = Path(view.ref.uri, "_chunks")
    for fragment in lance.dataset(str(lists)).get_fragments():
        files = [f.path for f in fragment.data_files() if f.path.startswith("geneva-")]
        (lists / "data" / files[which]).unlink()
    if changes:
        change_text(local_db, 2, "q r")
        before = [w for w in before if w[0] != 2] + [(2, 0, "q"), (2, 1, "r")]
    view.refresh()
    assert words_of(view) == sorted(before)
    assert view.plan_refresh().is_empty
    assert lance.dataset(str(lists)).to_table().num_rows == 6


def each_time(happens: Happens, times: int) -> Callable[..., CommitOutcome]:
    """Publish; something happens behind so many commits."""
    left = [times]

    def publish(
        prepared: PreparedBackfill, files: Sequence[StagedFile], job_id: str, retries: int
    ) -> CommitOutcome:
        outcome = publish_columns(prepared, files, job_id, retries)
        if left[0]:
            left[0] -= 1
            happens(prepared, [file.path for file in outcome.landed])
        return outcome

    return publish


def test_files_of_earlier_rounds_are_looked_for_too(local_db: Connection, calls: Calls) -> None:
    table = filled(local_db, calls)
    deleted: list[str] = []

    def delete_one_of_all(prepared: PreparedBackfill, paths: Sequence[str]) -> None:
        """Behind the first commit a file of it, behind the second another file of the first."""
        deleted.append(sorted(paths)[0])
        if len(deleted) == 1:
            first.extend(sorted(paths)[1:])
            drop_staged(prepared.ref, deleted[0])
        else:
            drop_staged(prepared.ref, first[0])

    first: list[str] = []
    with publishing(local_db, each_time(delete_one_of_all, 2)):
        result = table.backfill("y", commit_granularity=100)
    assert result.progress.committed == ROWS
    assert by_id(table, "y") == {i: i * 2 for i in range(ROWS)}
    assert len(calls.taken()) <= ROWS + 20


def test_a_job_whose_files_are_deleted_for_ever_fails(local_db: Connection, calls: Calls) -> None:
    table = filled(local_db, calls)
    with (
        publishing(local_db, each_time(delete_first, 1_000)),
        pytest.raises(TableChangedError, match=r"kept changing.*data files were deleted"),
    ):
        table.backfill("y", commit_granularity=100)
    assert len(calls.taken()) <= ROWS + 10 * 12
    calls.clear()
    table.backfill("y")
    assert by_id(table, "y") == {i: i * 2 for i in range(ROWS)}


@pytest.mark.parametrize("happens_before", [False, True])
def test_so_does_one_whose_receipts_are_deleted_for_ever(
    local_db: Connection, calls: Calls, *, happens_before: bool
) -> None:
    table = corrected(local_db, calls)

    def publish(
        prepared: PreparedBackfill, files: Sequence[StagedFile], job_id: str, retries: int
    ) -> CommitOutcome:
        if happens_before:
            delete_first(prepared, [file.path for file in files])
        outcome = publish_columns(prepared, files, job_id, retries)
        if not happens_before:
            delete_first(prepared, [file.path for file in outcome.landed])
        return outcome

    with (
        publishing(local_db, publish),
        pytest.raises(TableChangedError, match=r"kept changing.*data files were deleted"),
    ):
        table.backfill("y")
    table.backfill("y")
    check_corrected(table)
    assert calls.taken() == []


def test_what_somebody_loaded_is_not_taken_for_values_of_ours(local_db: Connection) -> None:
    table = make_table(local_db, [10, 10])
    rows: dict[str, Any] = {"id": list(range(20)), "z": list(range(20))}
    table.load_columns(pa.table(rows), "id", ["z"])
    _data_file(table, 0).unlink()
    with pytest.raises(Exception, match=r"(?i)not found|can't be read"):
        table.load_columns(pa.table({"id": [1], "z": [100]}), "id", ["z"])


@pytest.mark.slow
def test_few_of_many_files_are_asked_for_one_by_one(remote_db: Connection) -> None:
    ref = remote_db.create_table("t", pa.table({"id": [1]})).ref
    dataset = lance.dataset(ref.uri, storage_options=ref.storage_options.plain())
    there = dataset.get_fragments()[0].data_files()[0].path

    class Large:
        def get_fragments(self) -> list[Any]:
            return dataset.get_fragments() * 5_000

    for found in (dataset, Large()):
        assert missing_files(ref, [there, "gone.lance"], found) == {"gone.lance"}
