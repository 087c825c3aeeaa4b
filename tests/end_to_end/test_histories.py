"""Random histories of a table, against a model that knows which cells are stale.

Append, delete, update, upsert, compact, alter, drop, rename, restore, backfill, crash, any order:
after every step the table equals the model, and a backfill runs the UDF on the stale cells only.
`GENEVA_HYPOTHESIS_PROFILE=long pytest -m slow -k test_histories` looks further.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import lance
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import geneva
from geneva.config import Settings
from geneva.execution.backfill.committer import publish_columns
from geneva.execution.runner import InProcessRunner
from geneva.execution.worker import writer
from geneva.storage.checkpoints.store import CheckpointKey, LanceCheckpointStore
from geneva.storage.columns.staged_files import ColumnFileWriter
from history_model import CALLS, Model, make_udf
from support import publishing

SCHEMA = pa.schema([("k", pa.int64()), ("x", pa.int64()), ("other", pa.string())])
FAILPOINTS = ("checkpoint", "stage", "record", "commit")
SIZES = st.sampled_from([None, 1, 2, 3])
PICKS = st.sets(st.integers(0, 30), min_size=1, max_size=4)


class Crash(BaseException):
    """The process dies here."""


class Failpoint:
    """Kills the process, for what Geneva can tell, before or after the n-th write of a kind."""

    def __init__(self, name: str, countdown: int, *, after: bool) -> None:
        self._name, self._left, self._after = name, countdown, after
        self.crashed = False
        self.checkpointed: list[pa.RecordBatch] = []
        self.recorded: list[int] = []

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self.crashed:
                raise Crash
            mine = name == self._name and not _is_note(name, args)
            self._left -= mine
            if mine and self._left == 0 and not self._after:
                self.crashed = True
                raise Crash
            result = function(*args, **kwargs)
            self._saw(name, args)
            if mine and self._left == 0:
                self.crashed = True
                raise Crash
            return result

        return wrapped

    def _saw(self, name: str, args: tuple[Any, ...]) -> None:
        if name == "checkpoint":
            key = CheckpointKey.parse(args[1])
            if key is not None and key.rows is not None:
                self.checkpointed.append(args[2])
        elif name == "record":
            self.recorded.append(args[2].fragment_id)
            self.recorded.extend(staged.fragment_id for _, staged in args[3:])

    @contextmanager
    def armed(self, db: geneva.Connection) -> Iterator[None]:
        places = {
            "checkpoint": (LanceCheckpointStore, "__setitem__"),
            "stage": (ColumnFileWriter, "close"),
            "record": (writer, "record_staged"),
        }
        with ExitStack() as stack:
            stack.enter_context(publishing(db, self.wrap("commit", publish_columns)))
            for name, (owner, attribute) in places.items():
                wrapped = self.wrap(name, getattr(owner, attribute))
                stack.enter_context(patch.object(owner, attribute, wrapped))
            yield


def _is_note(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a write to the checkpoint store is none of a result."""
    return name == "checkpoint" and CheckpointKey.parse(args[1]) is None


class Histories(RuleBasedStateMachine):
    """One table, and its model."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="geneva-histories-")
        self.uri = f"{self.folder.name}/t.lance"
        self.next_key = self.next_x = 0
        self.versions: dict[int, Model] = {}
        self.computed: set[tuple[object, ...]] = set()
        """Every (column, generation, UDF, input) that was ever run: its result may be somewhere."""
        self.durable: set[tuple[object, ...]] = set()
        """(column, generation, UDF, row, input) that a crashed run has saved."""
        self.loose = False
        """Results of crashed or undone runs may be lying around."""

    # ---------------------------------------------------------------------------- beginnings

    @initialize(
        storage_version=st.sampled_from(["2.0", "2.1", "2.2"]),
        stable_row_ids=st.booleans(),
        chained=st.booleans(),
        fragments=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    )
    def begin(
        self, storage_version: str, stable_row_ids: bool, chained: bool, fragments: list[int]
    ) -> None:
        self.model = Model(("c", "d") if chained else ("c",))
        for size in fragments:
            lance.write_dataset(
                self._new_rows(size),
                self.uri,
                mode="append" if self.model.rows else "create",
                data_storage_version=storage_version,
                enable_stable_row_ids=stable_row_ids,
            )
            self._note_rows(self.rows)
        self.reopen()
        for column in self.model.columns:
            self._add_column(column)
        self._remember()

    def _new_rows(self, count: int) -> pa.Table:
        self.rows = []
        for _ in range(count):
            self.rows.append({"k": self.next_key, "x": self._fresh_x(), "other": "a"})
            self.next_key += 1
        return self._as_table(self.rows)

    def _as_table(self, rows: list[dict[str, Any]]) -> pa.Table:
        fields = [SCHEMA.field(name) for name in rows[0]]
        table = pa.Table.from_pylist(rows, schema=pa.schema(fields))
        names = [self.model.input_name if name == "x" else name for name in table.column_names]
        return table.rename_columns(names)

    def _fresh_x(self) -> int:
        self.next_x += 1
        return self.next_x

    def _note_rows(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            self.model.put(row["k"], **{n: v for n, v in row.items() if n != "k"})

    def _remember(self) -> None:
        self.table.checkout_latest()
        self.versions[self.table.version] = self.model.copy()

    def _add_column(self, column: str) -> None:
        number = self.model.udfs.setdefault(column, 1)
        source = self.model.input_name if column == "c" else "c"
        self.table.add_columns({column: (make_udf(column, number), [source])})
        self.generation = getattr(self, "generation", 0) + 1
        self.model.generations[column] = self.generation
        self.model.clear(column)

    def _one_of_ours(self, column: str) -> str:
        return column if column in self.model.columns else "c"

    def _picked(self, picks: set[int]) -> list[int]:
        keys = sorted(self.model.rows)
        return sorted({keys[i % len(keys)] for i in picks}) if keys else []

    # ---------------------------------------------------------------------------- what users do

    @rule()
    def reopen(self) -> None:
        db = geneva.connect(
            self.folder.name,
            runner=lambda: InProcessRunner(1),
            settings=Settings(progress=False),
        )
        self.table = db.open_table("t")

    @rule(count=st.integers(1, 4))
    def append(self, count: int) -> None:
        self.table.add(self._new_rows(count))
        self._note_rows(self.rows)
        self._remember()

    @rule(picks=PICKS)
    def delete(self, picks: set[int]) -> None:
        keys = self._picked(picks)
        if not keys:
            return
        self.table.delete(_among(keys))
        for key in keys:
            del self.model.rows[key]
        self._remember()

    @rule(picks=PICKS, like=st.none() | st.integers(0, 30))
    def update_input(self, picks: set[int], like: int | None) -> None:
        """All picked rows get one new input; sometimes one that another row has or had."""
        keys = self._picked(picks)
        if not keys:
            return
        x = self._fresh_x() if like is None else 1 + like % self.next_x
        self.table.update(where=_among(keys), values={self.model.input_name: x})
        for key in keys:
            self.model.put(key, x=x)
        self._remember()

    @rule(picks=PICKS, other=st.sampled_from("abc"))
    def update_other(self, picks: set[int], other: str) -> None:
        keys = self._picked(picks)
        if not keys:
            return
        self.table.update(where=_among(keys), values={"other": other})
        for key in keys:
            self.model.put(key, other=other)
        self._remember()

    @rule(
        picks=st.sets(st.integers(0, 30), max_size=4),
        new=st.integers(0, 2),
        changed=st.booleans(),
        columns=st.sampled_from([("x", "other"), ("x",), ("other",)]),
    )
    def upsert(self, picks: set[int], new: int, changed: bool, columns: tuple[str, ...]) -> None:
        """Rows that match, and new ones; whole rows, or some columns of them."""
        rows = [
            {
                "k": key,
                "x": self._fresh_x() if changed and key % 2 else self.model.rows[key].x,
                "other": "m",
            }
            for key in self._picked(picks)
        ]
        if new:
            self._new_rows(new)
            rows += self.rows
        rows = [{name: row[name] for name in ("k", *columns)} for row in rows]
        if not rows:
            return
        merge = self.table.merge_insert("k").when_matched_update_all()
        merge.when_not_matched_insert_all().execute(self._as_table(rows))
        for row in rows:
            if row["k"] not in self.model.rows and "other" not in row:
                row["other"] = None
            self.model.put(row["k"], **{n: v for n, v in row.items() if n != "k"})
        self._remember()

    @rule(size=st.sampled_from([3, 8, 1000]), materialize=st.booleans())
    def compact(self, size: int, materialize: bool) -> None:
        self.table.compact_files(
            target_rows_per_fragment=size,
            materialize_deletions=materialize,
            materialize_deletions_threshold=0.0,
        )
        self._remember()

    @rule()
    def optimize(self) -> None:
        self.table.optimize()
        self._remember()

    @rule(column=st.sampled_from("cd"), number=st.integers(1, 3))
    def alter(self, column: str, number: int) -> None:
        column = self._one_of_ours(column)
        source = self.model.input_name if column == "c" else "c"
        change = {"path": column, "udf": make_udf(column, number), "input_columns": [source]}
        self.table.alter_columns(change)
        self.model.udfs[column] = number
        self._remember()

    @rule(column=st.sampled_from("cd"), compacted=st.booleans())
    def replace_column(self, column: str, compacted: bool) -> None:
        """Drop a column, and those that are computed from it, and add them again."""
        columns = self.model.columns[self.model.columns.index(self._one_of_ours(column)) :]
        self.table.drop_columns(list(columns))
        if compacted:
            self.table.compact_files()
        for name in columns:
            self._add_column(name)
        self._remember()

    @rule()
    def rename_input(self) -> None:
        new = "y" if self.model.input_name == "x" else "x"
        self.table.alter_columns({"path": self.model.input_name, "rename": new})
        self.model.input_name = new
        self._remember()

    @rule(back=st.integers(1, 8))
    def restore(self, back: int) -> None:
        known = sorted(self.versions)
        version = known[max(0, len(known) - 1 - back)]
        self.table.checkout(version)
        self.table.restore()
        self.table.checkout_latest()
        self.model = self.versions[version].copy()
        self.loose = True
        self.durable.clear()
        self._remember()

    # ---------------------------------------------------------------------------- backfills

    @rule(column=st.sampled_from("cd"), checkpoint=SIZES, task=SIZES, group=st.integers(1, 3))
    def backfill(self, column: str, checkpoint: int | None, task: int | None, group: int) -> None:
        column = self._one_of_ours(column)
        options = {"checkpoint_size": checkpoint, "task_size": task, "commit_granularity": group}
        self._backfill(column, options)
        assert not self.model.stale(column)
        assert self._calls(column, {}) == Counter(), "a second backfill ran something"

    def _backfill(self, column: str, options: dict[str, Any]) -> None:
        """Compute what is stale; check how often the UDF ran."""
        model = self.model
        stale, suspect = model.stale(column), model.suspect(column)
        planned = self.table.plan_backfill(column, upstream="ignore").rows_to_run
        calls = self._calls(column, options)
        must = Counter(
            value
            for key in stale
            if not self._was_computed(column, value := model.input_of(column, model.rows[key]))
        )
        may = Counter(
            model.input_of(column, model.rows[key])
            for key in suspect
            if self._token(column, key) not in self.durable
        )
        model.compute(column, suspect)
        self._remember()
        self.check_table()
        assert must <= calls, f"not run: {must - calls}"
        assert calls <= may, f"run for nothing: {calls - may}"
        assert calls.total() == planned
        self._note_calls(column, calls)

    @rule(
        column=st.sampled_from("cd"),
        clause=st.sampled_from(["1=1", "k % 3 = 1", "other = 'a'", "c IS NULL"]),
        checkpoint=SIZES,
    )
    def backfill_where(self, column: str, clause: str, checkpoint: int | None) -> None:
        column = self._one_of_ours(column)
        keys = self._matching(clause)
        wanted = Counter(self.model.input_of(column, self.model.rows[key]) for key in keys)
        calls = self._calls(column, {"where": clause, "checkpoint_size": checkpoint})
        self.model.compute(column, keys)
        self._forget_durable(column)
        self._remember()
        self.check_table()
        assert calls <= wanted if self.loose else calls == wanted
        self._note_calls(column, calls)

    def _matching(self, clause: str) -> set[int]:
        tests: dict[str, Callable[[int, Any], bool]] = {
            "1=1": lambda key, row: True,
            "k % 3 = 1": lambda key, row: key % 3 == 1,
            "other = 'a'": lambda key, row: row.other == "a",
            "c IS NULL": lambda key, row: row.cells["c"].value is None,
        }
        return {key for key, row in self.model.rows.items() if tests[clause](key, row)}

    @rule(column=st.sampled_from("cd"), count=st.integers(1, 2))
    def backfill_some_fragments(self, column: str, count: int) -> None:
        column = self._one_of_ours(column)
        suspect = self.model.suspect(column)
        before = self._files(column)
        calls = self._calls(column, {"num_frags": count})
        changed = self._changed(column, before)
        assert len({fragment for fragment, _ in changed.values()}) <= count
        assert changed or not self.model.stale(column)
        self.model.compute(column, suspect & set(changed))
        self._remember()
        self.check_table()
        assert calls.total() <= len(suspect & set(changed))
        self._note_calls(column, calls)

    @rule(
        column=st.sampled_from("cd"),
        failpoint=st.sampled_from(FAILPOINTS),
        countdown=st.integers(1, 4),
        after=st.booleans(),
        checkpoint=st.integers(1, 3),
        task=SIZES,
        where=st.none() | st.sampled_from(["1=1", "k % 3 = 1"]),
    )
    def crash(
        self,
        column: str,
        failpoint: str,
        countdown: int,
        after: bool,
        checkpoint: int,
        task: int | None,
        where: str | None,
    ) -> None:
        column = self._one_of_ours(column)
        suspect = self.model.suspect(column) if where is None else self._matching(where)
        before, places = self._files(column), self._places()
        point = Failpoint(failpoint, countdown, after=after)
        options = {
            "where": where,
            "checkpoint_size": checkpoint,
            "task_size": task,
            "commit_granularity": 1,
        }
        with point.armed(self.table._connection):
            try:
                calls = self._calls(column, options)
            except Crash:
                calls = self._taken_calls(column)
        self.loose = True
        changed = self._changed(column, before)
        self._forget_durable(column, set(changed) if where is None else None)
        if where is None:
            saved = {
                places[int(address)]
                for batch in point.checkpointed
                for address in batch.column("_rowaddr").to_pylist()
            }
            saved |= {
                key
                for address, key in places.items()
                if address >> 32 in point.recorded and key in suspect
            }
            self.durable |= {self._token(column, key) for key in saved - set(changed)}
        self.model.compute(column, suspect & set(changed))
        self._remember()
        self.check_table()
        self._note_calls(column, calls)

    @rule()
    def clean_up(self) -> None:
        """Old versions go, and with them the table's history. Receipts still tell what is stale."""
        lance.dataset(self.uri).cleanup_old_versions(older_than=timedelta(0))
        self.versions.clear()
        self._remember()

    # ---------------------------------------------------------------------------- looking

    def _calls(self, column: str, options: dict[str, Any]) -> Counter[int | None]:
        """Backfill; return the inputs that the UDF was called with."""
        CALLS.clear()
        # One column at a time: chains have histories of their own.
        self.table.backfill(column, upstream="ignore", **options)
        return self._taken_calls(column)

    def _taken_calls(self, column: str) -> Counter[int | None]:
        assert {name for name, _ in CALLS} <= {column}
        return Counter(value for _, value in CALLS)

    def _note_calls(self, column: str, calls: Counter[int | None]) -> None:
        self.computed |= {(column, *self.model.maker(column), value) for value in calls}
        if column == "c":
            # What was saved of d was computed from files that may be others by now.
            self._forget_durable("d")

    def _was_computed(self, column: str, value: int | None) -> bool:
        return (column, *self.model.maker(column), value) in self.computed

    def _token(self, column: str, key: int) -> tuple[object, ...]:
        row = self.model.rows[key]
        return (column, *self.model.maker(column), key, self.model.input_of(column, row))

    def _forget_durable(self, column: str, keys: set[int] | None = None) -> None:
        self.durable = {
            token
            for token in self.durable
            if token[0] != column or (keys is not None and token[3] not in keys)
        }

    def _places(self) -> dict[int, int]:
        """The keys of all rows, by row address."""
        dataset = lance.dataset(self.uri)
        found = dataset.scanner(columns=["k"], with_row_address=True).to_table()
        addresses = found.column("_rowaddr").to_pylist()
        return dict(zip(addresses, found.column("k").to_pylist(), strict=True))

    def _files(self, column: str) -> dict[int, list[str]]:
        """The names of the column's data files, by fragment."""
        dataset = lance.dataset(self.uri)
        field_id = next(f.id() for f in dataset.lance_schema.fields() if f.name() == column)
        return {
            fragment.fragment_id: [f.path for f in fragment.data_files() if field_id in f.fields]
            for fragment in dataset.get_fragments()
        }

    def _changed(self, column: str, before: dict[int, list[str]]) -> dict[int, tuple[int, int]]:
        """The keys of the rows whose fragment got a new file, with where they are."""
        after = self._files(column)
        assert after.keys() == before.keys()
        return {
            key: (address >> 32, address & 0xFFFFFFFF)
            for address, key in self._places().items()
            if after[address >> 32] != before[address >> 32]
        }

    @invariant()
    @precondition(lambda self: hasattr(self, "table"))
    def check_table(self) -> None:
        self.table.checkout_latest()
        rows = sorted(self.table.to_arrow().to_pylist(), key=lambda row: row["k"])
        assert rows == list(self.model.expected())

    def teardown(self) -> None:
        if hasattr(self, "table"):
            lance.dataset(self.uri).validate()
        self.folder.cleanup()


def _among(keys: list[int]) -> str:
    return f"k in ({', '.join(map(str, keys))})"


@pytest.mark.slow
def test_any_short_history_keeps_every_value_right_and_computes_none_twice() -> None:
    run_state_machine_as_test(Histories, settings=settings(max_examples=20, stateful_step_count=15))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_any_long_history_keeps_every_value_right_and_computes_none_twice() -> None:
    examples = int(os.environ.get("GENEVA_HISTORIES", "0")) or settings().max_examples
    run_state_machine_as_test(
        Histories, settings=settings(max_examples=examples, stateful_step_count=40)
    )
