"""Whether a view is what its definition says: the last thing that a refresh writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import lance
import pyarrow as pa
from lance import LanceOperation, Transaction

from geneva.storage.views import BASE_VERSION_KEY

_REFRESHED_KEY = "geneva::view::refreshed"


@dataclass(frozen=True, slots=True)
class ViewState:
    """What the last refresh that ended left behind."""

    refreshed: bool
    """Whether the view equals its definition at its base version: no refresh was cut off since."""
    udf_versions: dict[str, str]
    """The UDF versions of its columns then."""


def read_view_state(schema: pa.Schema) -> ViewState:
    """How the last refresh ended."""
    text = (schema.metadata or {}).get(_REFRESHED_KEY.encode(), b"").decode()
    return ViewState(bool(text), json.loads(text) if text else {})


def commit_refreshing(dataset: lance.LanceDataset) -> lance.LanceDataset:
    """Say that the view is on its way: until the end, only its rows tell how far it is."""
    if not read_view_state(dataset.schema).refreshed:
        return dataset
    return _update(dataset, {_REFRESHED_KEY: ""})


def commit_refreshed(
    dataset: lance.LanceDataset, version: int, udf_versions: Mapping[str, str]
) -> lance.LanceDataset:
    """Say that the view equals its definition at a version of its source. The last commit."""
    return _update(
        dataset,
        {BASE_VERSION_KEY: str(version), _REFRESHED_KEY: json.dumps(dict(udf_versions))},
    )


def _update(dataset: lance.LanceDataset, updates: dict[str, str]) -> lance.LanceDataset:
    change = LanceOperation.UpdateMap(updates=updates, replace=False)
    operation = LanceOperation.UpdateConfig(schema_metadata_updates=change)
    return lance.LanceDataset.commit(dataset, Transaction(dataset.version, operation))
