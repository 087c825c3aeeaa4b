"""Compaction: Lance's own, except that what could not be read afterwards is left as it is.

Lance puts the dictionaries of fragments that it merges into one, and does not find all equal
values. Where that has more values than 8- or 16-bit indices can count, format 2.0 refuses, and
later ones write a file that nobody can read. So each merged fragment of such a table is read back
before it is committed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lance.optimize import Compaction

from geneva.compatibility import warn_user
from geneva.errors import TableChangedError
from geneva.model.sql import check_readable
from geneva.model.tables import TableRef
from geneva.render.text import count
from geneva.storage.columns.dictionaries import narrow_dictionaries
from geneva.storage.columns.staged_files import drop_staged, read_columns
from geneva.storage.lance.commit import Result, retry_conflicts
from geneva.storage.lance.damage import Damaged, damage_reason, is_damage, reading
from geneva.storage.lance.dataset import open_dataset

_MAX_RETRIES = 10


def compact(ref: TableRef, *args: Any, **options: Any) -> Any:
    """Merge small fragments of a table; warn of those that have to stay as they are."""
    narrow = narrow_dictionaries(open_dataset(ref).schema)
    if args or not narrow:
        return retried(ref, lambda: open_dataset(ref).optimize.compact_files(*args, **options))
    metrics, left_out = retried(ref, lambda: _merged_readable(ref, narrow, options))
    if left_out:
        warn_user(_left_out(ref, narrow, left_out))
    return metrics


def retried(ref: TableRef, attempt: Callable[[], Result]) -> Result:
    """Compact, or index: again where a commit of others, say of a job, got in between."""
    exhausted = TableChangedError(
        f"Table {ref.name!r} could not be optimized, because other writers kept getting in "
        "between. Try again when it is calmer."
    )
    try:
        return retry_conflicts(attempt, _MAX_RETRIES, exhausted)
    except (OSError, ValueError) as error:
        schema = open_dataset(ref).schema
        check_readable((name for name in schema.names if name in str(error)), schema)
        raise


def _merged_readable(ref: TableRef, narrow: list[str], options: dict[str, Any]) -> tuple[Any, int]:
    """Merge fragments that can be read afterwards; say how many others there are."""
    dataset = open_dataset(ref)
    merged, left_out = [], 0
    for task in Compaction.plan(dataset, options).tasks:
        try:
            result = task.execute(dataset)
        except BaseException as error:
            if not (is_damage(error) and "dictionary" in damage_reason(error).lower()):
                raise
            result = None
        new = result.new_fragments if result is not None else []
        if result is not None and all(_is_readable(ref, fragment, narrow) for fragment in new):
            merged.append(result)
            continue
        left_out += len(task.fragments)
        drop_staged(ref, *(file.path for fragment in new for file in fragment.files))
    return Compaction.commit(dataset, merged), left_out


def merges_narrow_dictionaries(ref: TableRef) -> bool:
    """Whether a compaction by Lance alone could make the table unreadable."""
    return bool(narrow_dictionaries(open_dataset(ref).schema))


def index_new_rows(ref: TableRef, *, retrain: bool) -> None:
    """Bring the indexes of a table up to date, as LanceDB's `optimize` does after compacting."""
    retried(ref, lambda: open_dataset(ref).optimize.optimize_indices(retrain=retrain))


def _is_readable(ref: TableRef, fragment: Any, columns: list[str]) -> bool:
    """Whether columns of a fragment that isn't in the table yet can be read, in one piece."""
    try:
        for file in fragment.files:
            for _ in reading(read_columns(ref, file.path, columns, max(fragment.physical_rows, 1))):
                pass
    except Damaged:
        return False
    return True


def _left_out(ref: TableRef, columns: list[str], fragments: int) -> str:
    return (
        f"{count(fragments, 'fragment')} of table {ref.name!r} could not be merged: Lance would "
        f"put the dictionaries of {', '.join(map(repr, columns))} one behind the other, beyond "
        "what their indices can count, and the table could not be read any more. Use a "
        "dictionary with int32 indices, or none."
    )
