"""Fragments of a view's source that can't be read: which they are, and which rows are in them.

Nothing is looked for in advance: only when something could not be read is it found out where. Rows
of such fragments stay in the view as they were, and all others are refreshed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from geneva.errors import UnreadableFragmentsError
from geneva.model.addresses import fragments_of
from geneva.model.rows import RowIds, RowRange
from geneva.model.tables import TableRef
from geneva.render.text import count
from geneva.storage.lance.damage import Damaged, reading
from geneva.storage.lance.dataset import Dataset, field_ids_of, fragment_facts, open_dataset
from geneva.storage.lance.fragments import read_windows, size_of_inputs, window_rows
from geneva.storage.lance.row_ids import NO_IDS, scan_ids
from geneva.storage.views.definition import read_source_ids

_MAX_NAMED = 5


@dataclass(frozen=True, slots=True, eq=False)
class Damage:
    """Fragments of a source, at one version, that can't be read."""

    fragments: Mapping[int, str] = field(default_factory=dict)
    """Each with its files and the reason."""
    rows: RowIds = field(default_factory=NO_IDS.copy)
    """The ids of their live rows."""

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.fragments)

    def plus(self, source: Dataset, found: Mapping[int, str]) -> Damage:
        """Add fragments of the same version."""
        fragments = {**self.fragments, **found}
        return Damage(fragments, scan_ids(source, None, list(fragments)))

    def named(self) -> str:
        """The fragments, in words."""
        listed = [f"fragment {i}: {why}" for i, why in list(self.fragments.items())[:_MAX_NAMED]]
        more = len(self.fragments) - _MAX_NAMED
        return "; ".join(listed) + (f"; and {more:,} more" if more > 0 else "")

    def note(self, source: str) -> str:
        """A remark for the plan."""
        return (
            f"{count(len(self.fragments), 'fragment')} of table {source!r} can't be read "
            f"({self.named()}): rows of the view that are made from there stay as they are"
        )

    def error(self, view: str, source: str, version: int) -> UnreadableFragmentsError:
        """What a refresh ends with that has done all the rest."""
        return UnreadableFragmentsError(
            f"{count(len(self.fragments), 'fragment')} of table {source!r} at version {version}, "
            f"which view {view!r} is made from, can't be read ({self.named()}). All other rows of "
            "the view are refreshed and committed; those that are made from there are as they "
            "were, and the view does not count as refreshed. Restore the files, or delete the "
            "rows, and refresh again.",
            tuple(self.fragments),
            source,
        )


def find_damage(
    source: Dataset, paths: Collection[str], fragments: Iterable[int] | None = None
) -> dict[int, str]:
    """The fragments, among some or all, in which columns can't be read, with files and reason."""
    found: dict[int, str] = {}
    fields = [i for path in paths for i in field_ids_of(source)[path]]
    wanted = None if fragments is None else frozenset(fragments)
    for fragment in source.get_fragments() if paths else ():
        if wanted is not None and fragment.fragment_id not in wanted:
            continue
        facts = fragment_facts(fragment.metadata)
        every = RowRange(0, facts.physical_rows)
        sizes = size_of_inputs(facts, fields)
        window = window_rows(source.schema, list(paths), sizes, facts.physical_rows)
        try:
            for _ in reading(read_windows(source, facts.id, list(paths), every, window)):
                pass
        except Damaged as damage:
            files = ", ".join(file.path for file in facts.files_of(fields)[:_MAX_NAMED])
            found[facts.id] = f"{files}: {damage}"
    return found


def source_fragments_of(
    source: Dataset, view: TableRef, view_fragments: Collection[int]
) -> list[int]:
    """The fragments of the source that rows of some fragments of the view are made from."""
    rows = read_source_ids(open_dataset(view))
    parts = [r.live_ids() for r in rows if r.fragment_id in view_fragments]
    wanted = np.sort(np.concatenate([NO_IDS, *parts]))
    places = source.scanner(columns=[], with_row_id=True, with_row_address=True)
    found: set[int] = set()
    for batch in places.to_batches():
        ids, addresses = (batch.column(n).to_numpy() for n in ("_rowid", "_rowaddr"))
        found.update(np.unique(fragments_of(addresses[np.isin(ids, wanted)])).tolist())
    return sorted(found)
