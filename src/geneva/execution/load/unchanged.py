"""Fragments in which a load would change nothing: they keep their files.

A source that has grown is another one, and says nothing about rows that it had before. So these are
looked up and compared, and only where a value differs the fragment gets a new file. What is
computed from its columns, and views of them, then have nothing to look at either.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import pyarrow as pa

from geneva.errors import UnmatchedKeyError
from geneva.execution.backfill.prepare import PreparedBackfill
from geneva.execution.load.source import StagingJob
from geneva.execution.worker.program import live_program
from geneva.execution.worker.task import ColumnWork
from geneva.planning.backfill import Action
from geneva.storage.checkpoints.staging import open_checkpoints
from geneva.storage.columns.provenance import output_file, signature_of
from geneva.storage.lance.dataset import Dataset, open_pinned
from geneva.storage.lance.fragments import rows_of_types
from geneva.storage.lance.values import equal_rows

_BATCH_ROWS = 65_536
_WIDE_BATCH_ROWS = 4_096
_ITEMS_PER_SLOT = 4


@dataclass(frozen=True, slots=True)
class FragmentsToCompare:
    """Fragments whose values are compared with those of a source."""

    work: ColumnWork
    fragments: tuple[int, ...]


def find_unchanged(item: FragmentsToCompare) -> str:
    """Say in which fragments no value would change, and how many of their rows have no match.

    This is shipped to workers.
    """
    dataset = open_pinned(item.work.ref, item.work.version, item.work.job_id)
    found = {
        fragment: _unmatched_if_same(item.work, dataset, fragment) for fragment in item.fragments
    }
    return json.dumps([[i, unmatched] for i, unmatched in found.items() if unmatched is not None])


def _unmatched_if_same(work: ColumnWork, dataset: Dataset, fragment: int) -> int | None:
    """The rows whose key is not in the source; None: values of the fragment would change."""
    computation, program = work.computation, live_program(work)
    outputs = [output.name for output in computation.outputs]
    names = list(dict.fromkeys([*computation.input_paths, *outputs]))
    kinds = [dataset.schema.field(name).type for name in names]
    scanner = dataset.scanner(
        columns=names,
        fragments=[dataset.get_fragment(fragment)],
        batch_size=rows_of_types(kinds, _BATCH_ROWS) or _WIDE_BATCH_ROWS,
    )
    unmatched = 0
    for batch in scanner.to_batches():
        try:
            applied = program.run(batch.select(list(computation.read_paths)))
        except UnmatchedKeyError:
            return None  # a row that came since: the load itself says so
        pairs = zip(outputs, applied.arrays, strict=True)
        if not all(equal_rows(batch.column(name), new).all() for name, new in pairs):
            return None
        unmatched += applied.unmatched
    return unmatched


def unchanged_fragments(
    prepared: PreparedBackfill, job: StagingJob, job_id: str
) -> Mapping[int, int]:
    """The fragments of a plan that have what the source has; the others get new files.

    With how many of their rows have a key that is not in the source.
    """
    found = [
        plan.fragment_id
        for plan in prepared.plan.fragments
        if plan.action is Action.COMPUTE
        and not plan.covered
        and output_file(prepared.computation, prepared.facts[plan.fragment_id]) is not None
    ]
    shares = min(len(found), _ITEMS_PER_SLOT * job.runner.slots)
    work = prepared.column_work(job_id, None)
    items = [FragmentsToCompare(work, tuple(found[i::shares])) for i in range(shares)]
    texts = job.run(find_unchanged, items)
    return dict(pair for text in texts for pair in json.loads(text))


# ------------------------------------------------------------------- remembered for the same load


def record_unchanged(prepared: PreparedBackfill, fragments: Collection[int]) -> None:
    """Note fragments that were looked at, for the next load from the same source."""
    store, key = open_checkpoints(prepared.ref), _key(prepared)
    if fragments:
        store[key] = pa.record_batch(
            [pa.array([_facts(prepared, i) for i in sorted(fragments)])], ["facts"]
        )
    else:
        store.discard([key])


def recorded_unchanged(prepared: PreparedBackfill) -> frozenset[int]:
    """Those of a plan's fragments that were looked at before, and are as they were."""
    try:
        known = set(open_checkpoints(prepared.ref)[_key(prepared)].column(0).to_pylist())
    except KeyError:
        return frozenset()
    planned = (plan.fragment_id for plan in prepared.plan.fragments)
    return frozenset(i for i in planned if _facts(prepared, i) in known)


def _key(prepared: PreparedBackfill) -> str:
    """One record for the same columns, whatever they were loaded from last."""
    return f"loaded-{prepared.computation.id[:32]}"


def _facts(prepared: PreparedBackfill, fragment_id: int) -> str:
    """What has to be the same: the source, the files of keys and values, the rows."""
    computation, fragment = prepared.computation, prepared.facts[fragment_id]
    return json.dumps(
        [
            computation.version,
            fragment_id,
            output_file(computation, fragment),
            signature_of(computation, fragment),
            fragment.deletions,
        ]
    )
