"""New rows: published once, or refused."""

from __future__ import annotations

import json
import shutil
from datetime import timedelta
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from geneva.errors import TableChangedError
from geneva.model.tables import TableRef
from geneva.storage.columns import row_commits
from geneva.storage.columns.row_commits import (
    Batch,
    Change,
    RowsToCommit,
    appended,
    commit_rows,
    create_table,
)
from geneva.storage.columns.row_files import discard_rows, stage_rows
from geneva.storage.lance.dataset import field_ids_of, first_file, open_dataset

SCHEMA = pa.schema([("id", pa.int64())])


@pytest.fixture
def ref(tmp_path: Path) -> TableRef:
    return TableRef("t", str(tmp_path / "t.lance"))


def staged(ref: TableRef, *ids: int, create: bool = False) -> str:
    batch = pa.record_batch({"id": pa.array(ids, pa.int64())})
    return stage_rows(ref, SCHEMA, iter([batch]), 1_000, create=create)


def planned(ref: TableRef, change: Change = Change.APPEND, write_id: str = "w") -> RowsToCommit:
    table = open_dataset(ref)
    ids = field_ids_of(table)
    first = first_file(table)
    return RowsToCommit(change, SCHEMA, write_id, table.version, {"id": ids["id"]}, first)


def ids_in(ref: TableRef) -> list[int]:
    return sorted(open_dataset(ref).to_table(columns=["id"]).column("id").to_pylist())


def test_a_new_table_has_stable_row_ids(ref: TableRef) -> None:
    text = staged(ref, 1, 2, create=True)
    assert commit_rows(ref, RowsToCommit(Change.REPLACE_TABLE, SCHEMA, "w", 0, {}), [text])
    assert ids_in(ref) == [1, 2]
    assert open_dataset(ref).has_stable_row_ids


@pytest.mark.parametrize("versions", [1, 3])
@pytest.mark.parametrize("change", [Change.APPEND, Change.REPLACE_ROWS, Change.REPLACE_TABLE])
def test_a_table_that_was_made_anew_is_left_alone(
    ref: TableRef, change: Change, versions: int
) -> None:
    """The files that were staged went with the one before."""
    for number in range(2):
        lance.write_dataset(pa.table({"id": [number]}), ref.uri, mode="append")
    rows, text = planned(ref, change), staged(ref, 8, 9)
    shutil.rmtree(ref.uri)
    for number in range(versions):
        lance.write_dataset(pa.table({"id": [number + 5]}), ref.uri, mode="append")
    with pytest.raises(TableChangedError, match="made anew"):
        commit_rows(ref, rows, [text])
    assert ids_in(ref) == [5 + number for number in range(versions)]


def test_a_table_that_somebody_else_created_is_left_alone(ref: TableRef) -> None:
    text = staged(ref, 1, 2, create=True)
    lance.write_dataset(pa.table({"id": [7]}), ref.uri)
    with pytest.raises(TableChangedError, match="created by somebody else"):
        commit_rows(ref, RowsToCommit(Change.REPLACE_TABLE, SCHEMA, "w", 0, {}), [text])
    assert ids_in(ref) == [7]


def test_rows_are_appended_beside_those_of_others(ref: TableRef) -> None:
    create_table(ref, SCHEMA)
    rows, text = planned(ref), staged(ref, 1)
    lance.write_dataset(pa.table({"id": [2]}), ref.uri, mode="append")
    open_dataset(ref).delete("id = 9")
    commit_rows(ref, rows, [text])
    assert ids_in(ref) == [1, 2]


def test_a_commit_that_landed_in_doubt_is_not_repeated(
    ref: TableRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_table(ref, SCHEMA)
    rows, text = planned(ref), staged(ref, 1)
    plain = lance.LanceDataset.commit
    answers = iter([OSError("connection reset"), None])

    def lost_answer(*args: object, **kwargs: object) -> object:
        done = plain(*args, **kwargs)
        problem = next(answers)
        if problem is not None:
            raise problem
        return done

    with monkeypatch.context() as patched:
        patched.setattr(lance.LanceDataset, "commit", staticmethod(lost_answer))
        commit_rows(ref, rows, [text])
    assert ids_in(ref) == [1]


def test_a_commit_that_failed_for_certain_fails(
    ref: TableRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_table(ref, SCHEMA)
    rows, text = planned(ref), staged(ref, 1)

    def fail(*_: object, **__: object) -> None:
        raise OSError("no such host")

    with monkeypatch.context() as patched:
        patched.setattr(lance.LanceDataset, "commit", staticmethod(fail))
        with pytest.raises(OSError, match="no such host"):
            commit_rows(ref, rows, [text])
    assert ids_in(ref) == []


def test_columns_that_changed_meanwhile_are_refused(ref: TableRef) -> None:
    create_table(ref, pa.schema([("id", pa.int64()), ("x", pa.int64())]))
    rows, text = planned(ref), staged(ref, 1)
    open_dataset(ref).alter_columns({"path": "id", "data_type": pa.int32()})
    with pytest.raises(TableChangedError, match="Column 'id' of table 't'"):
        commit_rows(ref, rows, [text])


def test_rows_are_replaced_and_the_table_stays(ref: TableRef) -> None:
    create_table(ref, SCHEMA)
    commit_rows(ref, planned(ref), [staged(ref, 1, 2)])
    open_dataset(ref).add_columns(pa.field("c", pa.string(), metadata={"kept": "yes"}))
    before = field_ids_of(open_dataset(ref))
    commit_rows(ref, planned(ref, Change.REPLACE_ROWS), [staged(ref, 3), staged(ref, 4)])
    table = open_dataset(ref)
    assert ids_in(ref) == [3, 4]
    assert field_ids_of(table) == before
    assert table.schema.field("c").metadata == {b"kept": b"yes"}
    commit_rows(ref, planned(ref, Change.REPLACE_ROWS), [])
    assert ids_in(ref) == []
    table.validate()


def test_what_is_thrown_away_is_gone(ref: TableRef) -> None:
    create_table(ref, SCHEMA)
    texts = [staged(ref, 1), staged(ref, 2)]
    folder = Path(ref.uri, "data")
    assert len(list(folder.iterdir())) == 2
    discard_rows(ref, texts)
    assert list(folder.iterdir()) == []
    discard_rows(ref, texts)


# ------------------------------------------------------------------------------------ batches


def write_batch(ref: TableRef, number: int, *ids: int) -> bool:
    rows = planned(ref, write_id=f"w{number}")
    return commit_rows(ref, rows, [staged(ref, *ids)], Batch("app", number))


def test_a_replayed_batch_lands_once(ref: TableRef) -> None:
    create_table(ref, SCHEMA)
    assert write_batch(ref, 0, 1)
    assert not write_batch(ref, 0, 1)
    assert write_batch(ref, 1, 2)
    assert not write_batch(ref, 0, 1)
    assert commit_rows(ref, planned(ref), [staged(ref, 1)], Batch("other", 0))
    assert ids_in(ref) == [1, 1, 2]


def test_a_replayed_batch_lands_once_after_a_clean_up(ref: TableRef) -> None:
    create_table(ref, SCHEMA)
    write_batch(ref, 0, 1)
    lance.write_dataset(pa.table({"id": [50]}), ref.uri, mode="append")
    open_dataset(ref).cleanup_old_versions(timedelta(0), delete_unverified=True)
    assert not write_batch(ref, 0, 1)
    assert ids_in(ref) == [1, 50]


@pytest.mark.parametrize("landed", [False, True])
def test_a_driver_that_died_in_the_middle_of_a_batch(
    ref: TableRef, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    """Before the commit of the rows, or after it and before it was noted."""
    create_table(ref, SCHEMA)
    plain, died = row_commits._note, RuntimeError("killed")

    def note(ref: TableRef, batch: Batch, *, landed: bool) -> None:
        if landed:
            raise died
        plain(ref, batch, landed=False)

    def commit(*_: object) -> None:
        raise died

    with monkeypatch.context() as patched:
        patched.setattr(row_commits, *(("_note", note) if landed else ("_commit_once", commit)))
        with pytest.raises(RuntimeError, match="killed"):
            write_batch(ref, 0, 1)
    lance.write_dataset(pa.table({"id": [50]}), ref.uri, mode="append")
    assert write_batch(ref, 0, 1) is not landed
    assert ids_in(ref) == [1, 50]


def test_nobody_guesses_whether_a_batch_landed(
    ref: TableRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_table(ref, SCHEMA)
    row_commits._note(ref, Batch("app", 0), landed=False)
    lance.write_dataset(pa.table({"id": [50]}), ref.uri, mode="append")
    lance.write_dataset(pa.table({"id": [51]}), ref.uri, mode="append")
    open_dataset(ref).cleanup_old_versions(timedelta(0), delete_unverified=True)
    with pytest.raises(TableChangedError, match="can't be known whether it landed"):
        write_batch(ref, 0, 1)
    assert ids_in(ref) == [50, 51]


def test_rows_for_a_new_table_fit_the_one_that_was_created_first(ref: TableRef) -> None:
    text = staged(ref, 1, create=True)
    rows = RowsToCommit(Change.REPLACE_TABLE, SCHEMA, "w", 0, {})
    table = create_table(ref, SCHEMA)
    assert create_table(ref, SCHEMA).version == table.version
    commit_rows(ref, appended(ref, rows, table, [text]), [text], Batch("app", 0))
    assert ids_in(ref) == [1]
    other = TableRef("u", ref.uri.replace("t.lance", "u.lance"))
    made = create_table(other, pa.schema([("x", pa.string()), ("id", pa.int64())]))
    with pytest.raises(TableChangedError, match="with other columns"):
        appended(other, rows, made, [text])
    assert json.loads(text)
