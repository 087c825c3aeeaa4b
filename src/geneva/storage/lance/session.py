"""What a process remembers of tables: manifests, and of object stores connections that are open.

In a store a manifest is known by its name and the mark that the store gives it, so that of a
version that is remembered the store is asked for just that mark.
"""

from __future__ import annotations

from functools import cache

import lance

from geneva.model.tables import is_remote

_METADATA_BYTES = 64 * 1024 * 1024
"""Manifests and the ends of data files: some thousand of them. Lance's own bound is 1 GiB, and each
commit leaves a manifest behind, of 40 MB where a table has 50,000 fragments."""
_INDEX_BYTES = 256 * 1024 * 1024
"""Lance's own bound is 6 GiB: more than a worker may have."""


def session_of(uri: str) -> lance.Session:
    """What is shared by all who open tables in a store; in a folder each has one of its own."""
    return _shared() if is_remote(uri) else _bounded()


@cache
def _shared() -> lance.Session:
    return _bounded()


def _bounded() -> lance.Session:
    """A session that remembers less than it would by itself."""
    return lance.Session(
        index_cache_size_bytes=_INDEX_BYTES, metadata_cache_size_bytes=_METADATA_BYTES
    )
