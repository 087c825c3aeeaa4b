"""The parser of SQL: what a name is, what is refused, and what can't hide."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from geneva.errors import ColumnNotFoundError, UserInputError
from geneva.model.sql import ambiguous_name, parse_sql, resolve, with_short_lists

INNER = pa.struct([("k", pa.int8())])
SCHEMA = pa.schema(
    [
        ("x", pa.int64()),
        ("X", pa.int64()),
        ("Cap", pa.string()),
        ("a b", pa.int64()),
        ("day", pa.date32()),
        ("text", pa.string()),
        (
            "s",
            pa.struct(
                [("u", pa.int64()), ("U", pa.int64()), ("in ner", pa.struct([("k", pa.int8())]))]
            ),
        ),
        ("tags", pa.list_(pa.string())),
    ]
)


@pytest.mark.parametrize(
    ("sql", "exact"),
    [
        ('lower("Cap")', "lower(`Cap`)"),
        ("lower(CAP)", "lower(`Cap`)"),
        ("x + X", "x + `X`"),
        ("s.u + s.U", "s.u + `s`['U']"),
        ("S.u", "`s`['u']"),
        ("s['in ner']['k'] + 1", "`s`['in ner']['k'] + 1"),
        ('"a b" -- "x"', '`a b` -- "x"'),
        ("extract(day from DAY)", "extract(day from `day`)"),
        ("cast(text as text) || Text::text", "cast(text as text) || text::text"),
        ("day > date '2020-01-01'", "day > date '2020-01-01'"),
        ("tags[X]", "tags[`X`]"),
        ("'\"Cap\"' || \"Cap\" || 'X'", "'\"Cap\"' || `Cap` || 'X'"),
        ("'é😀\n' || Cap", "'é😀\n' || `Cap`"),
    ],
)
def test_names_become_exact_and_all_else_stays(sql: str, exact: str) -> None:
    found = resolve(parse_sql(sql), SCHEMA)
    assert found.exact() == exact
    again = resolve(parse_sql(exact), SCHEMA)
    assert again.paths == found.paths
    assert again.exact() == exact
    assert ambiguous_name(again.parsed, SCHEMA) is None


@pytest.mark.parametrize(
    ("sql", "hint"),
    [
        ("`CAP`", "Did you mean 'Cap'"),
        ('"cap"', "Did you mean 'Cap'"),
        ("Capp", "Did you mean 'Cap'"),
        ("s.v", "'s.v'"),
        ("x.y", "'x.y'"),
        ("dataset.x", "'dataset'"),
        ("[1][Nope]", "'Nope'"),
    ],
)
def test_names_that_are_not_there(sql: str, hint: str) -> None:
    with pytest.raises(ColumnNotFoundError, match=hint):
        resolve(parse_sql(sql), SCHEMA)


def test_a_name_for_two_columns() -> None:
    schema = pa.schema([("Aa", pa.int64()), ("aA", pa.int64())])
    with pytest.raises(ColumnNotFoundError, match="write `Aa` or `aA`"):
        resolve(parse_sql("aa"), schema)
    assert resolve(parse_sql("aA"), schema).paths == (("aA",),)


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("1=0) OR (1=1", "not one expression"),
        ("x) AS a, (x", "not one expression"),
        ("x, x", "not one expression"),
        ("x; x", "found: ;"),
        ("x AS y", "found: AS"),
        ("x = ?", "stands for a value"),
        ("x = $1", "stands for a value"),
        ("x = :a", "stands for a value"),
        ("SELECT 1", "query of its own"),
        ("x IN (SELECT 1)", "query of its own"),
        ("EXISTS (SELECT 1)", "query of its own"),
        ("sum(x)", r"sum\(\.\.\.\) is made from many rows"),
        ("1 + COUNT(*)", r"COUNT\(\.\.\.\) is made from many rows"),
        ("row_number() OVER (ORDER BY x)", r"row_number\(\.\.\.\) OVER is made from many rows"),
        ("(" * 60 + "x" + ")" * 60, "nested too deeply"),
        ("", "found: its end"),
        ("/* x", "EOF"),
    ],
)
def test_what_is_not_an_expression_of_one_row(sql: str, reason: str) -> None:
    with pytest.raises(UserInputError, match=reason) as caught:
        parse_sql(sql)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("rows", [600, 500_000])
@pytest.mark.parametrize(
    "frame",
    [
        "{0}",
        "/*'*/ {0} /*'*/",
        r"Cap = E'\'' OR {0} OR Cap = 'a'",
        "/* /* */ ' */ {0} -- '",
        "$$'$$ = Cap OR {0} OR Cap = 'a'",
        "`'` = 1 OR {0} OR `'` = 1",
        "-- '\n {0} -- '",
    ],
)
def test_chains_that_would_overflow_a_stack(frame: str, rows: int) -> None:
    with pytest.raises(UserInputError, match="can't be used") as caught:
        parse_sql(frame.format(" OR ".join(["x=1"] * rows)))
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("of", [str, lambda i: f"-{i}", lambda i: f"{i}.5", lambda i: f"'a {i}'"])
def test_lists_may_be_long(of: object) -> None:
    sql = f"x IN ({', '.join(map(of, range(10_000)))}) AND Cap = 'a'"  # type: ignore[call-overload]
    found = resolve(parse_sql(sql), SCHEMA)
    assert found.exact() == sql.replace("AND Cap", "AND `Cap`")


MANY = ", ".join(map(str, range(100)))


@pytest.mark.parametrize(
    ("sql", "planned"),
    [
        (f"x IN ({MANY})", "x IN (10)"),
        (f"x in ( {MANY} ) AND y > 1", "x in (10 ) AND y > 1"),
        (
            f"x IN (-1, 2.5, {MANY}, 10000000000000000000, NULL)",
            "x IN (-1, 2.5, 10000000000000000000, NULL)",
        ),
        (f"x NOT IN ('it''s', {MANY}, 1e3)", "x NOT IN ('it''s', 10, 1e3)"),
        ("x IN (1, 2, 3)", None),
        (f"make_array({MANY})", None),
        (f"x IN ({MANY}, y)", None),
        (f"x = 'IN ({MANY})' OR `IN ({MANY})` > 1", None),
        (f"x IN ({MANY}, random())", None),
    ],
)
def test_lists_are_short_for_planning(sql: str, planned: str | None) -> None:
    assert with_short_lists(sql) == (planned or sql)


@pytest.mark.parametrize(
    ("sql", "part"),
    [
        ("x + random()", "random"),
        ("random/**/()", "random"),
        ('"now"()', "now"),
        ("`Now` ()", "Now"),
        ("CURRENT_DATE", "CURRENT_DATE"),
        ("CASE WHEN x > 1 THEN uuid() END", "uuid"),
        ("tags[now()]", "now"),
        ("x IN (1, random())", "random"),
        ("`_rowid` + 1", "_rowid"),
        ("now + known(1)", None),
        ("'now()' || x", None),
        ("x -- now()", None),
        ('"current_date"', None),
    ],
)
def test_what_has_another_value_tomorrow(sql: str, part: str | None) -> None:
    assert parse_sql(sql).volatile_part() == part


@pytest.mark.parametrize(
    ("sql", "name"),
    [('"x"', '"x"'), ("X > 1", "X"), ("s.U", "U"), ("x > 1", None), ("Cap", None), ("`X`", None)],
)
def test_what_the_first_release_read_in_two_ways(sql: str, name: str | None) -> None:
    assert ambiguous_name(parse_sql(sql), SCHEMA) == name


def test_without_sql_no_parser_is_imported(tmp_path: Path) -> None:
    """Workers, and machines that were given only what functions need, do without it."""
    script = """
import sys
sys.modules["sqloxide"] = None  # an import of it fails
import pyarrow as pa
import geneva
from geneva.execution.runner import InProcessRunner

@geneva.udf
def double(x: int) -> int:
    return 2 * x

db = geneva.connect(sys.argv[1], runner=InProcessRunner)
table = db.create_table("t", pa.table({"x": [1, 2, 3]}))
table.add_columns({"y": double})
table.backfill("y")
view = db.create_materialized_view("v", table.query().select(["x"]).add_column({"z": double}))
view.refresh()
print(table.to_arrow()["y"].to_pylist(), view.to_arrow()["z"].to_pylist())
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[2, 4, 6] [2, 4, 6]", done.stderr
