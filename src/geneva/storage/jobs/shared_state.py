"""A small record that processes on any machine read and change, one after the other.

It is the configuration of an empty Lance table. Lance refuses a change of what another process has
changed meanwhile: then it is made again, on what is there by then. So it works wherever tables do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import lance
import pyarrow as pa
from lance.file import LanceFileSession

from geneva.model.tables import Secrets
from geneva.storage.lance.commit import retry_conflicts

_KEY = "geneva.state"
_MAX_RETRIES = 200
_CLEAN_UP_EVERY = 128
"""Versions after which older ones are deleted."""
_EMPTY = pa.table({"nothing": pa.array([], pa.int8())})

T = TypeVar("T")
State = dict[str, float]


class SharedState:
    """One record, under a URI."""

    def __init__(self, uri: str, storage_options: Secrets) -> None:
        """Point at it; nothing is read or written yet."""
        self._uri, self._options = uri, storage_options.plain()
        self.updates = 0
        """How often it was changed through this object."""

    def update(self, change: Callable[[State], T]) -> T:
        """Change the record in place, and return what `change` returned.

        `change` is called again when others were faster. The record is empty at first.
        """

        def attempt() -> T:
            dataset = self._open()
            state = json.loads(dataset.config().get(_KEY, "{}"))
            result = change(state)
            dataset.update_config({_KEY: json.dumps(state)})
            if int(dataset.version) % _CLEAN_UP_EVERY == 0:
                # What it was changed to has landed: nothing below may have it changed once more.
                with suppress(OSError, ValueError, RuntimeError):
                    dataset.cleanup_old_versions(older_than=timedelta(minutes=10))
            return result

        self.updates += 1
        return retry_conflicts(attempt, _MAX_RETRIES)

    def _open(self) -> Any:
        try:
            return lance.dataset(self._uri, storage_options=self._options)
        except ValueError:  # there is none yet
            pass
        try:
            return lance.write_dataset(_EMPTY, self._uri, storage_options=self._options)
        except OSError:  # another process has made it meanwhile
            return lance.dataset(self._uri, storage_options=self._options)


def state_uri(folder: str, name: str) -> str:
    """Where a record is."""
    return f"{folder}/{quote(name, safe='')}.lance"


def state_names(folder: str, storage_options: Secrets) -> set[str]:
    """The records that are in a folder."""
    try:
        paths = LanceFileSession(folder, storage_options=storage_options.plain()).list()
    except OSError:
        return set()
    files = {path.partition("/")[0] for path in paths}
    return {unquote(name.removesuffix(".lance")) for name in files if name.endswith(".lance")}


def delete_states(folder: str, names: Iterable[str], storage_options: Secrets) -> None:
    """Delete records by name, if they are there."""
    for name in names:
        with suppress(OSError, ValueError):
            lance.LanceDataset.drop(
                state_uri(folder, name), storage_options.plain(), ignore_not_found=True
            )
