"""What is known of a computation's values: which are right, and what the others are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import reduce
from typing import Any

from geneva.model.rows import RowSet
from geneva.model.tables import Reason


class ValueState(StrEnum):
    """What is known of the value of a row. Rows in none of these states have no value yet."""

    RIGHT = "right"
    """Made by this version of the function from the present inputs."""
    WITHOUT_RECEIPT = "without receipt"
    """Right as well, but there is no receipt that says so."""
    UNDECIDED = "undecided"
    """Files and history say nothing about it."""
    FAILED = "failed"
    """This version of the function failed on the row, given the present inputs."""
    FAILED_BEFORE = "failed before"
    """The function failed on the row when it, or the row's inputs, were others."""
    SUPPLIED = "supplied"
    """A person wrote it, and no receipt is for it."""
    UNPROVEN = "unproven"
    """It is from before the column had receipts."""
    STALE = "stale"
    """Its receipt is of other inputs, or of another version of the function."""
    EMPTIED = "emptied"
    """It was computed, and somebody wrote NULL in its place: to be computed, like a new row."""
    UNREADABLE = "unreadable"
    """Its inputs can't be read, so that nobody knows: it stays as it is."""


@dataclass(frozen=True, slots=True)
class Validity:
    """What is known of a computation's values in one fragment."""

    size: int
    """Physical rows of the fragment."""
    reason: Reason
    """Why those that are not right are not."""
    rows: Mapping[ValueState, RowSet] = field(default_factory=dict)
    """The rows in each state; a row is in one state at most."""
    made_from: frozenset[str] = frozenset()
    """The versions of a source, as file names have them, that right values were computed from."""
    checked_rows: int = 0
    """Rows whose receipts were read."""

    @classmethod
    def unknown(cls, size: int) -> Validity:
        """Nothing can be said without reading the rows."""
        return cls(size, Reason.PARTIAL, {ValueState.UNDECIDED: RowSet.full(size)})

    def rows_in(self, state: ValueState) -> RowSet:
        """The rows in a state."""
        return self.rows.get(state) or RowSet.empty(self.size)

    @property
    def right(self) -> RowSet:
        """Rows with a right value, whether they have a receipt or not."""
        right = self.rows_in(ValueState.RIGHT)
        return right if right.is_full else right.union(self.without_receipt)

    @property
    def without_receipt(self) -> RowSet:
        """Rows with a right value that have no receipt yet."""
        return self.rows_in(ValueState.WITHOUT_RECEIPT)

    @property
    def undecided(self) -> RowSet:
        """Rows that files and history say nothing about."""
        return self.rows_in(ValueState.UNDECIDED)

    @property
    def failed(self) -> RowSet:
        """Rows on which this version of the function failed, given the present inputs."""
        return self.rows_in(ValueState.FAILED)

    @property
    def failed_before(self) -> RowSet:
        """Rows on which the function failed when it, or their inputs, were others."""
        return self.rows_in(ValueState.FAILED_BEFORE)

    @property
    def supplied(self) -> RowSet:
        """Rows whose value a person wrote, and which no receipt is for."""
        return self.rows_in(ValueState.SUPPLIED)

    @property
    def unproven(self) -> RowSet:
        """Rows with a value from before the column had receipts."""
        return self.rows_in(ValueState.UNPROVEN)

    @property
    def stale(self) -> RowSet:
        """Rows whose receipt is of other inputs, or of another version of the function."""
        return self.rows_in(ValueState.STALE)

    @property
    def published(self) -> RowSet:
        """Rows whose receipt is of a result that was given to them, also if it is gone since."""
        return self.right.union(self.rows_in(ValueState.EMPTIED))

    def to_text(self) -> str:
        """What a worker sends back."""
        rows = {state.value: rows.encode() for state, rows in self.rows.items()}
        about = {"size": self.size, "reason": self.reason.value, "checked": self.checked_rows}
        return json.dumps({**about, "rows": rows})

    @classmethod
    def from_text(cls, text: str) -> Validity:
        """What `to_text` wrote."""
        record: dict[str, Any] = json.loads(text)
        rows = {ValueState(state): RowSet.decode(rows) for state, rows in record["rows"].items()}
        reason = Reason(record["reason"])
        return cls(record["size"], reason, rows, checked_rows=record["checked"])

    def without(self, changed: RowSet) -> Validity:
        """The same after inputs of some rows changed."""
        if not changed:
            return self
        affected = (ValueState.RIGHT, ValueState.WITHOUT_RECEIPT, ValueState.FAILED)
        rows = {s: rows.minus(changed) if s in affected else rows for s, rows in self.rows.items()}
        return replace(self, reason=Reason.INPUT_CHANGED, rows=rows)

    def without_inputs(self, lost: RowSet) -> Validity:
        """The same where the inputs of some rows can't be read: what is proven stays so."""
        lost = lost.minus(self.right).minus(self.failed)
        if not lost:
            return self
        rows = {state: rows.minus(lost) for state, rows in self.rows.items()}
        return replace(self, rows={**rows, ValueState.UNREADABLE: lost})

    def joined(self, checked: Validity) -> Validity:
        """Add what a check of the undecided rows has shown."""
        reason = self.reason if checked.reason is Reason.UP_TO_DATE else checked.reason
        rows = {s: self.rows_in(s).union(checked.rows_in(s)) for s in ValueState}
        rows[ValueState.UNDECIDED] = checked.undecided
        return replace(
            self,
            reason=reason,
            rows=rows,
            checked_rows=self.checked_rows + checked.checked_rows,
        )


def joint_validity(outputs: Sequence[Validity]) -> Validity:
    """What is known of rows of a computation as a whole: right is a row whose outputs all are."""
    if len(outputs) == 1:
        return outputs[0]

    def in_all(state: ValueState) -> RowSet:
        return reduce(RowSet.intersect, [output.rows_in(state) for output in outputs])

    def in_any(state: ValueState) -> RowSet:
        return reduce(RowSet.union, [output.rows_in(state) for output in outputs])

    right = reduce(RowSet.intersect, [output.right for output in outputs])
    without = in_all(ValueState.WITHOUT_RECEIPT)
    reasons = [o.reason for o in outputs if o.reason is not Reason.UP_TO_DATE]
    return Validity(
        size=outputs[0].size,
        reason=reasons[0] if reasons else Reason.UP_TO_DATE,
        rows={
            ValueState.RIGHT: right.minus(without),
            ValueState.WITHOUT_RECEIPT: without,
            ValueState.FAILED: in_all(ValueState.FAILED),
            ValueState.UNPROVEN: in_any(ValueState.UNPROVEN).minus(right),
            # The result was given to the row, also where just one output of it is gone since.
            ValueState.EMPTIED: in_any(ValueState.EMPTIED),
        },
        checked_rows=max(output.checked_rows for output in outputs),
    )
