"""Whether a view is what its definition says, and who is at work on it.

The last thing that a refresh writes is that it ended. The first is that it began, and to which
version of the source: until the end, values may be of that version or of the ones before. Both are
changes of the schema's metadata, of which Lance takes one at a time: so that is a lock as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lance
import pyarrow as pa
from lance import LanceOperation, Transaction

from geneva.background import in_background
from geneva.errors import TableChangedError, UserInputError
from geneva.model.tables import TableRef
from geneva.storage.lance.commit import retry_conflicts
from geneva.storage.lance.dataset import dropped_meanwhile, open_dataset
from geneva.storage.lance.history import commit_uuid
from geneva.storage.lance.own_commits import note_own_commit
from geneva.storage.views.definition import BASE_VERSION_KEY, read_view

_REFRESHED_KEY = "geneva::view::refreshed"
_REFRESHING_KEY = "geneva::view::refreshing"
_FIELDS_KEY = "geneva::view::fields"
_MAX_RETRIES = 19


@dataclass(frozen=True, slots=True)
class ViewState:
    """What the last refresh left behind."""

    refreshed: bool
    """Whether the view equals its definition at its base version: no refresh was cut off since."""
    udf_versions: dict[str, str]
    """The UDF versions of its columns then."""
    computed_at: tuple[int, ...]
    """The versions that its values may be of: first the one of the last refresh that ended, if any
    did, then those of refreshes that were cut off since. Of the source; for the rows of a chunked
    view, of its hidden one."""
    job_id: str | None
    """The job that began the refresh that has not ended."""
    settled_at: int | None = None
    """The view's version that the last refresh left it at; None: others wrote into it meanwhile."""
    identities: Mapping[int, str] = field(default_factory=dict)
    """Which commits made the source's versions that values may be of: numbers may come again."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """The fields that its columns had at its first refresh, as `fields_of` says; none before."""


@dataclass(frozen=True, slots=True)
class PlannedOn:
    """What a refresh was planned on: other tables may be in their places by now."""

    view_id: str
    """The identity of the view."""
    source: TableRef
    identity: str | None
    """That of the source's version, as `commit_uuid` says."""

    def check(
        self,
        ref: TableRef,
        view: lance.LanceDataset,
        version: int,
        state: ViewState,
        source: lance.LanceDataset,
    ) -> None:
        """Refuse another view, or another source than the one that values are and will be of.

        `source` is the latest version of what is in its place.
        """
        info = read_view(view.schema)
        if info is None or info.uuid != self.view_id:
            raise dropped_meanwhile(ref)
        check_still_there(
            self.source, {**state.identities, version: self.identity}, version, source
        )


def read_view_state(schema: pa.Schema) -> ViewState:
    """How the last refresh ended."""
    stored = {k.decode(): v.decode() for k, v in (schema.metadata or {}).items()}
    fields = json.loads(stored.get(_FIELDS_KEY) or "{}")
    refreshed, refreshing = stored.get(_REFRESHED_KEY, ""), stored.get(_REFRESHING_KEY, "")
    if refreshed:
        ended = json.loads(refreshed)
        return ViewState(
            refreshed=True,
            udf_versions=ended["udfs"],
            computed_at=(ended["version"],),
            job_id=None,
            settled_at=ended.get("settled"),
            identities={ended["version"]: ended["identity"]} if ended.get("identity") else {},
            fields=fields,
        )
    begun = json.loads(refreshing) if refreshing else {"versions": [], "job": None}
    return ViewState(
        refreshed=False,
        udf_versions={},
        computed_at=tuple(begun["versions"]),
        job_id=begun["job"],
        identities={int(v): made_by for v, made_by in begun.get("identities", {}).items()},
        fields=fields,
    )


def fields_of(view: lance.LanceDataset, columns: Iterable[str]) -> dict[str, str]:
    """Which fields, by Lance's ids, some columns are; those that are not there are left out.

    A column that is renamed keeps its field. One that is re-typed, or made anew, has another one.
    """
    nodes = {node.name(): node for node in view.lance_schema.fields()}
    return {name: _field_text(nodes[name]) for name in columns if name in nodes}


def _field_text(node: Any) -> str:
    """A field's id and, by name, those of the fields inside of it."""
    inside = ", ".join(f"{child.name()}={_field_text(child)}" for child in node.children())
    return f"{node.id()}({inside})" if inside else str(node.id())


def commit_refreshing(
    ref: TableRef,
    version: int,
    job_id: str,
    is_running: Callable[[str], bool],
    columns: Iterable[str],
    planned_on: PlannedOn | None = None,
) -> lance.LanceDataset:
    """Record that a job begins to bring the view to a version; refused while another one does.

    The first one also records which fields `columns` are: those that refreshes fill from now on.
    Refused, too, where the view or its source is not what the refresh was planned on.
    """
    source = None if planned_on is None else _opening(planned_on.source, version)

    def begun(state: ViewState, view: lance.LanceDataset) -> dict[str, str]:
        if state.job_id not in (None, job_id) and is_running(str(state.job_id)):
            raise TableChangedError(
                f"View {ref.name!r} is being refreshed by job {state.job_id}. Wait until that has "
                "ended, or cancel it with cancel_job; then refresh again."
            )
        versions = list(dict.fromkeys((*state.computed_at, version)))
        identities = dict(state.identities)
        if planned_on is not None and source is not None:
            planned_on.check(ref, view, version, state, source())
            identities |= {version: planned_on.identity} if planned_on.identity else {}
        begins = {"versions": versions, "identities": identities, "job": job_id}
        return {
            _REFRESHED_KEY: "",
            _REFRESHING_KEY: json.dumps(begins),
            _FIELDS_KEY: json.dumps(state.fields or fields_of(view, columns)),
        }

    return _update(ref, job_id, begun)


def commit_refreshed(
    ref: TableRef,
    base_version: int,
    job_id: str,
    udf_versions: Mapping[str, str],
    computed_at: int | None = None,
    source: TableRef | None = None,
    is_settled: Callable[[lance.LanceDataset], bool] = lambda _: False,
) -> lance.LanceDataset:
    """Record that the view equals its definition at a version of its source. The last commit.

    `computed_at` is the version that its values are of, where that is not the source's. Refused
    where `source` is no longer the table that values were made from.
    `is_settled` says whether only this job has written into the view since it was planned.
    """
    version = base_version if computed_at is None else computed_at
    latest = None if source is None else _opening(source, base_version)

    def ended(state: ViewState, view: lance.LanceDataset) -> dict[str, str]:
        if state.job_id != job_id:
            raise TableChangedError(
                f"View {ref.name!r} was restored or taken over by job {state.job_id} while job "
                f"{job_id} refreshed it. What was computed is kept: refresh again."
            )
        if source is not None and latest is not None:
            check_still_there(source, state.identities, base_version, latest())
        record = {
            "version": version,
            "udfs": dict(udf_versions),
            "identity": state.identities.get(version),
            "settled": int(view.version) if is_settled(view) else None,
        }
        return {
            BASE_VERSION_KEY: str(base_version),
            _REFRESHED_KEY: json.dumps(record),
            _REFRESHING_KEY: "",
        }

    return _update(ref, job_id, ended)


def _opening(source: TableRef, version: int) -> Callable[[], lance.LanceDataset]:
    """Begin to open a source at its latest version, while its view is opened; gives what waits.

    Which commit made a `version` of it is asked next: that is read ahead, too.
    """

    def open_latest() -> lance.LanceDataset:
        latest = open_dataset(source)
        commit_uuid(latest, version)
        return latest

    if not source.is_remote:
        return partial(open_dataset, source)
    return in_background("geneva-source", open_latest).result


def _update(
    ref: TableRef,
    job_id: str,
    change: Callable[[ViewState, lance.LanceDataset], dict[str, str]],
) -> lance.LanceDataset:
    """Change the metadata of the latest version; on a conflict, read it again."""

    def attempt() -> lance.LanceDataset:
        dataset = open_dataset(ref)
        updates = change(read_view_state(dataset.schema), dataset)
        operation = LanceOperation.UpdateConfig(
            schema_metadata_updates=LanceOperation.UpdateMap(updates=updates, replace=False)
        )
        made = lance.LanceDataset.commit(dataset, Transaction(dataset.version, operation))
        note_own_commit(ref.uri, made.version, job_id)
        return made

    return retry_conflicts(attempt, _MAX_RETRIES)


def check_still_there(
    source: TableRef,
    identities: Mapping[int, str | None],
    version: int,
    latest: lance.LanceDataset,
) -> None:
    """The same, after a plan found that it was not made anew: one `version` tells it by itself."""
    known = identities.get(version)
    told = [(version, known)] if known is not None else identities.items()
    check_not_made_anew(source, told, latest)


def check_not_made_anew(
    source: TableRef, identities: Iterable[tuple[int, str | None]], latest: lance.LanceDataset
) -> None:
    """Refuse a source that is another table than the one whose versions had these identities.

    `latest` is the latest version of what is in its place.
    """
    for version, identity in identities:
        if latest.version < version or _is_made_anew(latest, version, identity):
            raise UserInputError(
                f"Table {source.name!r} was dropped and made anew since its version {version} was "
                "read for the view. Drop the view, and create it anew."
            )


def _is_made_anew(dataset: lance.LanceDataset, version: int, identity: str | None) -> bool:
    """Whether a version of a table was made by another commit: the table was dropped meanwhile.

    Of a version that was cleaned up nobody knows.
    """
    return identity is not None and commit_uuid(dataset, version) not in (None, identity)
