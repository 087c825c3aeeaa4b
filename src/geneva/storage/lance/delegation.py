"""Handing calls on to LanceDB's own objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from inspect import iscoroutinefunction, signature
from typing import Any, TypeVar

from geneva.render.text import did_you_mean

_Method = TypeVar("_Method", bound=Callable[..., Any])

MERGE = "merge_insert"
"""The method that only prepares a commit."""
COMMITTING = frozenset(
    {
        *("add", "delete", "update", "merge", MERGE, "restore"),
        *("add_columns", "replace_field_metadata", "update_field_metadata"),
        *("create_index", "create_scalar_index", "create_fts_index", "drop_index"),
        *("create_index_async", "refresh_column", "refresh_column_async"),
        "set_unenforced_primary_key",
    }
)
"""LanceDB's methods of a table that commit to it."""
_WRITING = frozenset(
    {
        *("checkpoint_lsm", "close_lsm_writers", "compact_lsm", "flush_lsm"),
        *("set_lsm_write_spec", "unset_lsm_write_spec", "migrate_v2_manifest_paths"),
        *("pause_job", "resume_job", "execute_query", "execute_query_async"),
    }
)
"""Those that write without a commit, or may write."""
_WRITING_VERBS = ("create_", "drop_", "alter_", "rename_")


def is_writing(method: str) -> bool:
    """Whether one of LanceDB's methods, of a table or a connection, writes."""
    return method in COMMITTING or method in _WRITING or method.startswith(_WRITING_VERBS)


def writes(method: _Method) -> _Method:
    """Say in a sentence why a method could not write, inside of its object's `_writing`.

    For what Geneva writes itself. What LanceDB does is called inside of `_calling`.
    """
    first = [*signature(method).parameters, "", ""][1]

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        subject = args[0] if args else kwargs.get(first)
        with self._writing(method.__name__, subject):
            return method(self, *args, **kwargs)

    call.writes = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def delegated(method: _Method) -> _Method:
    """Call LanceDB's method of that name instead, with the arguments that were given."""
    name = method.__name__

    @wraps(method)
    def call(self: Delegating, *args: Any, **kwargs: Any) -> Any:
        method = partial(getattr(self._lancedb(), name), *args, **kwargs)
        if name == MERGE:
            return merged_within(method(), partial(self._calling, name))
        with self._calling(name):
            return method()

    return call  # type: ignore[return-value]


class Delegating:
    """What has the methods of one of LanceDB's own objects."""

    def _lancedb(self) -> Any:
        """LanceDB's own object."""
        raise NotImplementedError

    def _calling(self, method: str = "") -> AbstractContextManager[None]:
        """What surrounds a call of one of its methods."""
        return nullcontext()


def read_within(query: Any, calling: Callable[[], AbstractContextManager[None]]) -> Any:
    """A query of LanceDB's, whose `to_arrow`, `to_list` and the like run inside of `calling()`."""
    return methods_within(query, (n for n in dir(query) if n.startswith("to_")), calling)


def merged_within(builder: Any, calling: Callable[[], AbstractContextManager[None]]) -> Any:
    """A merge of LanceDB's, whose `execute` runs inside of `calling()`."""
    return methods_within(builder, ["execute"], calling)


def methods_within(
    thing: Any, names: Iterable[str], calling: Callable[[], AbstractContextManager[None]]
) -> Any:
    """The object of LanceDB's, some of whose methods run inside of `calling()`."""
    kind = type(thing)
    for name in names:
        setattr(thing, name, _within(getattr(kind, name).__get__(thing), calling))
    return thing


def _within(
    call: Callable[..., Any], calling: Callable[[], AbstractContextManager[None]]
) -> Callable[..., Any]:
    @wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        with calling():
            return call(*args, **kwargs)

    @wraps(call)
    async def wait(*args: Any, **kwargs: Any) -> Any:
        with calling():
            return await call(*args, **kwargs)

    return wait if iscoroutinefunction(call) else run


def delegated_attribute(ours: Any, theirs: Any, name: str) -> Any:
    """What ours has no declaration of: a newer LanceDB may have it."""
    try:
        return getattr(theirs, name)
    except AttributeError:
        if name in dir(theirs):  # it is there, and LanceDB fails in it
            raise
        hint = did_you_mean(name, (known for known in dir(ours) if not known.startswith("_")))
        message = f"{type(ours).__name__!r} object has no attribute {name!r}.{hint}"
        raise AttributeError(message, name=name, obj=ours) from None
