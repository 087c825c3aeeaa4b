"""A second opinion on a computed column: receipts, and on request values, recomputed row by row.

Planning trusts files and transactions where they prove a value right. This trusts neither: it reads
the rows. It changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral

import numpy as np

from geneva.execution.backfill.subjects import SourceCheck, Subject
from geneva.execution.worker.program import live_program
from geneva.execution.worker.surroundings import trying_functions
from geneva.execution.worker.task import ColumnWork
from geneva.model.addresses import row_addresses
from geneva.model.computation import MakePermit, permit_any
from geneva.model.digests import digest_rows
from geneva.model.rows import Offsets, RowRange, RowSet
from geneva.render import html
from geneva.render.text import agree, count
from geneva.storage.columns.inputs import InputReader
from geneva.storage.columns.proofs import ValidityReader
from geneva.storage.columns.receipts import input_part, is_adopted, receipt_bits
from geneva.storage.columns.validity import Validity
from geneva.storage.lance.damage import is_damage
from geneva.storage.lance.dataset import (
    Dataset,
    FragmentFacts,
    open_dataset,
    read_live_rows,
    read_snapshot,
)
from geneva.storage.lance.fragments import RowTaker

_MAX_EXAMPLES = 100
_SHOWN = 10
_ROWS_AT_ONCE = 1_024


class RowState(StrEnum):
    """What was found in one row."""

    RIGHT = "right"
    """Its receipt is of the present function, inputs and value."""
    STALE = "stale"
    """Its inputs or the function changed since: the next backfill computes it."""
    NOT_COMPUTED = "not computed"
    FAILED = "failed"
    """The function failed on it, and it was skipped."""
    SUPPLIED = "supplied"
    """A person wrote its value: the next backfill keeps it and adds a receipt."""
    UNPROVEN = "unproven"
    """It has a value from before the column had receipts."""
    WRONG = "wrong"
    """The table's files say that it is right, and its receipt says that it is not."""
    DIFFERS = "differs"
    """The function gives another value now than the one that is stored."""
    UNREADABLE = "unreadable"
    """A data file of its fragment is damaged, or gone."""


@dataclass(frozen=True, slots=True)
class RowReport:
    """A row that is not right."""

    address: int
    """The row's address: `fragment << 32 | offset`."""
    state: RowState


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was found in the rows that were read."""

    table: str
    column: str
    version: int
    rows: int
    """Rows that were read."""
    total_rows: int
    counts: dict[RowState, int] = field(default_factory=dict)
    examples: tuple[RowReport, ...] = ()
    """Some of the rows that are not right, the worst first."""
    kept_values: int = 0
    """Rows that are right because a person wrote their value, or because it was kept, though the
    function gives another one. Only `run` finds them."""

    @property
    def ok(self) -> bool:
        """Whether every value could be read, and none is other than its column says."""
        return not any(self.counts.get(state, 0) for state in _BAD)

    def __str__(self) -> str:
        """Return the report as text."""
        lines = [
            f"Column {self.column!r} of table {self.table!r} at version {self.version}: "
            f"{self.rows:,} of {count(self.total_rows, 'row')} looked at"
        ]
        lines += [f"  {state.value:13}{rows:,}" for state, rows in self._shown()]
        if self.kept_values:
            lines.append(f"  of the right ones, {self._kept_text}")
        shown = self.examples[:_SHOWN]
        lines += [f"    row address {e.address}: {e.state.value}" for e in shown]
        more = sum(rows for state, rows in self._shown() if state in _WORST_FIRST) - len(shown)
        lines += [f"    and {more:,} more"] if shown and more > 0 else []
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Show the report in a notebook."""
        rows = [(state.value, f"{count:,}") for state, count in self._shown()]
        notes = [html.note(f"Of the right ones, {self._kept_text}.")] * bool(self.kept_values)
        title = f"Column {self.column!r} of table {self.table!r} at version {self.version}"
        return html.section(title, html.grid(("rows that are", "number"), rows), *notes)

    @property
    def _kept_text(self) -> str:
        return (
            f"{count(self.kept_values, 'row')} {agree(self.kept_values, 'have')} a value that a "
            "person wrote, or that was kept; the function gives another one"
        )

    def _shown(self) -> list[tuple[RowState, int]]:
        return [(state, self.counts[state]) for state in RowState if self.counts.get(state)]


_BAD = (RowState.WRONG, RowState.DIFFERS, RowState.UNREADABLE)
_WORST_FIRST = (
    *_BAD,
    RowState.STALE,
    RowState.UNPROVEN,
    RowState.FAILED,
    RowState.SUPPLIED,
    RowState.NOT_COMPUTED,
)


def verify(
    subject: Subject,
    version: int | None = None,
    *,
    column: str | None = None,
    sample: int | float | None = None,
    run: bool = False,
    seed: int = 0,
    permit: MakePermit = permit_any,
    env: Mapping[str, str] | None = None,
) -> VerifyReport:
    """Look at all rows of a column, or at a sample: a number of rows, or a share (1.0: all).

    At a version of the table, or the latest. `column` is one of those that the subject fills
    together; None: there is one.
    With `run` the user's function is called here, for the rows that are right by their receipts,
    and with the variables of a job.
    """
    dataset = open_dataset(subject.ref, version)
    snapshot = read_snapshot(dataset, subject.ref)
    whole = subject.bind(dataset, snapshot)
    computation = whole if column is None else whole.facet(column)
    reader = ValidityReader(dataset, snapshot, computation, group=whole, reads_values=True)
    live = read_live_rows(dataset, snapshot.fragments)
    check_source = subject.source_check(dataset, computation)
    found: dict[RowState, list[int]] = {}
    rows = kept_values = 0
    work = ColumnWork(
        job_id="verify",
        ref=subject.ref,
        version=int(dataset.version),
        computation=computation,
        sizes=computation.sizes,
        permit=permit(subject.ref, computation) if run else None,
    )
    for fragment, chosen in _sampled(snapshot.fragments, live, sample, seed):
        rows += chosen.count
        states = _compared(reader, check_source, fragment, chosen)
        if run and RowState.RIGHT in states:
            right = states.pop(RowState.RIGHT)
            with trying_functions(env or {}):
                differing, kept = _differing(dataset, work, fragment, right)
            kept_values += kept
            states[RowState.DIFFERS] = differing
            states[RowState.RIGHT] = right.minus(differing)
        for state, members in states.items():
            addresses = row_addresses(fragment.id, members.offsets()).tolist()
            found.setdefault(state, []).extend(addresses)
    worst = (RowReport(a, state) for state in _WORST_FIRST for a in found.get(state, ()))
    return VerifyReport(
        table=subject.ref.name,
        column=computation.name,
        version=snapshot.version,
        rows=rows,
        total_rows=sum(f.live_rows for f in snapshot.fragments),
        counts={state: len(members) for state, members in found.items() if members},
        examples=tuple(report for report, _ in zip(worst, range(_MAX_EXAMPLES), strict=False)),
        kept_values=kept_values,
    )


def _sampled(
    fragments: tuple[FragmentFacts, ...],
    live: dict[int, RowSet],
    sample: int | float | None,
    seed: int,
) -> Iterator[tuple[FragmentFacts, RowSet]]:
    """The rows to read, fragment by fragment."""
    total = sum(rows.count for rows in live.values())
    wanted = total
    if sample is not None:
        is_share = sample < 1 or (sample == 1 and not isinstance(sample, Integral))
        wanted = min(total, max(1, round(sample * total) if is_share else int(sample)))
    places = (
        np.arange(total)
        if wanted == total
        else np.sort(np.array(random.Random(seed).sample(range(total), wanted), dtype=np.int64))
    )
    before = 0
    for fragment in fragments:
        own = live[fragment.id].offsets()
        low, high = np.searchsorted(places, (before, before + len(own)))
        if high > low:
            offsets = own[places[low:high] - before]
            yield fragment, RowSet.from_offsets(fragment.physical_rows, offsets)
        before += len(own)


def _compared(
    reader: ValidityReader, check_source: SourceCheck | None, fragment: FragmentFacts, rows: RowSet
) -> dict[RowState, RowSet]:
    """What some rows of a fragment are, without calling the function."""
    try:
        claimed = reader.by_files(fragment)
        if check_source is not None:
            claimed = check_source(fragment, claimed)
        seen = reader.by_receipt(fragment, rows)
    except BaseException as error:
        if not is_damage(error):
            raise
        return {RowState.UNREADABLE: rows}
    return _states(claimed, seen, rows, has_receipts=bool(reader.computation.receipts))


def _states(
    claimed: Validity, seen: Validity, chosen: RowSet, *, has_receipts: bool
) -> dict[RowState, RowSet]:
    """What each row is, by its receipt, and against what files and history say of it."""
    right = seen.right.intersect(chosen)
    if not has_receipts:
        right = right.union(claimed.right.intersect(chosen))
    unproven = seen.unproven.intersect(chosen).minus(right)
    # By files it is right, but without a receipt: made before there were any.
    proven = claimed.right.minus(claimed.without_receipt).intersect(chosen)
    right = right.union(claimed.without_receipt.intersect(unproven))
    unproven = unproven.minus(right)
    failed = seen.failed.intersect(chosen)
    supplied = seen.supplied.intersect(chosen)
    wrong = proven.minus(right)
    rest = chosen.minus(right).minus(failed).minus(supplied).minus(unproven).minus(wrong)
    stale = rest.intersect(seen.stale.union(seen.failed_before))
    return {
        RowState.RIGHT: right,
        RowState.WRONG: wrong,
        RowState.STALE: stale,
        RowState.NOT_COMPUTED: rest.minus(stale),
        RowState.FAILED: failed.minus(wrong),
        RowState.SUPPLIED: supplied.minus(wrong),
        RowState.UNPROVEN: unproven.minus(wrong),
    }


def _differing(
    dataset: Dataset,
    work: ColumnWork,
    fragment: FragmentFacts,
    rows: RowSet,
) -> tuple[RowSet, int]:
    """Rows for which the function gives another value than its own one that is stored.

    And how many there are for which it does and whose value is not its own: what a person wrote,
    or an earlier version made and was kept, is not for the function to say.
    """
    program, computation = live_program(work), work.computation
    inputs = InputReader(dataset, computation)
    stored = RowTaker(dataset, fragment.id, [output.name for output in computation.written])
    outputs = len(computation.outputs)
    everything = RowRange(0, fragment.physical_rows)
    differing: list[Offsets] = []
    kept = 0
    seed = computation.receipt_seed()
    for offsets, batch in inputs.read(fragment.id, rows.offsets(), everything, _ROWS_AT_ONCE):
        size = computation.sizes.batch_size or len(offsets)
        for at in range(0, len(offsets), size):
            some = offsets[at : at + size]
            applied = program.run(batch.slice(at, size))
            now = digest_rows(applied.arrays, 0, len(some))
            there = stored.take(some).columns
            then = digest_rows(there[:outputs], 0, len(some))
            other = now != then
            other[[f.row for f in applied.failures if f.row is not None]] = True
            if computation.receipts:
                inputs_of = computation.receipted(batch.slice(at, size))
                own = digest_rows(inputs_of, seed, len(some))
                is_own = input_part(receipt_bits(there[outputs])) == input_part(own)
                is_own &= ~is_adopted(there[outputs])
                kept += int(np.count_nonzero(other & ~is_own))
                other &= is_own
            differing.append(some[other])
    members = np.concatenate(differing) if differing else np.empty(0, dtype=np.int64)
    return RowSet.from_offsets(fragment.physical_rows, members), kept
