"""What a refresh of a view will do: rows that come, rows that go, columns to compute."""

from __future__ import annotations

from dataclasses import dataclass

from geneva.planning.backfill import BackfillPlan
from geneva.render import html
from geneva.render.plain import plain
from geneva.render.text import count


@dataclass(frozen=True, slots=True)
class ColumnRefresh:
    """The backfill of one group of the view's columns."""

    plan: BackfillPlan
    """What runs, on the view as it will be when its rows have come and gone."""
    runs_udf: bool

    @property
    def name(self) -> str:
        """The UDF's column, or a name for all columns that are carried over."""
        return self.plan.column

    @property
    def shown(self) -> str:
        """The same by a name that users know."""
        return self.plan.shown.name if self.runs_udf else "those of the source"

    @property
    def rows(self) -> int:
        """Rows that get a new value."""
        return self.plan.rows_to_compute

    @property
    def action(self) -> str:
        """What is done, in a few words."""
        if not self.runs_udf:
            return f"carry over {count(self.rows, 'row')}"
        reused = self.plan.rows_reused
        earlier = f", take {reused:,} from an earlier run" if reused else ""
        return f"run the UDF on {count(self.plan.rows_to_run, 'row')}{earlier}"


@dataclass(frozen=True, slots=True)
class PartitionCounts:
    """Partitions of a table function; None where much would have to be read to know."""

    total: int | None = None
    to_compute: int | None = None
    leaving: int | None = None

    def __str__(self) -> str:
        """Return the numbers as text."""
        if self.to_compute is None or self.total is None or self.leaving is None:
            return "those that the rows above are in, or were; known once they are read"
        gone = f", {self.leaving:,} leave" if self.leaving else ""
        return f"run the table function on {self.to_compute:,} of {self.total:,}{gone}"


@dataclass(frozen=True, slots=True)
class RefreshPlan:
    """Everything a refresh will do: the rows, and the backfill plans that run after them."""

    view: str
    source: str
    from_version: int | None
    """The source version that the view equals now; None before its first refresh."""
    to_version: int
    rows_entering: int
    """Rows that come; at the first refresh all that the view will have."""
    rows_leaving: int
    columns: tuple[ColumnRefresh, ...]
    up_to_date: bool
    notes: tuple[str, ...] = ()
    partitions: PartitionCounts | None = None
    """Of a view of a table function, what it is called for."""

    @property
    def is_empty(self) -> bool:
        """Whether the view equals its definition at the wanted version already."""
        return self.up_to_date

    @property
    def rows_to_compute(self) -> int:
        """Values to compute or to carry over, over all groups of columns."""
        return sum(column.rows for column in self.columns)

    @property
    def rows_to_run(self) -> int:
        """Rows for which a UDF will be called, over all UDF columns; of partitions, how many."""
        if self.partitions is not None and self.partitions.to_compute is not None:
            return self.partitions.to_compute
        return sum(column.plan.rows_to_run for column in self.columns if column.runs_udf)

    @property
    def _shown(self) -> tuple[ColumnRefresh, ...]:
        """The columns that say what will be done: partitions speak for themselves."""
        return self.columns if self.partitions is None else ()

    def __repr__(self) -> str:
        """Show at a glance what there is to do; as text it says all."""
        return (
            f"RefreshPlan({self.view!r}, from_version={self.from_version}, "
            f"to_version={self.to_version}, rows_entering={self.rows_entering}, "
            f"rows_leaving={self.rows_leaving}, rows_to_run={self.rows_to_run})"
        )

    def __str__(self) -> str:
        """Return the plan as text."""
        start = "nothing" if self.from_version is None else f"version {self.from_version}"
        lines = [
            f"Refresh of view {self.view!r} from {start} to version {self.to_version} "
            f"of table {self.source!r}"
        ]
        if self.is_empty:
            lines.append("  nothing to do: the view is up to date")
        else:
            # Of nothing no row leaves: those are placeholders that are laid out anew.
            leave = "" if self.from_version is None else f", {self.rows_leaving:,} leave"
            lines.append(f"  rows       {self.rows_entering:,} enter{leave}")
            lines.extend(f"  column     {plain(c.shown)}: {c.action}" for c in self._shown)
            if self.partitions is not None:
                lines.append(f"  partitions {self.partitions}")
        lines.extend(f"  note       {plain(note)}" for note in self.notes)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Show the plan in a notebook."""
        start = "nothing" if self.from_version is None else f"version {self.from_version}"
        pairs = (
            ("source", f"table {self.source!r}, from {start} to version {self.to_version}"),
            ("rows entering", f"{self.rows_entering:,}"),
            ("rows leaving", None if self.from_version is None else f"{self.rows_leaving:,}"),
            ("up to date", "yes" if self.is_empty else "no"),
        )
        columns = [(c.shown, c.action) for c in self._shown]
        if self.partitions is not None:
            columns.append(("partitions", str(self.partitions)))
        return html.section(
            f"Refresh of view {self.view!r}",
            html.facts(pairs),
            html.grid(("column", "what"), columns) if columns and not self.is_empty else "",
            *map(html.note, self.notes),
        )
