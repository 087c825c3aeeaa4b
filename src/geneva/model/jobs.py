"""Where a job stands, and its numbers."""

from __future__ import annotations

import json
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from enum import StrEnum
from typing import Any

from geneva.errors import JobNotFoundError, UserInputError
from geneva.render.text import listed


class JobStatus(StrEnum):
    """Where a job stands."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @classmethod
    def _missing_(cls, value: object) -> JobStatus:
        """The status of a word in any case; other words are refused."""
        for status in cls:
            if str(value).upper() == status.value:
                return status
        known = listed([status.value for status in cls])
        raise UserInputError(f"{value!r} is no status. They are {known}.")

    @property
    def is_final(self) -> bool:
        """Whether nothing will change any more."""
        return self in (JobStatus.DONE, JobStatus.FAILED, JobStatus.CANCELLED)


def filled_by_job(table: str, column: str) -> str:
    """What a job fills, in a word: a column, or a view with all of its columns (`*`)."""
    return table if column == "*" else column


def whole_id(start: str, job_ids: Iterable[str]) -> str:
    """The id of a job by its first characters, where no other begins so."""
    found = [job_id for job_id in job_ids if start and job_id.startswith(start)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise JobNotFoundError(f"There is no job {start!r} in this database.")
    raise JobNotFoundError(
        f"{len(found)} jobs begin with {start!r}: give more of the id. They are "
        f"{', '.join(found[:5])}."
    )


def metric(metrics: Mapping[str, Any], name: str) -> float:
    """One of a job's numbers; 0 where it is missing or not known."""
    value = metrics.get(name)
    return value if isinstance(value, int | float) else 0


_ROWS = {
    "rows_checkpointed": "checkpointed",
    "rows_ready_for_commit": "ready_to_commit",
    "rows_committed": "committed",
    "udf_values_computed": "udf_rows",
}
_COUNTS = {
    "fragments": ("fragments_committed", "fragments"),
    "writer_fragments": ("fragments_committed", "fragments"),
    "plan_fragments": ("fragments", "fragments"),
    "tasks_completed": ("tasks", "tasks"),
    "workers": ("slots", "slots"),
    "cnt_geneva_workers_active": ("slots", "slots"),
}
_SECONDS = {
    "udf_processing_time": "udf_seconds",
    "batch_checkpointing_time": "checkpoint_seconds",
    "writer_write_time": "write_seconds",
}
_MILLISECONDS = {"read_io_time_ms": "read_seconds", "commit_time_ms": "commit_seconds"}
_NOT_HERE = (
    "cnt_geneva_workers_pending",
    "writer_queue_wait_time_ms",
    "commit_backoff_time_ms",
    "commit_concurrent_writer_retries",
)
"""Numbers of processes that this engine has none of: no writer apart, no queue of workers."""


class JobConfig(str):
    """What a job was asked for: JSON text, as programs for Geneva on Ray read it, and a mapping."""

    __slots__ = ("_values",)
    _values: dict[str, Any]

    def __new__(cls, values: Mapping[str, Any]) -> JobConfig:
        """Make both of the values."""
        self = super().__new__(cls, json.dumps(dict(values), default=str))
        self._values = dict(values)
        return self

    def __getitem__(self, key: Any) -> Any:
        """The value of a name; by a position or slice, a part of the text."""
        return self._values[key] if isinstance(key, str) else super().__getitem__(key)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a name, or the default."""
        return self._values.get(name, default)

    def keys(self) -> KeysView[str]:
        """The names."""
        return self._values.keys()

    def values(self) -> ValuesView[Any]:
        """The values."""
        return self._values.values()

    def items(self) -> ItemsView[str, Any]:
        """Names and values."""
        return self._values.items()

    def __contains__(self, name: object) -> bool:
        """Whether it has the name."""
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._values)

    def __eq__(self, other: object) -> bool:
        """Whether the values, or the texts, are the same."""
        return self._values == other if isinstance(other, Mapping) else str.__eq__(self, other)

    __hash__ = str.__hash__

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as its values."""
        return JobConfig, (self._values,)


class JobMetric(str):
    """One number of a job. It is its name, so that it is a key of the job's metrics, too.

    Programs for Geneva on Ray read `.name`, `.n`, `.total`, `.done` and `.desc`, or `["name"]`,
    `["count"]` and `["total"]`.
    """

    __slots__ = ("n", "total")
    n: float
    total: float

    def __new__(cls, name: str, n: float, total: float = 0) -> JobMetric:
        """Make a number known by its name; a timer has total 0."""
        self = super().__new__(cls, name)
        self.n, self.total = n, total
        return self

    @property
    def name(self) -> str:
        """The number's name."""
        return str.__str__(self)

    @property
    def desc(self) -> str:
        """The name, as people read it."""
        return self.name.replace("_", " ")

    @property
    def done(self) -> bool:
        """Whether it is all that it will be."""
        return self.n >= self.total

    def __getitem__(self, key: Any) -> Any:
        """One of its facts; by a position or slice, a part of its name."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        facts = {"name": self.name, "count": self.n, "n": self.n, "total": self.total}
        return {**facts, "done": self.done, "desc": self.desc}[key]


class JobMetrics(dict[str, Any]):
    """The numbers of a job by name; as a list, one `JobMetric` for each.

    Geneva's names for them are known as well: `metrics["rows_committed"]` is
    `metrics["committed"]`.
    """

    def __iter__(self) -> Iterator[JobMetric]:
        """The numbers, under Geneva's names first, then under these."""
        others = list(self._others())
        yield from others
        own = (name for name in self.keys() if name not in others)
        yield from (JobMetric(name, metric(self, name)) for name in own)

    def __getitem__(self, key: Any) -> Any:
        """A number by its name; by a position or slice, what a list of them has there."""
        if isinstance(key, int | slice):
            return list(self)[key]
        return super().__getitem__(key)

    def __missing__(self, name: str) -> Any:
        """A number under Geneva's name for it."""
        for other in self._others():
            if other == name:
                return other.n
        raise KeyError(name)

    def _others(self) -> Iterator[JobMetric]:
        total = metric(self, "total")
        for name, own in _ROWS.items():
            yield JobMetric(name, metric(self, own), total)
        for name, (done, whole) in _COUNTS.items():
            yield JobMetric(name, metric(self, done), metric(self, whole))
        for name, own in _SECONDS.items():
            yield JobMetric(name, metric(self, own))
        for name, own in _MILLISECONDS.items():
            yield JobMetric(name, metric(self, own) * 1000)
        yield from (JobMetric(name, 0) for name in _NOT_HERE)
        yield JobMetric("commit_conflict_retries", max(0, metric(self, "rounds") - 1))
