"""Options of backfills and refreshes: one record, and everything that is made from it."""

from __future__ import annotations

import inspect
from dataclasses import fields
from datetime import timedelta
from typing import Any, get_type_hints

import pytest

from geneva import chunker, udf, udtf
from geneva.compatibility import JOB_WORDS
from geneva.errors import UnknownOptionError, UserInputError
from geneva.model.tables import Unproven, Upstream
from geneva.options import (
    BackfillArguments,
    JobOptions,
    LoadArguments,
    RefreshArguments,
    TakenArguments,
    option_infos,
    read_backfill_options,
    read_load_options,
    read_refresh_options,
)
from geneva.table import Table
from geneva.view import MaterializedView


def test_the_record_holds_exactly_what_can_be_asked() -> None:
    taken = set(get_type_hints(TakenArguments))
    asked = set(get_type_hints(BackfillArguments))
    others = {info.other_word for info, _ in option_infos(BackfillArguments).values()} - {""}
    assert {each.name for each in fields(JobOptions)} == asked - taken - others
    assert taken == set(JOB_WORDS)
    assert set(option_infos(RefreshArguments)) < set(option_infos(BackfillArguments))


def test_values_are_read() -> None:
    given = {"timeout": timedelta(minutes=1), "unproven": "keep", "upstream": "refuse"}
    assert read_backfill_options(given) == JobOptions(
        timeout=60.0, unproven=Unproven.KEEP, upstream=Upstream.REFUSE
    )
    assert read_refresh_options({}) == JobOptions()


@pytest.mark.parametrize("name", list(option_infos(BackfillArguments)))
def test_a_default_that_is_given_is_the_default(name: str) -> None:
    default = option_infos(BackfillArguments)[name][1]
    assert read_backfill_options({name: default}) == JobOptions()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"concurrency": 0}, "concurrency must be a whole number of at least 1, not 0"),
        ({"task_shuffle_diversity": -1}, "at least 0, not -1"),
        ({"timeout": True}, "timeout must be a number of seconds, not True"),
        ({"where": " "}, "where must be an SQL condition, not ' '"),
        ({"unproven": "drop"}, "unproven must be 'compute' or 'keep', not 'drop'"),
        ({"min_checkpoint_size": 2, "max_checkpoint_size": 1}, "can't be larger than"),
    ],
)
def test_wrong_values_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        read_backfill_options(given)


def test_an_option_by_another_word() -> None:
    for read in (read_backfill_options, read_refresh_options):
        assert read({"budget": 2}) == read({"max_cost": 2}) == read({"budget": 2, "max_cost": 2})
        assert read({"budget": None, "max_cost": 2}) == read({"budget": 2, "max_cost": None})
        assert read({"budget": 2}).changed() == {"max_cost": 2}
        with pytest.raises(UserInputError, match=r"budget is another word for max_cost.* 2 and 3"):
            read({"budget": 2, "max_cost": 3})
        for wrong in (-1, 0, float("nan"), float("inf")):
            with pytest.raises(UserInputError, match="max_cost must be a number above 0"):
                read({"budget": wrong})
    assert read_refresh_options({"source_task_size": 5}) == JobOptions(task_size=5)
    with pytest.raises(UserInputError, match="another word for task_size"):
        read_refresh_options({"source_task_size": 5, "task_size": 6})
    with pytest.raises(UnknownOptionError, match="load_columns has no option 'budget'"):
        read_load_options({"budget": 2}, None)


def test_unknown_options_are_refused_with_what_was_meant() -> None:
    with pytest.raises(UnknownOptionError, match=r"'wheer'. Did you mean 'where'\?"):
        read_backfill_options({"wheer": "x"})
    with pytest.raises(TypeError, match=r"A refresh has no option 'num_frags'\. Options are "):
        read_refresh_options({"num_frags": 1})


def test_an_unknown_option_of_a_job_is_told_with_those_that_there_are() -> None:
    with pytest.raises(UnknownOptionError) as caught:
        read_backfill_options({"batchsize": 3})
    assert str(caught.value).startswith(
        "A backfill has no option 'batchsize'. Did you mean 'batch_size'? That is an option of "
        "@udf. Options are where, "
    )
    assert str(caught.value).endswith(f"{[*option_infos(BackfillArguments)][-1]}.")
    with pytest.raises(UnknownOptionError, match=r"'batch_size'\. It is an option of @udf\."):
        read_refresh_options({"batch_size": 3})
    with pytest.raises(UnknownOptionError, match=r"'batch_size'\. Did you mean 'task_size'\?"):
        read_load_options({"batch_size": 3}, None)


@pytest.mark.parametrize(
    ("declare", "what"),
    [(udf, "A UDF"), (chunker, "A chunker"), (udtf, "A table function")],
    ids=["udf", "chunker", "udtf"],
)
def test_an_unknown_option_of_a_function_is_told_with_those_that_there_are(
    declare: Any, what: str
) -> None:
    with pytest.raises(UnknownOptionError) as caught:
        declare(batchsize=3)
    said = str(caught.value)
    assert said.startswith(f"{what} has no option 'batchsize'. Did you mean 'batch_size'? Options")
    for name in ("input_columns", "output_schema", "on_error"):
        assert f" {name}," in said
    assert ("nullable" in said) is (declare is udf)
    with pytest.raises(TypeError, match=r"no option 'nonsense'\. Options are "):
        declare(lambda x: x, nonsense=3)


def test_the_history_gets_what_was_changed() -> None:
    options = read_backfill_options({"num_frags": 2, "commit_granularity": None})
    assert options.changed() == {"num_frags": 2}


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        (Table.backfill, BackfillArguments),
        (Table.backfill_async, BackfillArguments),
        (Table.plan_backfill, BackfillArguments),
        (Table.load_columns, LoadArguments),
        (Table.load_columns_async, LoadArguments),
        (MaterializedView.refresh, RefreshArguments),
        (MaterializedView.refresh_async, RefreshArguments),
        (MaterializedView.plan_refresh, RefreshArguments),
    ],
)
def test_help_shows_every_option(method: Any, arguments: Any) -> None:
    parameters = inspect.signature(method).parameters
    for name, (_, default) in option_infos(arguments).items():
        assert parameters[name].default == default
    assert "options" not in parameters


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        (Table.backfill, BackfillArguments),
        (Table.load_columns, LoadArguments),
        (MaterializedView.refresh, RefreshArguments),
    ],
)
def test_docstrings_describe_every_option(method: Any, arguments: Any) -> None:
    text = " ".join(inspect.getdoc(method).split())  # type: ignore[union-attr]
    for name, (info, _) in option_infos(arguments).items():
        assert f"{name}: {info.help}" in text
