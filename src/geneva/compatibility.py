"""Words of Geneva on Ray that mean something else on Spark, or nothing: taken, and said so.

Where a word is not known at all, a program fails that could have run; where it is taken silently,
it waits for what never comes. So each has one sentence, which the program is warned with.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from pathlib import Path
from types import MethodType
from typing import Any

from geneva.errors import CompatibilityWarning

_PACKAGE = str(Path(__file__).parent)

AUTO_BACKFILL = (
    "it is kept in the column's metadata, and no service looks at it here: call table.backfill() "
    "after new rows or another version, or run `geneva refresh DB` on a timer"
)
AUTO_REFRESH = (
    "no service looks at it here: call view.refresh() after the source has changed, or run "
    "`geneva refresh DB` on a timer"
)
ADMISSION = "Spark queues tasks until there is room, and refuses none"

JOB_WORDS: Mapping[str, str] = {
    "_admission_check": ADMISSION,
    "_admission_strict": ADMISSION,
    "use_cpu_only_pool": "which executors have GPUs is a matter of Spark's own settings",
    "num_cpus": "the cores of a task are the UDF's, @udf(num_cpus=...), or Spark's",
    "num_gpus": "the GPUs of a task are the UDF's, @udf(num_gpus=...), or Spark's",
    "memory": "the memory of a task is the UDF's, @udf(memory=...), or Spark's",
    "cluster": "a job runs where its connection does: db.context(cluster=...), connect(spark=...)",
    "manifest": "a job runs with its UDF's manifest, or with that of db.context(manifest=...)",
}
"""Options of backfill and refresh that change nothing, and what does instead."""

REFRESH_WORDS: Mapping[str, str] = {
    "where": "the rows of a view are those of its query: put the condition there",
    "output_limit": "the rows of a chunked view are all that its chunker yields: limit the query",
}
"""The same, of a refresh only."""


_CHECKPOINTS = "checkpoints are inside each table's folder"

CONNECT_WORDS: Mapping[str, str] = {
    "checkpoint": _CHECKPOINTS,
    "system_namespace": "jobs, errors, clusters and manifests are in the database's folder _geneva",
}
"""Options of `connect` that change nothing."""


_RETRIES = "Lance's own retries, and those of a job, see to it"
_FILES = "settings are environment variables, or Settings(...) for connect, and no files"
_CLUSTER = "jobs run on a Spark session, and not on Ray"
VARIABLES: Mapping[str, str] = {
    "GENEVA_ADMISSION__CHECK": ADMISSION,
    "GENEVA_ADMISSION__STRICT": ADMISSION,
    "GENEVA_ADMISSION__TIMEOUT": ADMISSION,
    "GENEVA_COMMIT_MAX_RETRIES": _RETRIES,
    "GENEVA_RETRY_LANCE_ATTEMPTS": _RETRIES,
    "GENEVA_RETRY_LANCE_INITIAL_SECS": _RETRIES,
    "GENEVA_RETRY_LANCE_MAX_SECS": _RETRIES,
    "GENEVA_WRITER_STALL_IDLE_ROUNDS": "there is no writer apart that could stall",
    "GENEVA_RAY_INIT_MAX_RETRIES": _CLUSTER,
    "GENEVA_K8S_AUTH_MAX_RETRIES": _CLUSTER,
    "GENEVA_CONFIG_DIR": _FILES,
    "JOB__CHECKPOINT__OBJECT_STORE__PATH": _CHECKPOINTS,
}
"""Environment variables that change nothing."""


class hybrid_method:
    """A method that can be called on the class as well: `self` is then None."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Take the function, whose first parameter is the object or None."""
        self._function = function
        self._on_class = update_wrapper(partial(function, None), function)

    def __get__(self, instance: Any, owner: type[Any]) -> Callable[..., Any]:
        """The function, bound to the object."""
        return MethodType(self._function, instance) if instance is not None else self._on_class


def warn_compatibility(word: str, meaning: str) -> None:
    """Warn the user's own line that a word of Geneva's means something else here."""
    message = f"{word} is taken for compatibility with Geneva on Ray: {meaning}."
    warn_user(message, CompatibilityWarning)


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn the user's own line, however deep in Geneva the reason is met."""
    warnings.warn(message, category, stacklevel=_users_stack_level())


def warn_of_variables(environment: Mapping[str, str]) -> None:
    """Warn of environment variables that are set, and change nothing here."""
    for name in VARIABLES.keys() & environment.keys():
        warn_compatibility(f"The environment variable {name}", VARIABLES[name])


def taken_words(given: Mapping[str, Any], known: Mapping[str, str], call: str) -> dict[str, Any]:
    """The options without those that mean nothing here; one that was set to something is said."""
    for word in known.keys() & given.keys():
        if not _is_neutral(given[word]):
            warn_compatibility(f"{call}({word}=...)", known[word])
    return {word: value for word, value in given.items() if word not in known}


def _is_neutral(value: Any) -> bool:
    """Whether a value asks for nothing."""
    return value is None or value is False or value == 0


def _users_stack_level() -> int:
    """How far up the stack the first frame is that is not Geneva's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level
