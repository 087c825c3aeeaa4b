"""What a refresh of a view will do: rows that come, rows that go, columns to compute."""

from __future__ import annotations

from dataclasses import dataclass

from geneva.render import html


@dataclass(frozen=True, slots=True)
class ColumnRefresh:
    """Rows of one group of the view's columns that get a new value."""

    name: str
    rows: int
    runs_udf: bool


@dataclass(frozen=True, slots=True)
class RefreshPlan:
    """Everything a refresh will do. The driver runs it, and printing it tells it."""

    view: str
    source: str
    from_version: int | None
    """The source version that the view equals now; None before its first refresh."""
    to_version: int
    rows_entering: int
    rows_leaving: int
    columns: tuple[ColumnRefresh, ...]
    up_to_date: bool
    notes: tuple[str, ...] = ()

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
        """Rows for which a UDF will be called, over all UDF columns."""
        return sum(column.rows for column in self.columns if column.runs_udf)

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
            lines.append(f"  rows       {self.rows_entering:,} enter, {self.rows_leaving:,} leave")
            lines.extend(
                f"  column     {column.name}: "
                + (f"run the UDF on {column.rows:,} rows" if column.runs_udf else "")
                + ("" if column.runs_udf else f"carry over {column.rows:,} rows")
                for column in self.columns
            )
        lines.extend(f"  note       {note}" for note in self.notes)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Show the plan in a notebook."""
        start = "nothing" if self.from_version is None else f"version {self.from_version}"
        pairs = (
            ("source", f"table {self.source!r}, from {start} to version {self.to_version}"),
            ("rows entering", f"{self.rows_entering:,}"),
            ("rows leaving", f"{self.rows_leaving:,}"),
            ("up to date", "yes" if self.is_empty else "no"),
        )
        columns = [
            (c.name, "run the UDF" if c.runs_udf else "carry over", f"{c.rows:,}")
            for c in self.columns
        ]
        return html.section(
            f"Refresh of view {self.view!r}",
            html.facts(pairs),
            html.grid(("column", "what", "rows"), columns) if columns and not self.is_empty else "",
            *map(html.note, self.notes),
        )
