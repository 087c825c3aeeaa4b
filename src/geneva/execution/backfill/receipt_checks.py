"""Checking receipts as tasks: where there is much to read, the workers of the job read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from geneva.execution.runner import Runner
from geneva.model.computation import Computation
from geneva.model.rows import RowSet
from geneva.model.tables import TableRef
from geneva.storage.columns.validity import Validity, ValidityReader
from geneva.storage.lance.dataset import FragmentFacts, TableSnapshot, open_pinned, read_snapshot
from geneva.storage.lance.fragments import size_of_inputs

MUCH_BYTES = 1024 * 1024 * 1024
"""Inputs of this size are not read by one process alone."""
_SOURCE_ROW_BYTES = 1024
"""Of a row of another table, at a guess."""
_ITEMS_PER_SLOT = 4


@dataclass(frozen=True, slots=True)
class ReceiptCheck:
    """Rows of some fragments whose receipts are to be compared with their inputs."""

    ref: TableRef
    version: int
    computation: Computation
    opening: str
    rows: tuple[tuple[int, RowSet], ...]
    """Fragments, and the rows of each."""


def check_receipts(item: ReceiptCheck) -> str:
    """Judge the rows of an item; return what was found, as text. This is shipped to workers."""
    dataset = open_pinned(item.ref, item.version, item.opening)
    snapshot = read_snapshot(dataset, item.ref)
    reader = ValidityReader(dataset, snapshot, item.computation)
    facts = {fragment.id: fragment for fragment in snapshot.fragments}
    found = (reader.by_receipt(facts[fragment], rows) for fragment, rows in item.rows)
    return "\n".join(validity.to_text() for validity in found)


def bytes_to_read(
    computation: Computation, undecided: Sequence[tuple[FragmentFacts, RowSet]]
) -> int:
    """How much a check of these rows reads of their inputs, about."""
    fields = [i for found in computation.inputs for i in found.field_ids]
    if computation.source is not None:
        return sum(_SOURCE_ROW_BYTES * rows.count for _, rows in undecided)
    return sum(
        sum(size or 0 for size in size_of_inputs(fragment, fields))
        * rows.count
        // max(fragment.physical_rows, 1)
        for fragment, rows in undecided
    )


def check_with(
    make_runner: Callable[[], Runner],
    snapshot: TableSnapshot,
    computation: Computation,
    opening: str,
    undecided: Sequence[tuple[FragmentFacts, RowSet]],
) -> list[Validity]:
    """Judge rows by their receipts on the workers of a runner, in the order given."""
    runner = make_runner()
    count = max(1, min(len(undecided), _ITEMS_PER_SLOT * runner.slots))
    shares = [list(range(i, len(undecided), count)) for i in range(count)]
    items = [
        ReceiptCheck(
            ref=snapshot.ref,
            version=snapshot.version,
            computation=computation,
            opening=opening,
            rows=tuple((undecided[i][0].id, undecided[i][1]) for i in share),
        )
        for share in shares
    ]
    texts = runner.submit(check_receipts, items).result()
    found: dict[int, Validity] = {}
    for share, text in zip(shares, texts, strict=True):
        found.update(zip(share, map(Validity.from_text, text.split("\n")), strict=True))
    return [found[i] for i in range(len(undecided))]
