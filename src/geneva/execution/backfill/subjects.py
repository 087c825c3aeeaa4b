"""What is computed in which table, at any version: a column, or columns of a view."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from geneva.errors import ColumnChangedError
from geneva.model.computation import Computation
from geneva.model.tables import ColumnDefinition, TableRef
from geneva.storage.columns.definitions import (
    columns_of,
    computation_of,
    present_column,
    unsure_input,
    with_present_inputs,
)
from geneva.storage.columns.doubts import settled
from geneva.storage.columns.publish import verify_column
from geneva.storage.columns.validity import Validity
from geneva.storage.lance.dataset import Dataset, FragmentFacts, TableSnapshot

SourceCheck: TypeAlias = Callable[[FragmentFacts, Validity], Validity]
"""Takes back what changes of a source made stale, or what only receipts can prove."""


class Subject(Protocol):
    """What is computed in which table, at whatever version."""

    @property
    def ref(self) -> TableRef:
        """The table that is filled."""

    def bind(self, dataset: Dataset, snapshot: TableSnapshot) -> Computation:
        """The computation at one version; ColumnChangedError when it is another one by now."""

    def source_check(self, dataset: Dataset, computation: Computation) -> SourceCheck | None:
        """What checks whether inputs in another table changed; None: inputs are in this one."""


@dataclass(frozen=True, slots=True)
class ColumnSubject:
    """A column that is computed from columns of its own table."""

    ref: TableRef
    definition: ColumnDefinition

    def bind(self, dataset: Dataset, snapshot: TableSnapshot) -> Computation:
        """The column, as it and its inputs are called now. In doubt, receipts are read."""
        name = present_column(snapshot.schema, self.definition.uuid, self.definition.name)
        if name is None:
            raise self._dropped(snapshot)
        present = with_present_inputs(replace(self.definition, name=name), snapshot.fields)
        present = settled(dataset, snapshot, present)
        if present.doubt is not None:
            raise unsure_input(self.ref.name, self.definition, present.doubt)
        missing = [path for path in present.inputs if path not in snapshot.field_ids]
        if missing:
            raise ColumnChangedError(
                f"Column {missing[0]!r} of table {self.ref.name!r}, which "
                f"{self.definition.name!r} is computed from, was dropped meanwhile. What was "
                "computed is kept. Point the UDF at another column with alter_columns."
            )
        computation = computation_of(snapshot, present)
        verify_column(snapshot.schema, self.ref, computation)
        return computation

    def _dropped(self, snapshot: TableSnapshot) -> ColumnChangedError:
        definition, kept = self.definition, ""
        others = columns_of(snapshot.schema, definition) if definition.group else ()
        if others:
            named = ", ".join(map(repr, others))
            kept = (
                f" What was computed is kept: backfill({others[0]!r}) takes over what the same "
                f"calls have made for {named}."
            )
        return ColumnChangedError(
            f"Column {definition.name!r} of table {self.ref.name!r} was dropped meanwhile.{kept}"
        )

    def source_check(self, dataset: Dataset, computation: Computation) -> SourceCheck | None:
        """There is no source."""
        return None
