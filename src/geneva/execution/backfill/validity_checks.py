"""Which values of a table are right, by the cheapest proof there is.

Files and history come first, then receipts. Where much of the inputs has to be read for that, the
workers of the job read it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from geneva.config import without_collecting
from geneva.execution.backfill.scope import Scope
from geneva.execution.runner import Runner
from geneva.model.computation import Computation
from geneva.model.rows import RowSet
from geneva.model.tables import TableRef
from geneva.storage.columns.proofs import ValidityReader, readers_of
from geneva.storage.columns.proofs import check_receipts as compare_receipts
from geneva.storage.columns.validity import Validity
from geneva.storage.lance.damage import damage_reason, is_damage
from geneva.storage.lance.dataset import (
    FragmentFacts,
    open_pinned,
    read_live_rows,
    read_snapshot,
)
from geneva.storage.lance.fragments import size_of_inputs

MUCH_BYTES = 1024 * 1024 * 1024
"""Inputs of this size are not read by one process alone."""
_SOURCE_ROW_BYTES = 1024
"""Of a row of another table, at a guess."""
_ITEMS_PER_SLOT = 4
_UNREADABLE = "unreadable: "
_NEXT_OUTPUT = "\t"

Undecided: TypeAlias = Sequence[tuple[FragmentFacts, tuple[RowSet, ...]]]
"""Fragments, and the rows of each that only receipts can prove right, by output."""
Judged: TypeAlias = tuple[Validity, ...]
"""What is known of a fragment, for each output of the computation."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A fragment whose rows can't be read."""

    reason: str
    """In one line."""

    def to_text(self) -> str:
        """What a worker sends back."""
        return f"{_UNREADABLE}{self.reason}"


def read_validity(
    scope: Scope, fragments: Sequence[FragmentFacts], make_runner: Callable[[], Runner] | None
) -> dict[int, Judged | Unreadable]:
    """What is right in each fragment. `make_runner` makes what reads much; None: nothing does."""
    check_source = scope.subject.source_check(scope.dataset, scope.computation)
    found: dict[int, Judged] = {}
    unreadable: dict[int, Unreadable] = {}
    with without_collecting():
        for fragment in fragments:
            judged = tuple([reader.by_files(fragment) for reader in scope.readers])
            if check_source is not None:
                judged = tuple(check_source(fragment, validity) for validity in judged)
            found[fragment.id] = judged
    unclear = [f for f in fragments if any(output.undecided for output in found[f.id])]
    live = read_live_rows(scope.dataset, unclear)
    undecided = [
        (f, tuple(output.undecided.intersect(live[f.id]) for output in found[f.id]))
        for f in unclear
    ]
    checks = _by_receipt(scope, undecided, make_runner)
    for (fragment, _), checked in zip(undecided, checks, strict=True):
        if isinstance(checked, Unreadable):
            unreadable[fragment.id] = checked
            continue
        pairs = zip(found[fragment.id], checked, strict=True)
        found[fragment.id] = tuple(before.joined(now) for before, now in pairs)
    return {**found, **unreadable}


def _by_receipt(
    scope: Scope, undecided: Undecided, make_runner: Callable[[], Runner] | None
) -> Iterable[Judged | Unreadable]:
    """What receipts say of these rows: read here, or by workers where it is much."""
    much = bytes_to_read(scope.computation, undecided) >= MUCH_BYTES
    if make_runner is None or not much or not scope.computation.receipts:
        return (check_rows(scope.readers, fragment, rows) for fragment, rows in undecided)
    return check_on_workers(make_runner, scope, undecided)


def check_rows(
    readers: Sequence[ValidityReader], fragment: FragmentFacts, rows: Sequence[RowSet]
) -> Judged | Unreadable:
    """What receipts say of some rows of a fragment, if they can be read."""
    try:
        return tuple(compare_receipts(readers, fragment, rows))
    except BaseException as error:
        if not is_damage(error):
            raise
        return Unreadable(damage_reason(error))


def bytes_to_read(computation: Computation, undecided: Undecided) -> int:
    """How much a check of these rows reads of their inputs, about."""
    fields = [i for found in computation.inputs for i in found.field_ids]
    if computation.source is not None:
        return sum(_SOURCE_ROW_BYTES * _most(rows) for _, rows in undecided)
    return sum(
        sum(size or 0 for size in size_of_inputs(fragment, fields))
        * _most(rows)
        // max(fragment.physical_rows, 1)
        for fragment, rows in undecided
    )


def _most(rows: Sequence[RowSet]) -> int:
    """How many rows are read, about: inputs are read once for all outputs."""
    return max(own.count for own in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptCheck:
    """Rows of some fragments whose receipts are to be compared with their inputs."""

    ref: TableRef
    version: int
    computation: Computation
    check_id: str
    """Workers share an open table within one check, and not with another."""
    rows: tuple[tuple[int, tuple[RowSet, ...]], ...]
    """Fragments, and the rows of each, by output."""
    lost_files: frozenset[str]
    """Data files of the table that are gone."""


def check_receipts(item: ReceiptCheck) -> str:
    """Check the rows of an item; return what was found, as text. This is shipped to workers."""
    dataset = open_pinned(item.ref, item.version, item.check_id)
    snapshot = read_snapshot(dataset, item.ref)
    readers = readers_of(dataset, snapshot, item.computation, item.lost_files)
    facts = {fragment.id: fragment for fragment in snapshot.fragments}
    found = (check_rows(readers, facts[fragment], rows) for fragment, rows in item.rows)
    return "\n".join(map(_to_text, found))


def _to_text(checked: Judged | Unreadable) -> str:
    if isinstance(checked, Unreadable):
        return checked.to_text()
    return _NEXT_OUTPUT.join(output.to_text() for output in checked)


def _from_text(text: str) -> Judged | Unreadable:
    if text.startswith(_UNREADABLE):
        return Unreadable(text.removeprefix(_UNREADABLE))
    return tuple(map(Validity.from_text, text.split(_NEXT_OUTPUT)))


def check_on_workers(
    make_runner: Callable[[], Runner], scope: Scope, undecided: Undecided
) -> list[Judged | Unreadable]:
    """Check rows by their receipts on the workers of a runner, in the order given."""
    runner = make_runner()
    count = max(1, min(len(undecided), _ITEMS_PER_SLOT * runner.slots))
    shares = [list(range(i, len(undecided), count)) for i in range(count)]
    check_id = uuid.uuid4().hex
    items = [
        ReceiptCheck(
            ref=scope.ref,
            version=scope.snapshot.version,
            computation=scope.computation,
            check_id=check_id,
            rows=tuple((undecided[i][0].id, undecided[i][1]) for i in share),
            lost_files=scope.lost_files,
        )
        for share in shares
    ]
    texts = runner.submit(check_receipts, items).result()
    found: dict[int, Judged | Unreadable] = {}
    for share, text in zip(shares, texts, strict=True):
        found.update(zip(share, map(_from_text, text.split("\n")), strict=True))
    return [found[i] for i in range(len(undecided))]
