"""What every cell of a table must be, as plain Python: a dict of rows, and the rule of receipts.

A row is known as a SET of possible rows. Mostly it has one member. Where the rule leaves the engine
a choice that can't be seen (was a value adopted by a partial backfill, was it committed before the
job died) it has several, and reading the table removes those that don't have its values.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from oracle.functions import Broken, Call, Function, canonical, evaluate, plain

Value = Hashable


@dataclass(frozen=True, slots=True)
class Receipt:
    """What stands beside a computed value: what it was made of, and what was made."""

    function: Function
    inputs: tuple[Value, ...]
    value: Value
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """A computed column: its function and the columns that it reads, all by role."""

    role: str
    function: Function
    inputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """The values of a row, and the receipts of its computed ones, by role."""

    values: frozenset[tuple[str, Value]]
    receipts: frozenset[tuple[str, Receipt]] = frozenset()

    def value(self, role: str) -> Value:
        return dict(self.values).get(role)

    def receipt(self, role: str) -> Receipt | None:
        return dict(self.receipts).get(role)

    def put(self, values: Mapping[str, Value]) -> Row:
        """Write values as a person does: without touching a receipt."""
        return replace(self, values=frozenset({**dict(self.values), **values}.items()))

    def stamped(self, role: str, receipt: Receipt) -> Row:
        """Write the value of a receipt, and the receipt."""
        receipts = frozenset({**dict(self.receipts), role: receipt}.items())
        return replace(self.put({role: receipt.value}), receipts=receipts)

    def without(self, role: str) -> Row:
        """Empty a column."""
        values = frozenset((r, v) for r, v in self.values if r != role)
        return Row(values, frozenset((r, v) for r, v in self.receipts if r != role))


def new_row(values: Mapping[str, Value]) -> Row:
    return Row(frozenset(values.items()))


class Verdict(Enum):
    """What the rule says about a cell."""

    RIGHT = "right"
    FAILED = "failed"
    ADOPT = "a person's value: keep it, and write a receipt"
    CALL = "stale, or not computed"


def inputs_of(row: Row, column: Column) -> tuple[Value, ...]:
    return tuple(row.value(role) for role in column.inputs)


def verdict(row: Row, column: Column) -> Verdict:
    """The table of the architecture, line by line."""
    value, receipt = row.value(column.role), row.receipt(column.role)
    if receipt is None or value != receipt.value:
        return Verdict.CALL if value is None else Verdict.ADOPT
    if (receipt.function, receipt.inputs) != (column.function, inputs_of(row, column)):
        return Verdict.CALL
    return Verdict.FAILED if receipt.failed else Verdict.RIGHT


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job may have made of a row, and the calls that it took."""

    row: Row
    calls: tuple[Call, ...] = ()


Outcomes = frozenset[Outcome]
Change = Callable[[Outcome], Iterable[Outcome]]


def call_of(row: Row, column: Column) -> Call:
    return Call(column.role, column.function, inputs_of(row, column))


def computed(outcome: Outcome, column: Column, *, failing: bool) -> Outcome:
    """Call the function for a row."""
    call = call_of(outcome.row, column)
    inputs = call.inputs
    try:
        value = evaluate(column.function, [plain(v) for v in inputs], failing=failing)
        receipt = Receipt(column.function, inputs, canonical(value))
    except Broken:
        receipt = Receipt(column.function, inputs, None, failed=True)
    return Outcome(outcome.row.stamped(column.role, receipt), (*outcome.calls, call))


def adopted(outcome: Outcome, column: Column) -> Outcome:
    """Write a receipt for the value that is there."""
    row = outcome.row
    receipt = Receipt(column.function, inputs_of(row, column), row.value(column.role))
    return replace(outcome, row=row.stamped(column.role, receipt))


@dataclass(frozen=True, slots=True)
class Job:
    """A backfill as the model sees it: what it may do to a row, column by column.

    `chain` has the columns that are brought up to date first and, at its end, the column itself.
    """

    chain: tuple[Column, ...]
    failing: bool
    where: Callable[[Row], bool] | None = None
    retry_failed: bool = False
    paid: Collection[Call] = ()
    """Calls of earlier jobs that may be used again, also those of a function that failed since."""

    def run(self, row: Row) -> Outcomes:
        """What a job that ended well has made of a row."""
        return compose(row, [self._settle(column, row) for column in self.chain])

    def may_run(self, row: Row) -> Outcomes:
        """What a job that ended at any moment may have made of a row."""
        changes = [_maybe(self._settle(column, row)) for column in self.chain]
        return compose(row, changes)

    def run_again(self, row: Row) -> Outcomes:
        """What a job may have made of a row that changed while it ran.

        Its column is right; what that is made of may be stale again.
        """
        *upstream, target = (self._settle(column, row) for column in self.chain)
        return compose(row, [*map(_maybe, upstream), target])

    def selects(self, row: Row) -> bool:
        return self.where is None or self.where(row)

    def selecting(self, ids: Collection[int]) -> Job:
        """Return the job with these rows selected as well."""
        return replace(self, where=lambda row: row.value("id") in ids or self.selects(row))

    def _settle(self, column: Column, before: Row) -> Change:
        is_target = column == self.chain[-1]
        selected = self.selects(before)

        def settle(outcome: Outcome) -> Iterable[Outcome]:
            found = verdict(outcome.row, column)
            calls = self._called(outcome, column)
            keep = adopted(outcome, column) if found is Verdict.ADOPT else outcome
            if not selected:
                return {outcome, keep}
            if is_target and self.retry_failed:
                return self._retry(outcome, column, calls, keep)
            if is_target and self.where is not None:
                return calls
            if found is Verdict.CALL:
                return calls
            # Nothing is said about adopting in a column that is only brought up to date.
            return {keep} if is_target else {outcome, keep}

        return settle

    def _called(self, outcome: Outcome, column: Column) -> set[Outcome]:
        either = {self.failing}
        if call_of(outcome.row, column) in self.paid:
            either = {True, False}
        return {computed(outcome, column, failing=failing) for failing in either}

    def _retry(
        self, outcome: Outcome, column: Column, calls: set[Outcome], keep: Outcome
    ) -> Iterable[Outcome]:
        receipt = outcome.row.receipt(column.role)
        if verdict(outcome.row, column) is Verdict.FAILED:
            return calls
        if receipt is not None and receipt.failed and keep is outcome:
            return {*calls, outcome}  # failed once, and stale since
        return {outcome, keep}


def _maybe(change: Change) -> Change:
    return lambda outcome: {outcome, *change(outcome)}


def compose(row: Row, changes: Iterable[Change]) -> Outcomes:
    """Apply changes one after the other, each to all that the one before may have made."""
    outcomes: Outcomes = frozenset({Outcome(row)})
    for change in changes:
        outcomes = frozenset(itertools.chain.from_iterable(change(o) for o in outcomes))
    return outcomes


Rows = dict[int, frozenset[Row]]


@dataclass(frozen=True)
class State:
    """All of a table at one version. Never changed: every change makes another one."""

    rows: Rows
    columns: dict[str, Column]
    names: dict[str, str]
    """The present names of columns, by role."""
    loose: frozenset[str] = field(default_factory=frozenset)
    """Columns with another field than their readers were declared with: known by name only, so that
    only a rename through Geneva is followed."""

    def mapped(self, change: Callable[[Row], Row], ids: Iterable[int] | None = None) -> State:
        """Change rows, each of its possible ones."""
        chosen = set(self.rows if ids is None else ids)
        rows = {
            key: frozenset(map(change, possible)) if key in chosen else possible
            for key, possible in self.rows.items()
        }
        return replace(self, rows=rows)

    def upserted(self, values: Mapping[int, Mapping[str, Value]]) -> State:
        """Write values into rows; rows that aren't there come."""
        rows = dict(self.rows)
        for key, changed in values.items():
            before = rows.get(key, frozenset({new_row({"id": key})}))
            rows[key] = frozenset(row.put(changed) for row in before)
        return replace(self, rows=rows)

    def chain(self, role: str, *, upstream: bool) -> tuple[Column, ...]:
        """The computed columns that the column is made of, in order, and the column."""
        column = self.columns[role]
        inputs = [r for r in column.inputs if r in self.columns] if upstream else []
        before = [c for r in inputs for c in self.chain(r, upstream=True)]
        return (*dict.fromkeys(before), column)


class Mismatch(AssertionError):
    """The table is not what the rule says."""


@dataclass(frozen=True, slots=True)
class Bill:
    """The calls that a job must have made at least, and may have made at most."""

    least: Counter[Call]
    most: Counter[Call]

    def check(self, calls: Counter[Call], credit: Iterable[Call]) -> None:
        """Compare with the calls that were made; `credit` was paid for by earlier, killed jobs."""
        missing = self.least - calls
        for call in credit:
            missing.pop(call, None)
        if missing:
            raise Mismatch(f"not called for: {dict(missing)}")
        if extra := calls - self.most:
            raise Mismatch(f"called without need: {dict(extra)}")


def reconcile(possible: Mapping[int, Outcomes], actual: Mapping[int, Row]) -> tuple[Rows, Bill]:
    """Keep what agrees with the table; return it with the calls that it costs."""
    if possible.keys() != actual.keys():
        lost, extra = possible.keys() - actual.keys(), actual.keys() - possible.keys()
        raise Mismatch(f"rows lost: {sorted(lost)}, rows too many: {sorted(extra)}")
    rows: Rows = {}
    least: Counter[Call] = Counter()
    most: Counter[Call] = Counter()
    for key, outcomes in possible.items():
        fitting = [o for o in outcomes if shown(o.row) == shown(actual[key])]
        if not fitting:
            raise Mismatch(_difference(key, outcomes, actual[key]))
        rows[key] = frozenset(o.row for o in fitting)
        bills = [Counter(o.calls) for o in fitting]
        low, high = bills[0].copy(), bills[0].copy()
        for bill in bills[1:]:
            low, high = low & bill, high | bill
        least, most = least + low, most + high
    return rows, Bill(least, most)


def shown(row: Row) -> dict[str, Value]:
    """What a reader of the table sees."""
    return {role: value for role, value in row.values if value is not None}


def _difference(key: int, outcomes: Outcomes, actual: Row) -> str:
    wanted = [dict(sorted(shown(o.row).items())) for o in outcomes]
    return f"row {key} is {dict(sorted(shown(actual).items()))}, but should be one of {wanted}"
