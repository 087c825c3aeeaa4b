"""What a backfill is to do: the user's options, and the limits that the engine sets itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from geneva.options import JobOptions


@dataclass(frozen=True, slots=True)
class BackfillRequest:
    """The options of a backfill or refresh, within limits."""

    options: JobOptions = field(default_factory=JobOptions)
    only_stale: bool = False
    """Of the rows that `where` selects, only those that are not right."""
    only_fragments: frozenset[int] | None = None
    """Leave all other fragments alone; None: none is left out."""
    done_files: frozenset[str] = frozenset()
    """Data files of jobs of the same work that this one followed: what they did counts as done."""

    @property
    def follows_table(self) -> bool:
        """Whether the job goes on with what others change meanwhile: not when it was bounded."""
        return self.options.read_version is None and self.options.num_frags is None

    @property
    def work_where(self) -> str | None:
        """The clause as it identifies the work: to try failed rows again is another work."""
        where = self.options.where
        return f"{where or ''}\n(failed rows)" if self.options.retry_failed else where

    @property
    def selects_rows(self) -> bool:
        """Whether rows are computed because they were asked for, right or not."""
        return self.options.where is not None and not self.only_stale

    @property
    def asks_for_rows(self) -> bool:
        """Whether rows are to be called for anew: by a clause, or because they failed."""
        return self.selects_rows or self.options.retry_failed
