"""What is `True` or `False` in a call is nothing else: the text "no" would count as yes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from geneva import Connection, Table, chunker, udf
from geneva.errors import InvalidUDFError, UserInputError
from geneva.udf.policy import ErrorPolicy
from geneva.udfs import sentence_transformer_udf, static_embedding_udf
from geneva.udfs.openai import openai_embedding_udf
from support import make_table

ROWS = pa.schema([("a", pa.int64())])


def f(id: int) -> int:
    return id


def g(id: int) -> Iterator[dict[str, int]]:
    yield {"a": id}


DECLARED: dict[str, Callable[..., Any]] = {
    "nullable": lambda value: udf(f, nullable=value),
    "memoize": lambda value: udf(f, memoize=value),
    "cuda": lambda value: udf(f, cuda=value),
    "auto_backfill": lambda value: udf(f, auto_backfill=value),
    "batch": lambda value: chunker(g, output_schema=ROWS, batch=value),
    "auto_refresh": lambda value: chunker(g, output_schema=ROWS, auto_refresh=value),
    "inherit_input_columns": lambda value: chunker(
        g, output_schema=ROWS, inherit_input_columns=value
    ),
    "store_errors": lambda value: ErrorPolicy(store_errors=value),
    "store_inputs": lambda value: ErrorPolicy(store_inputs=value),
}
ASKED: dict[str, Callable[..., Any]] = {
    "retry_failed": lambda table, value: table.backfill("y", retry_failed=value),
    "logs": lambda table, value: table.backfill("y", logs=value),
    "run": lambda table, value: table.verify("y", run=value),
    "retrain": lambda table, value: table.optimize(retrain=value),
    "delete_unverified": lambda table, value: table.cleanup_old_versions(
        timedelta(0), delete_unverified=value
    ),
    "include_system": lambda table, value: table.to_arrow(include_system=value),
    "with_row_id": lambda table, value: table.query().with_row_id(value),
    "with_row_address": lambda table, value: table.to_spark(with_row_address=value),
    "strict": lambda table, value: table._connection.create_materialized_view(
        "v", table.query(), strict=value
    ),
    "with_no_data": lambda table, value: table._connection.create_materialized_view(
        "v", table.query(), with_no_data=value
    ),
}
LOADED: list[tuple[str, Callable[..., Any]]] = [
    ("trust_remote_code", lambda value: sentence_transformer_udf(trust_remote_code=value)),
    ("normalize", lambda value: sentence_transformer_udf(normalize=value)),
    ("normalize", lambda value: static_embedding_udf(normalize=value)),
    ("normalize", lambda value: openai_embedding_udf(normalize=value)),
]


@pytest.fixture(params=["no", 1, None, np.True_], ids=repr)
def wrong(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("name", DECLARED)
def test_of_a_declaration(name: str, wrong: Any) -> None:
    if wrong is None and name == "inherit_input_columns":
        pytest.skip("None is: as the query says")
    with pytest.raises(InvalidUDFError, match=f"^{name} must be True or False, not "):
        DECLARED[name](wrong)


@pytest.mark.parametrize("name", ASKED)
def test_of_a_call(name: str, wrong: Any, table: Table) -> None:
    if wrong is None and name == "with_no_data":
        pytest.skip("None is: as is usual for such a view")
    before = table.version, table._connection.table_names()
    with pytest.raises(UserInputError, match=f"^{name} must be True or False, not "):
        ASKED[name](table, wrong)
    assert (table.version, table._connection.table_names()) == before


@pytest.mark.parametrize(("name", "make"), LOADED)
def test_of_a_model(name: str, make: Callable[..., Any], wrong: Any) -> None:
    with pytest.raises(UserInputError, match=f"^{name} must be True or False, not "):
        make(wrong)


@pytest.fixture
def table(local_db: Connection) -> Table:
    table = make_table(local_db, [2])
    table.add_columns({"y": udf(f)})
    return table


@pytest.mark.parametrize("name", [5, b"f", ["f"], True])
def test_the_name_of_a_function_is_text(name: Any) -> None:
    with pytest.raises(InvalidUDFError, match="A UDF's name must be text, not "):
        udf(f, name=name)
    with pytest.raises(InvalidUDFError, match="name must be text, not "):
        chunker(g, output_schema=ROWS, name=name)


def test_not_a_number_is_no_timeout(table: Table) -> None:
    for nan in (float("nan"), np.float64("nan"), np.float32("nan")):
        with pytest.raises(UserInputError, match="timeout must be a number of seconds, not "):
            table.backfill("y", timeout=nan)
        with pytest.raises(UserInputError, match="timeout must be a number of seconds, not "):
            table.query().to_arrow(timeout=nan)
        with pytest.raises(UserInputError, match="wait_timeout must be a number of seconds, not "):
            table._connection.context(wait_timeout=nan)
    job = table.backfill_async("y")
    with pytest.raises(UserInputError, match="timeout must be a number of seconds, not nan"):
        job.result(timeout=float("nan"))
    assert job.result(timeout=-1 if job.wait(60) else 0).rows_computed == 2


@pytest.mark.parametrize("age", [7, 0.5, "7 days", True])
def test_an_age_is_a_timedelta(age: Any, local_db: Connection) -> None:
    table = local_db.create_table("t", [{"id": 1}])
    view = local_db.create_materialized_view("v", table.query().select(["id"]))
    for each in (table, view):
        before = each.version
        for name, call in (
            ("cleanup_older_than", lambda each=each: each.optimize(cleanup_older_than=age)),
            ("older_than", lambda each=each: each.cleanup_old_versions(age)),
            ("older_than", lambda each=each: each.cleanup_checkpoints(age)),
        ):
            with pytest.raises(UserInputError, match=f"^{name} must be a timedelta, such as "):
                call()
        assert each.version == before


@pytest.mark.parametrize("name", [5, None, b"z"])
def test_the_name_of_a_column_is_text(name: Any, table: Table) -> None:
    for source in (udf(f), "id + 1", (udf(f), ["id"])):
        for transforms in ({name: source}, [{name: source}]):
            with pytest.raises(UserInputError, match="A column's name must be a string, not "):
                table.add_columns(transforms)  # type: ignore[arg-type]
    assert table.schema.names == ["id", "y"]
