"""A tiny Lance table with one computed column, for tests of what is stored: no engine, no Spark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from geneva.model.computation import Computation
from geneva.model.digests import Digests, digest_rows
from geneva.model.rows import RowSet
from geneva.model.tables import TableRef
from geneva.storage.columns.definitions import (
    FunctionSource,
    commit_new_columns,
    computation_of,
    define_columns,
    read_definition,
    with_present_inputs,
)
from geneva.storage.columns.proofs import ValidityReader
from geneva.storage.columns.provenance import Provenance, output_file, signature_of
from geneva.storage.columns.publish import CommitOutcome, commit_columns
from geneva.storage.columns.receipts import receipts_for
from geneva.storage.columns.staged_files import StagedFile, stage_columns, written_schema
from geneva.storage.lance.dataset import (
    FieldsNow,
    FragmentFacts,
    TableSnapshot,
    open_dataset,
    read_live_rows,
    read_snapshot,
)
from geneva.udf.declare import udf


@udf(data_type=pa.int64(), version="1")
def tripled(x: int) -> int:
    """The column's function; nothing here calls it."""
    return x * 3


@dataclass(frozen=True)
class ComputedTable:
    """A table with the columns `id`, `x` and `y`, of which `y` is computed from `x`."""

    ref: TableRef

    @classmethod
    def create(cls, path: Path, fragments: Sequence[int] = (4, 4)) -> ComputedTable:
        """Make it, with fragments of these sizes, and nothing computed."""
        uri = str(path / "t.lance")
        first = 0
        for rows in fragments:
            ids = range(first, first + rows)
            data = pa.table({"id": pa.array(ids), "x": pa.array([10 * i for i in ids])})
            lance.write_dataset(data, uri, mode="append" if first else "create")
            first += rows
        dataset = lance.dataset(uri)
        source = FunctionSource(("x",), "no function is stored")
        commit_new_columns(
            dataset, define_columns(FieldsNow.of(dataset), {"y": ""}, tripled, source)
        )
        return cls(TableRef("t", uri))

    @property
    def dataset(self) -> lance.LanceDataset:
        """The latest version."""
        return open_dataset(self.ref)

    @property
    def snapshot(self) -> TableSnapshot:
        """The facts of the latest version."""
        return read_snapshot(self.dataset, self.ref)

    def computation(self, **changes: Any) -> Computation:
        """What is computed, with some changes."""
        dataset, snapshot = self.dataset, self.snapshot
        definition = read_definition(dataset.schema, "y")
        assert definition is not None
        bound = computation_of(snapshot, with_present_inputs(definition, snapshot.fields))
        return replace(bound, **changes)

    def reader(self, **changes: Any) -> ValidityReader:
        """What finds out which values are right, for a computation with some changes."""
        return ValidityReader(self.dataset, self.snapshot, self.computation(**changes))

    def fragment(self, place: int = 0) -> FragmentFacts:
        """One of the fragments, as they are in order."""
        return self.snapshot.fragments[place]

    def live(self, place: int = 0) -> RowSet:
        """Its rows that are not deleted."""
        fragment = self.fragment(place)
        return read_live_rows(self.dataset, [fragment])[fragment.id]

    def column(self, name: str) -> list[Any]:
        """The values of a column, by id."""
        rows = self.dataset.to_table(columns=["id", name]).sort_by("id")
        found: list[Any] = rows[name].to_pylist()
        return found

    def input_digests(self, values: Sequence[int]) -> Digests:
        """The digests of values of `x`, as receipts have them."""
        seed = self.computation().receipt_seed()
        return digest_rows([pa.array(values, pa.int64())], seed, len(values))

    def stage(
        self,
        place: int = 0,
        *,
        computed: Sequence[int] | None = None,
        failed: Sequence[int] = (),
    ) -> StagedFile:
        """Stage a file as a task would: the values of some rows (None: all), and their receipts."""
        computation, fragment = self.computation(), self.fragment(place)
        size = fragment.physical_rows
        everything = self.dataset.scanner(
            columns=["x"],
            fragments=[self.dataset.get_fragment(fragment.id)],
            include_deleted_rows=True,
            with_row_id=True,
        ).to_table()
        made = np.array(range(size) if computed is None else computed, dtype=np.int64)
        values: list[int | None] = [None] * size
        for row in set(made.tolist()) - set(failed):
            values[row] = 3 * (everything["x"][row].as_py() or 0)
        y = pa.array(values, pa.int64())
        digests = digest_rows([everything["x"].combine_chunks()], computation.receipt_seed(), size)
        receipts = receipts_for(digests, [y], failed=failed)
        unknown = np.ones(size, dtype=np.bool_)
        unknown[made] = False
        batch = pa.record_batch(
            [y, pa.array(receipts.to_numpy(), receipts.type, mask=unknown)],
            names=[output.name for output in computation.written],
        )
        right = RowSet.from_offsets(size, np.setdiff1d(made, np.array(failed, dtype=np.int64)))
        provenance = Provenance(
            column_uuid=computation.id,
            udf_version=computation.version,
            inputs=signature_of(computation, fragment),
            valid=right,
            failed=RowSet.from_offsets(size, np.array(failed, dtype=np.int64)) if failed else None,
        )
        path, rows = stage_columns(
            self.ref,
            self.dataset,
            written_schema(self.dataset.schema, batch.schema.names),
            [batch],
            provenance,
            complete=right.is_full,
        )
        return StagedFile(
            fragment_id=fragment.id,
            path=path,
            physical_rows=rows,
            column_uuid=computation.id,
            field_ids=computation.written_ids,
            inputs=provenance.inputs,
            base=output_file(computation, fragment),
        )

    def commit(self, *staged: StagedFile) -> CommitOutcome:
        """Publish staged files."""
        return commit_columns(self.ref, self.dataset, self.computation(), staged, "job", 3)

    def fill(self, place: int = 0, **options: Any) -> None:
        """Compute and publish a fragment, as `stage` does."""
        self.commit(self.stage(place, **options))
