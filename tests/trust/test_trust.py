"""Strangers' functions: nothing of them is loaded unless a key, a person or a policy says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import geneva
from geneva import Connection, chunker, udf, udtf
from geneva.config import Settings
from geneva.errors import (
    ColumnChangedError,
    UDFIntegrityError,
    UntrustedFunctionError,
    UserInputError,
)
from geneva.execution.runner import InProcessRunner
from geneva.execution.worker.program import close_programs
from geneva.model.computation import Permit
from geneva.options import read_backfill_options
from geneva.storage.columns import functions
from geneva.storage.columns.functions import load_udf
from geneva.trust import policy
from geneva.trust.keys import new_key
from geneva.trust.policy import StoredFunction
from support import Calls

ALICE, ALICES = new_key("alice")
MALLORY, MALLORYS = new_key("mallory")
TEAM, _ = new_key("team", shared=True)
STABLE = {"new_table_enable_stable_row_ids": "true"}
DECLARED = b"virtual_column.udf_declaration"

Open = Callable[..., Connection]


class Bomb:
    """Marks a file when it is unpickled, which is when a stranger's code begins to run."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return exec, (f"import pathlib; pathlib.Path({self.path!r}).touch()",)


@pytest.fixture
def open_db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens the database as another process would: it remembers nothing of what was declared."""

    def opened(**options: Any) -> Connection:
        monkeypatch.setattr(policy, "_declared_here", set())
        functions._load.cache_clear()
        close_programs()
        accepted = tmp_path / "config" / "accepted.jsonl"
        quiet = Settings(jvm_archive=False, progress=False, accepted_file=accepted)
        path = options.pop("path", tmp_path / "db")
        return geneva.connect(path, runner=InProcessRunner, settings=quiet, **options)

    return opened


@pytest.fixture
def calls(tmp_path: Path) -> Calls:
    return Calls(str(tmp_path / "calls"))


def bombed(calls: Calls) -> geneva.UDF:
    """A function that leaves a mark when it is loaded, and when it is called."""
    bomb = Bomb(calls.path + ".loaded")

    @udf
    def loud(text: str) -> str:
        calls.note([text])
        return text.upper() if bomb is not calls else ""

    return loud


def loaded(calls: Calls) -> bool:
    return Path(calls.path + ".loaded").exists()


def make(db: Connection, calls: Calls) -> geneva.Table:
    table = db.create_table("t", pa.table({"text": ["a", "b"]}), storage_options=STABLE)
    table.add_columns({"c": bombed(calls)})
    return table


# ------------------------------------------------------------------------------------- policies


def test_all_is_the_default(open_db: Open, calls: Calls) -> None:
    make(open_db(), calls)
    open_db().open_table("t").backfill("c")
    assert calls.rows == ["a", "b"]
    assert loaded(calls)


def test_a_strangers_function_is_refused_before_anything_is_loaded(
    open_db: Open, calls: Calls
) -> None:
    make(open_db(), calls)
    db = open_db(trust="signed", trusted_keys=ALICES)
    table = db.open_table("t")
    digest = table.computed_columns()["c"].udf_digest
    with pytest.raises(UntrustedFunctionError) as caught:
        table.backfill("c")
    for word in ("'c'", "'t'", digest, "it is not signed", "geneva trust show", "t c"):
        assert word in str(caught.value)
    with pytest.raises(UntrustedFunctionError):
        table.backfill_async("c")
    assert db.list_jobs() == [], "refused before there was a job"
    assert not loaded(calls)
    assert calls.count == 0


def test_looking_and_planning_need_no_trust(open_db: Open, calls: Calls) -> None:
    make(open_db(), calls)
    table = open_db(trust="signed").open_table("t")
    assert table.plan_backfill("c").rows_to_compute == 2
    assert table.verify("c").rows == 2
    assert "c" in repr(table)
    assert table.to_arrow().num_rows == 2
    (found,) = table.stored_functions()
    assert (found.column, found.name, found.signed_by, found.accepted) == ("c", "loud", None, False)
    assert not loaded(calls)


@pytest.mark.parametrize(
    ("signs", "trusts"),
    [(ALICE, ALICES), (ALICE, ALICE), (TEAM, TEAM), (ALICE, f"# us\n{ALICES}\n")],
    ids=["public", "own", "shared", "file"],
)
def test_what_a_trusted_key_has_signed_runs(
    open_db: Open, calls: Calls, signs: str, trusts: str
) -> None:
    make(open_db(signing_key=signs), calls)
    open_db(trust="signed", trusted_keys=trusts).open_table("t").backfill("c")
    assert calls.rows == ["a", "b"]


@pytest.mark.slow
def test_what_another_key_has_signed_does_not(open_db: Open, calls: Calls) -> None:
    make(open_db(signing_key=MALLORY), calls)
    with pytest.raises(UntrustedFunctionError, match="'mallory', which is not trusted here"):
        open_db(trust="signed", trusted_keys=ALICES).open_table("t").backfill("c")
    renamed = MALLORY.replace("mallory", "alice")
    table = open_db(signing_key=renamed).open_table("t")
    table.alter_columns({"path": "c", "udf": bombed(calls)})
    with pytest.raises(UntrustedFunctionError, match="not one of key 'alice'"):
        open_db(trust="signed", trusted_keys=ALICES).open_table("t").backfill("c")
    assert not loaded(calls)


def test_what_this_process_declares_is_no_strangers(open_db: Open, calls: Calls) -> None:
    db = open_db(trust="signed")
    make(db, calls).backfill("c")
    assert calls.rows == ["a", "b"]


def test_a_function_for_one_run_is_the_callers_own(open_db: Open, calls: Calls) -> None:
    make(open_db(), calls)
    table = open_db(trust="signed").open_table("t")

    @udf
    def mine(text: str) -> str:
        return text + "!"

    table.backfill("c", udf=mine)
    assert table.to_arrow()["c"].to_pylist() == ["a!", "b!"]
    assert not loaded(calls)
    with pytest.raises(UntrustedFunctionError):
        table.backfill("c")


def test_a_callable_decides(open_db: Open, calls: Calls) -> None:
    make(open_db(signing_key=ALICE), calls)
    asked: list[StoredFunction] = []

    def decide(function: StoredFunction) -> bool:
        asked.append(function)
        return len(asked) > 1

    db = open_db(trust=decide, trusted_keys=ALICES)
    with pytest.raises(UntrustedFunctionError, match="trust function of this connection"):
        db.open_table("t").backfill("c")
    assert not loaded(calls)
    (found,) = asked
    assert (found.table, found.column, found.name) == ("t", "c", "loud")
    assert (found.type, found.inputs, found.signed_by) == ("string", ("text",), "alice")
    assert "@" in found.declared_by
    db.open_table("t").backfill("c")
    assert calls.count
    with pytest.raises(UntrustedFunctionError):
        open_db(trust=lambda _: "yes").open_table("t").backfill("c", where="1=1")  # type: ignore[arg-type,return-value]


def test_a_policy_that_is_none_is_refused(open_db: Open) -> None:
    for wrong in ("sgined", "", 1):
        with pytest.raises(UserInputError, match="trust must be"):
            open_db(trust=wrong)


def test_settings_come_from_the_environment() -> None:
    env = {"GENEVA_TRUST": "Signed", "GENEVA_SIGNING_KEY": ALICE, "HOME": "/home/x"}
    read = Settings.from_environment(env)
    assert (read.trust, read.signing_key) == ("signed", ALICE)
    assert str(read.accepted_file) == "/home/x/.config/geneva/accepted-functions.jsonl"
    assert ALICE.split()[2] not in repr(read)
    assert Settings.from_environment({}).trust == "all"


def test_every_type_stays_signed_when_it_was_stored(open_db: Open) -> None:
    kinds = [
        pa.list_(pa.field("element", pa.int32(), nullable=False)),
        pa.list_(pa.field("x", pa.float32()), 3),
        pa.large_list(pa.struct([("a", pa.string_view())])),
        pa.dictionary(pa.int32(), pa.string(), ordered=True),
        pa.map_(pa.string(), pa.list_(pa.int8())),
        pa.struct([pa.field("a", pa.int8(), nullable=False), ("b", pa.decimal128(10, 3))]),
        pa.timestamp("ns", "UTC"),
        pa.string_view(),
        pa.large_binary(),
        pa.uuid(),
    ]
    table = open_db(signing_key=ALICE).create_table("t", pa.table({"x": [1]}))
    for number, kind in enumerate(kinds):
        function = udf(lambda x: None, data_type=kind, name=f"f{number}")
        table.add_columns({f"c{number}": (function, ["x"])})
    found = open_db(trusted_keys=ALICES).open_table("t").stored_functions()
    assert [(f.column, f.doubt) for f in found if f.signed_by != "alice"] == []
    assert len(found) == len(kinds)


# ------------------------------------------------------------------------------------ tampering


def tamper(path: str, column: str, change: Callable[[dict[bytes, bytes]], None]) -> None:
    """Change a column's metadata, as anybody can who may write into the table."""
    dataset = lance.dataset(path)
    metadata = dict(dataset.schema.field(column).metadata)
    change(metadata)
    dataset.update_field_metadata(
        {column: {k.decode(): v.decode() for k, v in metadata.items()}}, replace=True
    )


def refused(open_db: Open, column: str = "c", table: str = "t", **options: Any) -> str:
    db = open_db(trust="signed", trusted_keys=ALICES, **options)
    with pytest.raises(UntrustedFunctionError) as caught:
        db.open_table(table).backfill(column)
    return str(caught.value)


def test_a_signature_is_good_for_one_function_column_type_and_inputs(
    open_db: Open, calls: Calls, tmp_path: Path
) -> None:
    rows = {"text": ["a"], "other": ["b"], "number": [1]}
    signing = open_db(signing_key=ALICE)
    table = signing.create_table("t", pa.table(rows))

    @udf
    def good(text: str) -> str:
        return text

    table.add_columns({"c": good})
    open_db().open_table("t").add_columns({"evil": (bombed(calls), ["text"])})
    path = str(tmp_path / "db" / "t.lance")
    evil = dict(lance.dataset(path).schema.field("evil").metadata)
    fine = dict(lance.dataset(path).schema.field("c").metadata)

    # Another function under the signature.
    tamper(path, "c", lambda m: m.update({b"virtual_column.udf": evil[b"virtual_column.udf"]}))
    assert "another function" in refused(open_db)
    # The signature under another function, and in another column.
    tamper(path, "evil", lambda m: m.update({DECLARED: fine[DECLARED]}))
    assert "another function" in refused(open_db, "evil")
    tamper(path, "evil", lambda m: m.update({b"virtual_column.udf": fine[b"virtual_column.udf"]}))
    assert "another column" in refused(open_db, "evil")
    # Another input, by name or by field id.
    tamper(path, "c", lambda m: m.update(fine))
    other = lance.dataset(path).lance_schema.field("other").id()
    for names, fields in (
        ('["other"]', f'[[{other}, "string"]]'),
        ('["text"]', f'[[{other}, "string"]]'),
    ):
        changed = {
            b"virtual_column.udf_inputs": names.encode(),
            b"virtual_column.udf_input_fields": fields.encode(),
        }
        tamper(path, "c", lambda m, changed=changed: m.update(changed))  # type: ignore[misc]
        assert "for inputs ['text']" in refused(open_db)
    moved = {
        b"virtual_column.udf_inputs": b'["other"]',
        b"virtual_column.udf_input_fields": fine[b"virtual_column.udf_input_fields"],
        b"virtual_column.field": b"999",
    }
    # With another id of its own, its inputs are followed by theirs: to the one that was signed.
    tamper(path, "c", lambda m: m.update(moved))
    assert open_db().open_table("t").plan_backfill("c").inputs == ("text",)
    # Without one, they go by name.
    tamper(path, "c", lambda m: m.update({b"virtual_column.field": b"null"}))
    assert "for inputs ['text']" in refused(open_db)
    assert not loaded(calls)
    # As it was signed, it runs.
    tamper(path, "c", lambda m: m.update(fine))
    open_db(trust="signed", trusted_keys=ALICES).open_table("t").backfill("c")


@pytest.mark.parametrize(
    "stored",
    [
        "",
        "{}",
        "[]",
        "null",
        '{"claim": "{}", "key": "alice", "signature": "AAAA"}',
        '{"claim": 1, "key": "alice", "signature": "!"}',
        "[" * 100_000,
    ],
    ids=range(7),
)
def test_a_damaged_declaration_is_none(
    open_db: Open, calls: Calls, tmp_path: Path, stored: str
) -> None:
    make(open_db(signing_key=ALICE), calls)
    tamper(str(tmp_path / "db" / "t.lance"), "c", lambda m: m.update({DECLARED: stored.encode()}))
    refused(open_db)
    assert not loaded(calls)


def test_a_claim_that_was_altered_is_not_signed(
    open_db: Open, calls: Calls, tmp_path: Path
) -> None:
    make(open_db(signing_key=ALICE), calls)

    def alter(metadata: dict[bytes, bytes]) -> None:
        found = json.loads(metadata[DECLARED])
        claim = json.loads(found["claim"])
        found["claim"] = json.dumps({**claim, "by": "root@bank"}, sort_keys=True)
        metadata[DECLARED] = json.dumps(found).encode()

    tamper(str(tmp_path / "db" / "t.lance"), "c", alter)
    assert "not one of key 'alice'" in refused(open_db)
    assert not loaded(calls)


@pytest.mark.slow
def test_altered_bytes_are_refused_even_where_all_is_trusted(
    open_db: Open, calls: Calls, tmp_path: Path
) -> None:
    table = make(open_db(signing_key=ALICE), calls)
    digest = table.computed_columns()["c"].udf_digest
    folder = tmp_path / "db" / "t.lance" / "_udfs"
    table.alter_columns({"path": "c", "udf": bombed(Calls(calls.path + "2"))})
    other = table.computed_columns()["c"].udf_digest
    shutil.copy(folder / f"{digest}.lance", folder / f"{other}.lance")
    with pytest.raises(UDFIntegrityError):
        open_db(trust="signed", trusted_keys=ALICES).open_table("t").backfill("c")
    assert not loaded(calls)


def test_an_older_signed_function_put_back_is_still_signed(
    open_db: Open, calls: Calls, tmp_path: Path
) -> None:
    """What signatures do not cover, as docs/security.md says: a replay in the same column."""
    table = make(open_db(signing_key=ALICE), calls)
    path = str(tmp_path / "db" / "t.lance")
    before = dict(lance.dataset(path).schema.field("c").metadata)

    @udf
    def safe(text: str) -> str:
        return text

    table.alter_columns({"path": "c", "udf": safe})
    tamper(path, "c", lambda m: m.update(before))
    open_db(trust="signed", trusted_keys=ALICES).open_table("t").backfill("c")
    assert calls.rows == ["a", "b"]


@pytest.mark.slow
def test_an_altered_column_is_signed_anew_or_not_at_all(open_db: Open, calls: Calls) -> None:
    make(open_db(signing_key=ALICE), calls)
    open_db().open_table("t").alter_columns({"path": "c", "udf": bombed(calls)})
    assert "not signed" in refused(open_db)
    open_db(signing_key=ALICE).open_table("t").alter_columns({"path": "c", "udf": bombed(calls)})
    open_db(trust="signed", trusted_keys=ALICES).open_table("t").backfill("c")
    assert calls.count


def test_a_copied_database_and_a_renamed_input_stay_signed(
    open_db: Open, calls: Calls, tmp_path: Path
) -> None:
    table = make(open_db(signing_key=ALICE), calls)
    table.alter_columns({"path": "text", "rename": "body"})
    table.alter_columns({"path": "c", "rename": "d"})
    shutil.copytree(tmp_path / "db", tmp_path / "copy")
    db = open_db(path=tmp_path / "copy", trust="signed", trusted_keys=ALICES)
    db.open_table("t").backfill("d")
    assert calls.rows == ["a", "b"]


@pytest.mark.slow
def test_a_job_runs_the_function_that_it_was_asked_about(open_db: Open, calls: Calls) -> None:
    make(open_db(signing_key=ALICE), calls)
    table = open_db(trust="signed", trusted_keys=ALICES).open_table("t")
    job = table._job("c", None, read_backfill_options({}))
    others = Calls(calls.path + "-others")
    open_db().open_table("t").alter_columns({"path": "c", "udf": bombed(others)})
    with pytest.raises(ColumnChangedError):
        job.run()
    assert not loaded(others)
    assert "not signed" in refused(open_db)


# ---------------------------------------------------------------- views, chunkers, chains, verify


@pytest.mark.slow
def test_views_and_chunkers_are_asked_about_too(open_db: Open, calls: Calls) -> None:
    @chunker(output_schema=pa.schema([("word", pa.string())]))
    def words(text: str) -> Any:
        calls.note([text])
        for word in text.split():
            yield {"word": word}

    @udtf(output_schema=pa.schema([("n", pa.int64())]), partition_by="text")
    def counting(source: Any) -> Any:
        calls.note(source.to_arrow()["text"].to_pylist())
        yield {"n": len(source)}

    for key, name in ((None, "plain"), (ALICE, "signed")):
        db = open_db(signing_key=key)
        source = db.create_table(f"s_{name}", pa.table({"text": ["a b"]}), storage_options=STABLE)
        db.create_materialized_view(f"v_{name}", source.query().add_column({"c": bombed(calls)}))
        db.create_udtf_view(f"w_{name}", source, words)
        db.create_udtf_view(f"u_{name}", source, counting)
    db = open_db(trust="signed", trusted_keys=ALICES)
    for view in ("v_plain", "w_plain", "u_plain"):
        opened: Any = db.open_table(view)
        assert not opened.plan_refresh().is_empty
        with pytest.raises(UntrustedFunctionError, match=f"{view}"):
            opened.refresh()
    assert not loaded(calls)
    assert calls.count == 0
    assert [f.column for f in db.open_table("w_plain").stored_functions()] == ["words"]
    assert [f.column for f in db.open_table("u_plain").stored_functions()] == ["counting"]
    for view in ("v_signed", "w_signed", "u_signed"):
        fine: Any = db.open_table(view)
        fine.refresh()
    assert calls.rows == ["a b", "a b", "a b"]
    for view, function in (("w_plain", "words"), ("u_plain", "counting")):
        unsigned: Any = open_db(signing_key=ALICE).open_table(view)
        assert unsigned.sign_functions() == [function]
        again: Any = open_db(trust="signed", trusted_keys=ALICES).open_table(view)
        again.refresh()


def test_a_chain_is_refused_as_a_whole(open_db: Open, calls: Calls) -> None:
    make(open_db(), calls)
    table = open_db(signing_key=ALICE).open_table("t")

    @udf
    def after(c: str) -> str:
        calls.note([c])
        return c

    table.add_columns({"d": after})
    assert "'c'" in refused(open_db, "d")
    assert calls.count == 0
    assert not loaded(calls)


def test_verifying_with_a_run_is_running(open_db: Open, calls: Calls) -> None:
    make(open_db(), calls).backfill("c")
    Path(calls.path + ".loaded").unlink(missing_ok=True)
    table = open_db(trust="signed").open_table("t")
    for run in (lambda: table.verify("c", run=True), lambda: table.preview("c")):
        with pytest.raises(UntrustedFunctionError):
            run()
    assert not loaded(calls)
    assert table.verify("c").ok


def test_a_worker_loads_nothing_without_its_drivers_permit(open_db: Open, calls: Calls) -> None:
    table = make(open_db(), calls)
    digest = table.computed_columns()["c"].udf_digest
    for permit in (None, Permit("0" * 64)):
        with pytest.raises(UntrustedFunctionError, match="permit"):
            load_udf(table.ref, digest, permit)
    assert not loaded(calls)
    load_udf(table.ref, digest, Permit(digest))
    assert loaded(calls)


def test_nothing_to_do_needs_no_trust(open_db: Open, calls: Calls) -> None:
    make(open_db(), calls).backfill("c")
    result = open_db(trust="signed").open_table("t").backfill("c")
    assert result.rows_computed == 0


# ------------------------------------------------------------------------------------ accepting


def test_an_accepted_function_runs_here_in_its_column_alone(
    open_db: Open, calls: Calls, tmp_path: Path
) -> None:
    make(open_db(), calls)
    db = open_db(trust="signed")
    (found,) = db.open_table("t").stored_functions()
    db._trust.accept(found)
    accepted = tmp_path / "config" / "accepted.jsonl"
    assert accepted.stat().st_mode & 0o077 == 0
    db = open_db(trust="signed")
    db.open_table("t").backfill("c")
    assert calls.count == 2
    path = str(tmp_path / "db" / "t.lance")
    own = dict(lance.dataset(path).schema.field("c").metadata)
    moved = {**own, b"virtual_column.uuid": b"0" * 32}
    tamper(path, "c", lambda m: m.update(moved))
    with pytest.raises(UntrustedFunctionError):
        open_db(trust="signed").open_table("t").backfill("c", where="1=1")
    tamper(path, "c", lambda m: m.update(own))
    assert db._trust.forget(found)
    assert not db._trust.forget(found)
    with pytest.raises(UntrustedFunctionError):
        open_db(trust="signed").open_table("t").backfill("c", where="1=1")


def test_a_list_that_was_cut_short_accepts_what_is_whole(
    open_db: Open, calls: Calls, tmp_path: Path
) -> None:
    make(open_db(), calls)
    db = open_db(trust="signed")
    (found,) = db.open_table("t").stored_functions()
    db._trust.accept(found)
    file = tmp_path / "config" / "accepted.jsonl"
    whole = file.read_text()
    file.write_text(whole + whole[: len(whole) // 2] + "\n[]\n{}\n")
    assert db._trust.accepted() == {found.claim_id}


def test_functions_of_before_there_were_declarations(
    open_db: Open, calls: Calls, tmp_path: Path
) -> None:
    make(open_db(), calls)
    path = str(tmp_path / "db" / "t.lance")
    tamper(path, "c", lambda m: m.pop(DECLARED))
    assert "not signed" in refused(open_db)
    open_db().open_table("t").backfill("c")
    assert calls.count == 2
    with pytest.raises(UserInputError, match="keygen"):
        open_db().open_table("t").sign_functions()
    assert open_db(signing_key=ALICE).open_table("t").sign_functions(["c"]) == ["c"]
    open_db(trust="signed", trusted_keys=ALICES).open_table("t").backfill("c", where="1=1")
    assert calls.count == 4
