"""Trying a function on a few rows, in this process: what it gives, what it takes, what fails."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from geneva.errors import UDFError
from geneva.execution.apply.ahead import ASYNC_LIMIT
from geneva.execution.apply.batch import Applied, Applier
from geneva.execution.apply.failures import CellFailure
from geneva.execution.apply.limits import TaskUsage, seconds_per_call
from geneva.execution.worker.partition_queries import PartitionQueries
from geneva.execution.worker.surroundings import enter_function, trying_functions
from geneva.model.computation import PartitionRows, Source
from geneva.model.digests import Digests
from geneva.model.partitions import KEY_PREFIX, KeyedIds, first_partitions, key_words, row_keys
from geneva.model.rows import RowIds
from geneva.model.tables import Secrets, TableRef
from geneva.model.view_query import ViewQuery
from geneva.planning.estimates import Estimate, Measured
from geneva.planning.membership import choose_rows
from geneva.render import html
from geneva.render.plain import plain
from geneva.render.text import count, seconds, shorten, size
from geneva.render.values import scalar_text
from geneva.secret_values import redacted
from geneva.storage.lance.dataset import Dataset
from geneva.storage.lance.row_ids import NO_IDS, read_row_ids
from geneva.storage.lance.source_rows import MAX_NARROW_ROWS, SourceRows
from geneva.storage.views.definition import source_expression
from geneva.storage.views.partitions import ALL_ROWS, IndexedPartitions, partition_name
from geneva.udf.declare import UDF, UDFArgType
from geneva.udf.policy import Action, ErrorPolicy, Skip
from geneva.udf.table_function import UDTF
from geneva.udf.usage import metered

_MAX_CELL_CHARS = 60
_MAX_REASON_CHARS = 400


@dataclass(frozen=True, slots=True, eq=False)
class Preview:
    """What a function gave for some rows, and what that took."""

    udf: str
    table: str
    inputs: pa.RecordBatch
    """What the function was called with; of a table function, which partitions."""
    values: pa.Array
    """What it returned; NULL where it failed."""
    failures: tuple[CellFailure, ...]
    """The rows on which it failed, by their place."""
    row_seconds: tuple[float, ...]
    """What each row took; of a function of batches, its share."""
    setup_seconds: float
    memory_bytes: int
    """What this process has grown by, models included."""
    tokens: float
    cost: float
    """What the function reported by `geneva.report_usage`."""
    estimate: Estimate | None
    """For all rows of the table, or what `whole` says; None: no row was computed."""
    unit: str = "row"
    """What a call is for: a row, or a partition."""
    whole: str = "the table"
    """What the estimate is for: a table function that was tried with a clause saw no other rows."""

    @property
    def ok(self) -> bool:
        """Whether no row failed."""
        return not self.failures

    @property
    def seconds_per_row(self) -> float:
        """What a row took, on average."""
        return sum(self.row_seconds) / len(self.row_seconds) if self.row_seconds else 0.0

    def to_arrow(self) -> pa.Table:
        """The rows as a table: the inputs, and `value`, `error` and `seconds`."""
        names = [*self.inputs.schema.names, "value", "error", "seconds"]
        errors = pa.array(self._errors(), pa.string())
        columns = [*self.inputs.columns, self.values, errors, pa.array(self.row_seconds)]
        return pa.Table.from_arrays(columns, names)

    def _errors(self) -> list[str | None]:
        found: list[str | None] = [None] * self.inputs.num_rows
        for failure in self.failures:
            if failure.row is not None:
                found[failure.row] = f"{failure.exception_type}: {failure.message}"
        return found

    def _rows(self) -> tuple[list[str], list[list[str]]]:
        errors = self._errors()
        rows = [
            [
                *(scalar_text(column[row]) for column in self.inputs.columns),
                scalar_text(self.values[row]) if errors[row] is None else f"failed: {errors[row]}",
                seconds(self.row_seconds[row]),
            ]
            for row in range(self.inputs.num_rows)
        ]
        return [*self.inputs.schema.names, self.udf, "time"], rows

    def _facts(self) -> list[tuple[str, str]]:
        if not self.inputs.num_rows:
            return []
        facts = [
            (f"a {self.unit}", seconds(self.seconds_per_row)),
            ("memory", size(self.memory_bytes)),
        ]
        if self.setup_seconds >= 0.01:
            facts.insert(1, ("set-up", seconds(self.setup_seconds)))
        rows = self.inputs.num_rows
        for name, used in (("tokens", self.tokens), ("cost", self.cost)):
            if used and self.estimate is not None:
                whole = used / rows * self.estimate.rows
                facts.append(
                    (name, f"{used / rows:,.6g} a {self.unit}, {whole:,.6g} for {self.whole}")
                )
        if self.failures:
            facts.append(("failed", f"{len(self.failures)} of {count(rows, self.unit)}"))
            reasons = dict.fromkeys(f"{f.exception_type}: {f.message}" for f in self.failures)
            facts += [("because", shorten(text, _MAX_REASON_CHARS)) for text in [*reasons][:3]]
        if self.estimate is not None:
            facts.append((self.whole, str(self.estimate)))
        return facts

    def _title(self) -> str:
        tried = count(self.inputs.num_rows, self.unit)
        title = f"Function {self.udf!r} on {tried} of table {self.table!r}"
        return title if self.inputs.num_rows else f"{title}: there are none to try it on."

    def __str__(self) -> str:
        """Show the rows, and what they took."""
        if not self.inputs.num_rows:
            return self._title()
        headers, rows = self._rows()
        shown = [
            [shorten(plain(cell), _MAX_CELL_CHARS) for cell in row] for row in (headers, *rows)
        ]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in shown
        ]
        known = self._facts()
        width = max(10, *(len(name) for name, _ in known))
        facts = [f"  {name:{width}} {value}" for name, value in known]
        return "\n".join([self._title(), *(f"  {line}" for line in lines), *facts])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Show the same in a notebook."""
        return html.section(self._title(), html.grid(*self._rows()), html.facts(self._facts()))

    def to_record(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return {
            "udf": self.udf,
            "table": self.table,
            "rows": self.to_arrow().to_pylist(),
            "seconds_per_row": self.seconds_per_row,
            "setup_seconds": self.setup_seconds,
            "memory_bytes": self.memory_bytes,
            "tokens": self.tokens,
            "cost": self.cost,
            "estimated_seconds": self.estimate.seconds if self.estimate is not None else None,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A function, and what it is to be called with here."""

    udf: UDF
    inputs: pa.RecordBatch
    total: int
    """How many rows, or partitions, there are in all."""
    unit: str = "row"
    shown: pa.RecordBatch | None = None
    """What is shown of the inputs, where these are not."""
    queries: PartitionQueries | None = None
    """Makes what a table function is called with."""
    whole: str = "the table"
    """What there is in all."""


def partition_trial(udtf: UDTF, query: ViewQuery, ref: TableRef, dataset: Dataset, n: int) -> Trial:
    """The first `n` partitions of the rows of a query, whose columns are values and keys."""
    known = {c.name: source_expression(c, dataset.schema) for c in query.columns}
    version, keyed = int(dataset.version), query.keyed
    assert keyed is not None
    keys = SourceRows(ref, version, tuple((name, known[name]) for name in keyed.keys))
    ids = choose_rows(
        read_row_ids(dataset, query.where),
        shuffle_seed=query.seed,
        offset=query.offset,
        limit=query.limit,
    )
    if query.partition_index is not None:
        index = IndexedPartitions(dataset, ref.name, query.partition_index)
        high, low = index.keys(ids)
        rows, total = first_partitions([_keyed_ids(ids, high, low)], n)
        numbers = [int(index.keys(own[:1])[1][0]) for own in rows]
        common = pa.record_batch({"partition": pa.array(numbers, pa.int64())})
        names = [f"number {number}" for number in numbers]
    elif keyed.keys:
        rows, total = first_partitions(_by_key(keys, ids), n)
        common = keys.take(np.array([own[0] for own in rows], np.uint64))
        common = common.rename_columns([k.removeprefix(KEY_PREFIX) for k in keyed.keys])
        names = [partition_name(values) for values in common.to_pylist()]
    else:
        rows, total, names = [ids], 1, [ALL_ROWS]
        common = pa.record_batch({"partition": names})
    values = tuple((name, known[name]) for name in keyed.values)
    ends = np.cumsum([0, *map(len, rows)])
    lists = pa.LargeListArray.from_arrays(ends, np.concatenate([NO_IDS, *rows]))
    return Trial(
        udf=udtf.udf,
        inputs=pa.record_batch({"partition": pa.array(names, pa.string()), "rows": lists}),
        total=total,
        unit="partition",
        whole="the table" if query.where is None else f"rows with {query.where}",
        shown=common.append_column("rows", pa.array([len(own) for own in rows], pa.int64())),
        queries=PartitionQueries(PartitionRows(Source(ref, version, values)), uuid.uuid4().hex),
    )


def _by_key(keys: SourceRows, ids: RowIds) -> Iterator[KeyedIds]:
    """Rows with the keys of their partitions, some at a time."""
    at = 0
    for batch in keys.windows(ids, MAX_NARROW_ROWS):
        own = ids[at : at + batch.num_rows]
        at += batch.num_rows
        yield _keyed_ids(own, *key_words(row_keys(batch.columns, batch.num_rows)))


def _keyed_ids(ids: RowIds, high: Digests, low: Digests) -> KeyedIds:
    return KeyedIds(ids, high, low, np.zeros(len(ids), np.uint64))


def run_preview(
    trial: Trial,
    table: str,
    *,
    slots: int,
    env: Mapping[str, str],
    hidden: Sequence[Secrets] = (),
) -> Preview:
    """Call a function, here and now. Rows that fail are part of the result.

    `slots` is how many tasks a job would run at once, `hidden` what no failure may show.
    """
    with trying_functions(env):
        enter_function(trial.udf)
        shown = _tried(trial, table, slots)
    hide = partial(redacted, hidden=hidden)
    failures = tuple(failure.without_secrets(hide) for failure in shown.failures)
    return dataclasses.replace(shown, failures=failures)


def _tried(trial: Trial, table: str, slots: int) -> Preview:
    # Each row is tried once: what a policy would make of a failure is not the question.
    udf, inputs = trial.udf, trial.inputs
    policy = _SkipAll((Skip(),))
    tried = dataclasses.replace(udf, on_error=policy)
    usage, before = TaskUsage(), _memory()
    output = pa.field(udf.name, udf.data_type)
    parts: list[Applied] = []
    taken: list[float] = []
    with metered(usage), Applier(tried, output, threads=1, queries=trial.queries) as applier:
        started = time.perf_counter()
        failed = _set_up(applier, inputs)
        setup_seconds = time.perf_counter() - started
        for batch in _batches(udf, inputs) if failed is None else ():
            policy.errors.clear()
            started = time.perf_counter()
            parts.append(_whole_or_failed(applier.run(batch), policy.errors))
            share = (time.perf_counter() - started) / batch.num_rows
            taken += [share] * batch.num_rows
        memory = max(0, _memory() - before)
    at_once = ASYNC_LIMIT if udf.is_async else 1
    if failed is not None:
        parts, taken = [_all_failed(udf, inputs, failed)], [0.0] * inputs.num_rows
    mean = sum(taken) / len(taken) / at_once if taken else 0.0
    allowed = seconds_per_call(udf.rate_limit, usage.tokens / len(taken)) if taken else 0.0
    by = Measured(mean, f"a preview of {count(len(taken), trial.unit)}", allowed)
    has_estimate = bool(taken) and failed is None
    return Preview(
        udf=udf.name,
        table=table,
        inputs=inputs if trial.shown is None else trial.shown,
        values=pa.concat_arrays([a for part in parts for a in part.arrays] or [_none(udf)]),
        failures=_failures(parts),
        row_seconds=tuple(taken),
        setup_seconds=setup_seconds,
        memory_bytes=memory,
        tokens=usage.tokens,
        cost=usage.cost,
        estimate=Estimate(by, trial.total, slots, trial.unit) if has_estimate else None,
        unit=trial.unit,
        whole=trial.whole,
    )


@dataclass(frozen=True)
class _SkipAll(ErrorPolicy):
    """Skips what fails, and keeps what was raised of a batch and of its parts."""

    errors: list[BaseException] = dataclasses.field(default_factory=list)

    def decide(
        self, error: BaseException, attempt: int, *, again: bool = True
    ) -> tuple[Action, float]:
        """Keep the error."""
        self.errors.append(error)
        return super().decide(error, attempt, again=again)


def _whole_or_failed(applied: Applied, errors: list[BaseException]) -> Applied:
    """What came of a batch. Where each row goes well and all together don't, all have failed."""
    if not errors or applied.failures:
        return applied
    (values,) = applied.arrays
    rows = len(values)
    message = f"{errors[0]} (each row by itself goes well)"
    kind = type(errors[0]).__name__
    failed = tuple(CellFailure(row, kind, message) for row in range(rows))
    return Applied((pa.nulls(rows, values.type),), failed)


def _set_up(applier: Applier, inputs: pa.RecordBatch) -> UDFError | None:
    try:
        applier.warm(inputs)
    except UDFError as error:
        return error
    return None


def _batches(udf: UDF, inputs: pa.RecordBatch) -> list[pa.RecordBatch]:
    """Row by row, so that each has a time of its own; all at once where the function wants that."""
    if not inputs.num_rows:
        return []
    if udf.arg_type not in (UDFArgType.SCALAR, UDFArgType.QUERY):
        return [inputs]
    return [inputs.slice(row, 1) for row in range(inputs.num_rows)]


def _all_failed(udf: UDF, inputs: pa.RecordBatch, error: UDFError) -> Applied:
    failure: CellFailure = getattr(error, "failure", CellFailure(None, type(error).__name__, ""))
    failures = [dataclasses.replace(failure, row=row) for row in range(inputs.num_rows)]
    return Applied((pa.nulls(inputs.num_rows, udf.data_type),), tuple(failures))


def _failures(parts: Sequence[Applied]) -> tuple[CellFailure, ...]:
    found, at = [], 0
    for part in parts:
        found += [
            dataclasses.replace(f, row=at + f.row) for f in part.failures if f.row is not None
        ]
        at += len(part.arrays[0])
    return tuple(found)


def _none(udf: UDF) -> pa.Array:
    return pa.array([], udf.data_type)


def _memory() -> int:
    """The memory of this process in bytes: now, or where that is not told, at most so far."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
