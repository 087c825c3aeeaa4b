"""What was asked of a backfill or refresh, after checking."""

from __future__ import annotations

from dataclasses import dataclass, field

from geneva.model.tables import Sizes, Unproven, Upstream


@dataclass(frozen=True, slots=True)
class BackfillRequest:
    """What was asked for, after checking."""

    where: str | None = None
    only_stale: bool = False
    """Of the rows that `where` selects, only those that are not right."""
    concurrency: int | None = None
    threads: int = 1
    sizes: Sizes = field(default_factory=Sizes)
    commit_granularity: int = 64
    num_frags: int | None = None
    only_fragments: frozenset[int] | None = None
    """Leave all others alone; None: none is left out."""
    read_version: int | None = None
    flush_seconds: float | None = None
    shuffle_diversity: int | None = None
    timeout_seconds: float | None = None
    retry_failed: bool = False
    unproven: Unproven | None = None
    """What to do with values from before receipts; None: see `_computes_unproven`."""
    upstream: Upstream = Upstream.COMPUTE

    @property
    def follows_table(self) -> bool:
        """Whether the job goes on with what others change meanwhile: not when it was bounded."""
        return self.read_version is None and self.num_frags is None

    @property
    def work_where(self) -> str | None:
        """The clause as it identifies the work: to try failed rows again is another work."""
        return f"{self.where or ''}\n(failed rows)" if self.retry_failed else self.where

    @property
    def selects_rows(self) -> bool:
        """Whether rows are computed because they were asked for, right or not."""
        return self.where is not None and not self.only_stale
