"""One version of a table with what is to be computed in it: what planning reads facts from."""

from __future__ import annotations

from dataclasses import dataclass

from geneva.execution.backfill.request import BackfillRequest
from geneva.execution.backfill.subjects import Subject
from geneva.model.computation import Computation
from geneva.model.tables import TableRef
from geneva.storage.checkpoints.store import WorkIdentity
from geneva.storage.columns.lost_files import lost_values
from geneva.storage.columns.proofs import ValidityReader, readers_of
from geneva.storage.columns.provenance import output_file, signature_of
from geneva.storage.lance.dataset import Dataset, FragmentFacts, TableSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """One version of a table, and what was asked for in it."""

    subject: Subject
    request: BackfillRequest
    dataset: Dataset
    snapshot: TableSnapshot
    computation: Computation
    readers: tuple[ValidityReader, ...]
    """What judges the values of each output."""
    facts: dict[int, FragmentFacts]
    """All fragments, by id."""
    files_of_job: frozenset[str] = frozenset()
    """Data files that this very job has made, committed or not: their results are its own."""
    lost_files: frozenset[str] = frozenset()
    """Data files of values and receipts that the table has, and that are gone."""

    @property
    def ref(self) -> TableRef:
        """The table."""
        return self.snapshot.ref

    def has_values(self, facet: Computation, fragment: FragmentFacts) -> bool:
        """Whether a fragment has values of an output, right or wrong."""
        path = output_file(facet, fragment)
        return path is not None and self.lost_files.isdisjoint(path.split("\n"))

    def can_read_receipts(self, fragment: FragmentFacts) -> bool:
        """Whether no receipts of a fragment are gone; it may have none."""
        fields = [i for receipt in self.computation.receipts for i in receipt.field_ids]
        return self.lost_files.isdisjoint(file.path for file in fragment.files_of(fields))

    def prefix(self, fragment: FragmentFacts) -> str:
        """The prefix of the checkpoint keys of a fragment's work."""
        return self.identity(fragment).prefix()

    def identity(self, fragment: FragmentFacts) -> WorkIdentity:
        """What the work on a fragment is."""
        return work_identity(self.computation, self.request, self.ref, fragment)


def bind_scope(
    subject: Subject,
    request: BackfillRequest,
    dataset: Dataset,
    snapshot: TableSnapshot,
    files_of_job: frozenset[str],
    lost_files: frozenset[str],
) -> Scope:
    """Bind a computation to one version of its table."""
    computation = subject.bind(dataset, snapshot)
    lost = lost_files | lost_values(snapshot, computation)
    return Scope(
        subject=subject,
        request=request,
        dataset=dataset,
        snapshot=snapshot,
        computation=computation,
        readers=readers_of(dataset, snapshot, computation, lost),
        facts={fragment.id: fragment for fragment in snapshot.fragments},
        files_of_job=files_of_job,
        lost_files=lost,
    )


def work_identity(
    computation: Computation, request: BackfillRequest, ref: TableRef, fragment: FragmentFacts
) -> WorkIdentity:
    """What the work on a fragment is.

    The file of its present values is a source too: so that a clause that is run again after its
    result was committed is new work, and one that is run again after a crash isn't. So are the
    UUIDs of the columns that a call fills together: one that was dropped and added again is another
    column, and its values are computed again. And so is which rows are deleted: they come back when
    an old version is restored.
    """
    base = output_file(computation, fragment)
    return WorkIdentity(
        udf_name=computation.program_name,
        udf_version=computation.version,
        column=computation.name,
        where=request.work_where or "",
        uri=ref.uri,
        computation=computation.id,
        source_files=(
            *signature_of(computation, fragment),
            *((base,) if base else ()),
            f"deleted:{fragment.deletions}",
            *(f"output:{o.column_id}" for o in computation.outputs if o.field),
        ),
    )
