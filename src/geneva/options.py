"""What can be asked of a backfill or a refresh: one record, read and checked in one place.

A new option is declared here, twice: its type in the arguments of the calls that take it, for type
checkers and editors, and its default, check and help text in `JobOptions`. The signatures and
docstrings of `Table.backfill` and `MaterializedView.refresh`, the options of the command line and
the settings in the job history are made from these.
"""

from __future__ import annotations

import inspect
import math
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from enum import StrEnum
from functools import partial
from numbers import Real
from threading import TIMEOUT_MAX
from typing import Any, TypedDict, TypeVar, get_type_hints

from geneva.compatibility import JOB_WORDS, REFRESH_WORDS, taken_words
from geneva.errors import UnknownOptionError, UserInputError
from geneva.flags import check_flag
from geneva.model.tables import Sizes, Unproven, Upstream
from geneva.render.text import did_you_mean, listed

# --------------------------------------------------------------------------- as calls take them


class TakenArguments(TypedDict, total=False):
    """Words of Geneva on Ray that change nothing here (see `geneva.compatibility`)."""

    cluster: Any
    manifest: Any
    num_cpus: float | None
    num_gpus: float | None
    memory: int | None
    use_cpu_only_pool: bool
    _admission_check: bool | None
    _admission_strict: bool | None


class WorkArguments(TakenArguments, total=False):
    """Options of a backfill and of a refresh: how the work is done.

    A refresh of a whole database takes these alone, for each of its jobs.
    """

    concurrency: int | None
    intra_applier_concurrency: int | None
    checkpoint_size: int | None
    min_checkpoint_size: int | None
    max_checkpoint_size: int | None
    task_size: int | None
    commit_granularity: int | None
    batch_checkpoint_flush_interval_seconds: float | None
    timeout: float | timedelta | None
    logs: bool
    max_cost: float | None
    budget: float | None


class RefreshArguments(WorkArguments, total=False):
    """All options of a refresh. A backfill takes them, too."""

    job_id: str | None
    retry_failed: bool
    source_task_size: int | None
    where: Any
    output_limit: int | None


class LoadArguments(TakenArguments, total=False):
    """Options of `load_columns`: how the work is done."""

    concurrency: int | None
    min_checkpoint_size: int | None
    max_checkpoint_size: int | None
    commit_granularity: int | None
    task_size: int | None
    timeout: float | timedelta | None
    job_id: str | None


class SelectionArguments(TypedDict, total=False):
    """Options of a backfill that decide which rows it computes, and from what."""

    where: str | None
    read_version: int | None
    num_frags: int | None
    retry_failed: bool
    unproven: str | None
    upstream: str


class BackfillArguments(SelectionArguments, WorkArguments, total=False):
    """All options of a backfill."""

    job_id: str | None
    task_shuffle_diversity: int | None


# ------------------------------------------------------------------------------ checking values

_ID = re.compile(r"[\w.-]{1,100}", re.ASCII)
_Choice = TypeVar("_Choice", bound=StrEnum)

MAX_COUNT = 2**63 - 1
"""The largest number of rows, or of a version, that storage can name."""


def check_count(name: str, value: Any, *, minimum: int = 1) -> int | None:
    """Refuse what is not a whole number of at least `minimum`; None is fine."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise UserInputError(f"{name} must be a whole number of at least {minimum}, not {value!r}.")
    if value > MAX_COUNT:
        raise UserInputError(f"{name} must be a whole number of at most {MAX_COUNT}.")
    return value


def read_seconds(name: str, value: Any) -> float | None:
    """Seconds, which may be given as a `timedelta`."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and value >= 0):  # NaN is neither
        raise UserInputError(f"{name} must be a number of seconds, not {value!r}.")
    return value


def check_age(name: str, value: Any) -> None:
    """Refuse what is no `timedelta`: of a number nobody knows whether it is seconds or days."""
    if not isinstance(value, timedelta):
        raise UserInputError(
            f"{name} must be a timedelta, such as timedelta(days=7), not {value!r}."
        )


def read_wait(name: str, value: Any) -> float | None:
    """The seconds to wait for something: none are left of a deadline that has passed."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, Real) and not isinstance(value, bool):  # of numpy's, too
        # NaN, which is less than nothing, stays what it is, and is refused.
        value = min(float(value) if not value < 0 else 0.0, TIMEOUT_MAX)
    return read_seconds(name, value)


def _read_amount(name: str, value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < math.inf):
        raise UserInputError(f"{name} must be a number above 0, not {value!r}.")
    return value


def _read_condition(name: str, value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise UserInputError(f"{name} must be an SQL condition, not {value!r}.")
    return value


def _read_id(name: str, value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not _ID.fullmatch(value)):
        raise UserInputError(
            f"{name} must be 1 to 100 letters, digits, dots, dashes and underscores, not {value!r}."
        )
    return value


def _read_choice(kind: type[_Choice], name: str, value: Any) -> _Choice | None:
    if value is None:
        return None
    try:
        return kind(value)
    except ValueError:
        known = " or ".join(repr(choice.value) for choice in kind)
        raise UserInputError(f"{name} must be {known}, not {value!r}.") from None


# ---------------------------------------------------------------------------------- the record


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """What the calls and the command line need to know of an option."""

    help: str
    kind: type[Any]
    """Its type on the command line."""
    read: Callable[[str, Any], Any]
    """Check a value that a user gave, and return what the record holds."""
    metavar: str = ""
    """What stands for its value in the help of the command line; empty: a flag."""
    minimum: int | None = None
    other_word: str = ""
    """What it is called besides."""


_KEY = "option"


def _option(info: OptionInfo) -> dict[str, OptionInfo]:
    return {_KEY: info}


def _count(text: str, *, minimum: int = 1) -> dict[str, OptionInfo]:
    read = partial(check_count, minimum=minimum)
    return _option(OptionInfo(text, int, read, "N", minimum))


def _seconds(text: str) -> dict[str, OptionInfo]:
    return _option(OptionInfo(text, float, read_seconds, "SECONDS", 0))


def _choice(kind: type[StrEnum], text: str) -> dict[str, OptionInfo]:
    metavar = "|".join(choice.value for choice in kind)
    return _option(OptionInfo(text, str, partial(_read_choice, kind), metavar))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The options of a backfill or refresh, after checking."""

    where: str | None = field(
        default=None,
        metadata=_option(
            OptionInfo(
                "SQL condition: compute exactly the rows that satisfy it, again if need be; the "
                "others keep their values. By default the rows that are new or stale.",
                str,
                _read_condition,
                "SQL",
            )
        ),
    )
    concurrency: int | None = field(
        default=None, metadata=_count("Tasks at once; by default as many as Spark has slots.")
    )
    intra_applier_concurrency: int | None = field(
        default=None,
        metadata=_count(
            "Calls at once in each task, for functions that wait: threads, or for `async def` the "
            "event loop. By default 1, and 32 for `async def`."
        ),
    )
    checkpoint_size: int | None = field(
        default=None,
        metadata=_count("Rows that a checkpoint holds, exactly; by default made by time."),
    )
    min_checkpoint_size: int | None = field(
        default=None, metadata=_count("Fewest rows of a checkpoint that is made by time.")
    )
    max_checkpoint_size: int | None = field(
        default=None,
        metadata=_count(
            "Most rows of a checkpoint that is made by time; by default, and at most, "
            "checkpoint_size."
        ),
    )
    task_size: int | None = field(
        default=None,
        metadata=_count(
            "Rows that a task computes, rounded up to whole batches of the function's batch_size; "
            "by default by measured speed."
        ),
    )
    commit_granularity: int | None = field(
        default=None,
        metadata=_count("Fragments that a commit publishes; by default by time, and at the end."),
    )
    read_version: int | None = field(
        default=None,
        metadata=_count("The version to read the inputs from; by default the latest."),
    )
    num_frags: int | None = field(
        default=None, metadata=_count("Compute at most so many fragments.")
    )
    batch_checkpoint_flush_interval_seconds: float | None = field(
        default=None,
        metadata=_seconds("Seconds of work between checkpoints; by default by their cost."),
    )
    task_shuffle_diversity: int | None = field(
        default=None,
        metadata=_count("Mix the order of so many neighbouring fragments.", minimum=0),
    )
    timeout: float | None = field(
        default=None,
        metadata=_seconds("Stop after so many seconds; what is finished is kept."),
    )
    job_id: str | None = field(
        default=None,
        metadata=_option(OptionInfo("The job's id; by default a new one.", str, _read_id, "ID")),
    )
    logs: bool = field(
        default=False,
        metadata=_option(
            OptionInfo(
                "Show what the function prints and logs: at once where its tasks run on this "
                "machine, as tasks end elsewhere. The end of it, 64 KiB per task, is kept with the "
                "job in any case.",
                bool,
                check_flag,
            )
        ),
    )
    max_cost: float | None = field(
        default=None,
        metadata=_option(
            OptionInfo(
                "Stop when calls have cost so much, as the function reports by "
                "geneva.report_usage(cost=...); what is done is committed, and the next backfill "
                "goes on from there. Another word for it is budget.",
                float,
                _read_amount,
                "COST",
                other_word="budget",
            )
        ),
    )
    retry_failed: bool = field(
        default=False,
        metadata=_option(
            OptionInfo(
                "Try the rows again that failed and were skipped before, by whatever UDF: a "
                "backfill computes just these, and with another `udf` its values for them are "
                "kept; a refresh computes these as well. Without it they stay NULL until the UDF "
                "or their inputs change.",
                bool,
                check_flag,
            )
        ),
    )
    unproven: Unproven | None = field(
        default=None,
        metadata=_choice(
            Unproven,
            "What to do with values from before there were receipts; by default they are kept, "
            "unless the column shows signs of stale values.",
        ),
    )
    upstream: Upstream = field(
        default=Upstream.COMPUTE,
        metadata=_choice(
            Upstream,
            "What to do about computed inputs that are not up to date: compute them first, in the "
            "same job; refuse (StaleInputError); or ignore it and compute from what is there.",
        ),
    )

    def __post_init__(self) -> None:
        """Refuse sizes that contradict each other."""
        low, high = self.min_checkpoint_size, self.max_checkpoint_size
        if low is not None and high is not None and low > high:
            raise UserInputError(
                f"min_checkpoint_size ({low}) can't be larger than max_checkpoint_size ({high})."
            )

    @property
    def sizes(self) -> Sizes:
        """How big the pieces of work are to be."""
        return Sizes(
            checkpoint_size=self.checkpoint_size,
            min_checkpoint_size=self.min_checkpoint_size,
            max_checkpoint_size=self.max_checkpoint_size,
            task_size=self.task_size,
        )

    def changed(self) -> dict[str, Any]:
        """The options that are not at their defaults, for the job history."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        defaults = {each.name: each.default for each in fields(self)}
        return {name: value for name, value in values.items() if value != defaults[name]}


def option_infos(arguments: type[Any]) -> dict[str, tuple[OptionInfo, Any]]:
    """The options that are among `arguments`, with their defaults, in the order of the record."""
    taken = REFRESH_WORDS if arguments is RefreshArguments else ()
    known = get_type_hints(arguments).keys() - set(taken)
    return {
        each.name: (each.metadata[_KEY], each.default)
        for each in fields(JobOptions)
        if each.name in known
    }


def read_backfill_options(given: Mapping[str, Any]) -> JobOptions:
    """Check the options of a backfill."""
    return _read(taken_words(given, JOB_WORDS, "backfill"), BackfillArguments, "A backfill")


def read_refresh_options(given: Mapping[str, Any]) -> JobOptions:
    """Check the options of a refresh."""
    own = taken_words(given, {**JOB_WORDS, **REFRESH_WORDS}, "refresh")
    own = _in_own_word(own, "source_task_size", "task_size")
    return _read(own, RefreshArguments, "A refresh")


def read_work_options(given: Mapping[str, Any]) -> JobOptions:
    """Check the options of a refresh of a whole database."""
    own = taken_words(given, JOB_WORDS, "refresh")
    return _read(own, WorkArguments, "A refresh of a whole database")


def read_load_options(given: Mapping[str, Any], interval_seconds: Any) -> JobOptions:
    """Check the options of `load_columns`."""
    own = _read(taken_words(given, JOB_WORDS, "load_columns"), LoadArguments, "load_columns")
    seconds = read_seconds("checkpoint_interval_seconds", interval_seconds)
    return replace(own, batch_checkpoint_flush_interval_seconds=seconds)


def _in_own_word(given: Mapping[str, Any], word: str, name: str) -> dict[str, Any]:
    """The options, with one that was given by another word under its own name."""
    own = dict(given)
    value = own.pop(word, None)
    if value is None:
        return own
    if own.get(name) not in (None, value):
        raise UserInputError(
            f"{word} is another word for {name}, and they were given as {value!r} and "
            f"{own[name]!r}: give one of them."
        )
    return {**own, name: value}


def _read(given: Mapping[str, Any], arguments: type[Any], what: str) -> JobOptions:
    known = option_infos(arguments)
    for name, (info, _) in known.items():
        if info.other_word:
            given = _in_own_word(given, info.other_word, name)
    for name in given:
        if name not in known:
            of_udf = "" if arguments is LoadArguments else _of_udf(name)
            hint = of_udf or did_you_mean(name, known)
            raise UnknownOptionError(
                f"{what} has no option {name!r}.{hint} Options are {listed(known)}."
            )
    return JobOptions(
        **{name: info.read(name, given[name]) for name, (info, _) in known.items() if name in given}
    )


def _of_udf(name: str) -> str:
    """That an option which a job doesn't have is one of its function; empty if it is none."""
    from geneva.udf.declare import UDFOptions

    known = UDFOptions.__annotations__
    if name in known:
        return " It is an option of @udf."
    same = [each for each in known if each.replace("_", "") == name.lower().replace("_", "")]
    return f"{did_you_mean(name, same)} That is an option of @udf." if same else ""


# -------------------------------------------------------------------- signatures and docstrings

_Function = TypeVar("_Function", bound=Callable[..., Any])
_PLACEHOLDER = "**options:"


def with_options(arguments: type[Any]) -> Callable[[_Function], _Function]:
    """Show the options of a method's `**options` in its signature and docstring, one by one.

    In the docstring they take the place of the line of `**options`.
    """

    def decorate(function: _Function) -> _Function:
        function.__signature__ = _signature(function, arguments)  # type: ignore[attr-defined]
        function.__doc__ = _docstring(function.__doc__ or "", arguments)
        return function

    return decorate


def _signature(function: Callable[..., Any], arguments: type[Any]) -> inspect.Signature:
    signature, hints = inspect.signature(function), get_type_hints(arguments)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (_, default) in option_infos(arguments).items()
        for kind in [hints[name]]
    ]
    return signature.replace(parameters=[*own, *added])


def _docstring(text: str, arguments: type[Any]) -> str:
    lines = text.splitlines(keepends=True)
    at = next((i for i, line in enumerate(lines) if line.strip().startswith(_PLACEHOLDER)), None)
    if at is None:
        return text
    indent = lines[at].partition(_PLACEHOLDER)[0]
    described = [
        textwrap.fill(
            f"{name}: {info.help}",
            width=100,
            initial_indent=indent,
            subsequent_indent=f"{indent}    ",
        )
        for name, (info, _) in option_infos(arguments).items()
    ]
    return "".join([*lines[:at], "\n".join(described), "\n", *lines[at + 1 :]])
