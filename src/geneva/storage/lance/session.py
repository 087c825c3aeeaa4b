"""What a process remembers of tables in object stores: manifests, and connections that are open.

A manifest is known by its name and the mark that the store gives it, so that of a version that is
remembered the store is asked for just that mark.
"""

from __future__ import annotations

from functools import cache

import lance

from geneva.model.tables import is_remote

_METADATA_BYTES = 64 * 1024 * 1024
"""Manifests and the ends of data files: some thousand of them. Lance's own bound is 1 GiB."""
_INDEX_BYTES = 256 * 1024 * 1024
"""Lance's own bound is 6 GiB: more than a worker may have."""


def session_of(uri: str) -> lance.Session | None:
    """What is shared by all who open tables in a store; None: nothing is, in a folder."""
    return _session() if is_remote(uri) else None


@cache
def _session() -> lance.Session:
    return lance.Session(
        index_cache_size_bytes=_INDEX_BYTES, metadata_cache_size_bytes=_METADATA_BYTES
    )
