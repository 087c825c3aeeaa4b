"""SQL against a model: random expressions, spelled in many ways, wherever SQL is taken.

The model computes them in Python. Names are those that planners read in two ways: in two letter
cases, with spaces and quotes, keywords, names of Geneva's own, fields of structs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lance
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geneva import Connection
from geneva.execution.runner import InProcessRunner
from geneva.storage.lance.dataset import fragment_facts
from geneva.storage.lance.matching_rows import read_matching_rows
from geneva.storage.lance.row_ids import read_matching_ids, read_row_ids
from support import connect
from view_support import STABLE

Row = dict[str, Any]
ROWS = 9
NESTED = pa.struct([("b", pa.int64()), ("B", pa.int64()), ("c d", pa.int64())])
NUMBERS = {
    # The column, and other ways to spell it than in backticks and double quotes.
    "x": ["x"],
    "X": ["X"],
    "A": ["A", "a"],
    "a b": [],
    "select": [],
    "__row": ["__row", "__ROW"],
    "c0": ["c0", "C0"],
    "dataset": ["dataset"],
    "😀": [],
    'q"q': [],
}
FIELDS = {
    "b": ["n.b", "N.b", "n['b']", "`n`.b", '"n"."b"', "n . b"],
    "B": ["n.B", "n['B']", "`n`.`B`"],
    "c d": ["n.`c d`", "n['c d']", "`n` [ 'c d' ]"],
}
TEXTS = {"Cap": ["Cap", "cap", "CAP"], "text": ["text", "Text"], "it's": []}
WORDS = ["", "a", "it's", 'say "x"', "-- no", "(", "`x`", "?", "now()", "Ä😀", "interval '1 day'"]


def data() -> pa.Table:
    columns: dict[str, Any] = {"id": list(range(ROWS))}
    for place, name in enumerate(NUMBERS):
        columns[name] = [
            None if (i + place) % 4 == 3 else (i * 7 + place) % 5 - 2 for i in range(ROWS)
        ]
    for place, name in enumerate(TEXTS):
        columns[name] = [
            None if (i + place) % 5 == 2 else WORDS[(i * 3 + place) % len(WORDS)]
            for i in range(ROWS)
        ]
    columns["n"] = pa.array(
        [None if i == 4 else {"b": i, "B": -i, "c d": None if i % 2 else i} for i in range(ROWS)],
        NESTED,
    )
    return pa.table(columns)


@dataclass(frozen=True, slots=True)
class Sql:
    text: str
    value: Callable[[Row], Any]

    def __repr__(self) -> str:
        return self.text


def spelled(name: str, others: list[str]) -> st.SearchStrategy[str]:
    doubled = name.replace('"', '""')
    return st.sampled_from([f"`{name}`", f'"{doubled}"', *others])


def columns_of(known: dict[str, list[str]]) -> st.SearchStrategy[Sql]:
    return st.sampled_from(sorted(known)).flatmap(
        lambda name: spelled(name, known[name]).map(lambda t: Sql(t, lambda row: row[name]))
    )


def fields() -> st.SearchStrategy[Sql]:
    return st.sampled_from(sorted(FIELDS)).flatmap(
        lambda name: st.sampled_from(FIELDS[name]).map(
            lambda t: Sql(t, lambda row: row["n"] and row["n"][name])
        )
    )


def strict(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: None if None in given else function(*given)


def combined(template: str, function: Callable[..., Any], *parts: Sql) -> Sql:
    text = template.format(*(part.text for part in parts))
    return Sql(text, lambda row: function(*(part.value(row) for part in parts)))


def both(a: bool | None, b: bool | None) -> bool | None:
    return False if a is False or b is False else None if a is None or b is None else True


def either(a: bool | None, b: bool | None) -> bool | None:
    return True if a is True or b is True else None if a is None or b is None else False


def made(template: str, function: Callable[..., Any], *parts: Any) -> st.SearchStrategy[Sql]:
    return st.builds(lambda *given: combined(template, function, *given), *parts)


WHITE = ["", " ", "\n", "/* x' */", "-- it's (\n"]
number, text, truth = (st.deferred(lambda s=s: _grown(s)) for s in ("number", "text", "truth"))


def _grown(kind: str) -> st.SearchStrategy[Sql]:
    literal_number = st.integers(-3, 9).map(
        lambda i: Sql(f"({i})" if i < 0 else str(i), lambda _: i)
    )
    literal_text = st.sampled_from(WORDS).map(
        lambda w: Sql("'" + w.replace("'", "''") + "'", lambda _: w)
    )
    small_number = literal_number | columns_of(NUMBERS) | fields()
    small_text = literal_text | columns_of(TEXTS)
    nothing = [made("{0} IS NULL", lambda a: a is None, small_number | small_text)]
    comparisons = {"=": "__eq__", "<": "__lt__", ">=": "__ge__", "<>": "__ne__"}
    if kind == "number":
        return (
            small_number
            | made("({0} + {1})", strict(int.__add__), number, small_number)
            | made("({0} * {1})", strict(int.__mul__), small_number, small_number)
            | made("(- {0})", strict(int.__neg__), small_number)
            | made("coalesce({0}, {1})", lambda a, b: b if a is None else a, number, small_number)
            | made("length({0})", strict(len), text)
            | made(
                "CASE WHEN {0} THEN {1} ELSE {2} END",
                lambda c, a, b: a if c is True else b,
                truth,
                number,
                small_number,
            )
        )
    if kind == "text":
        return (
            small_text
            | made("({0} || {1})", strict(str.__add__), text, small_text)
            | made("lower({0})", strict(str.lower), text)
            | made("substr({0}, 1, 2)", strict(lambda a: a[:2]), text)
            | made("{0}::text", strict(str), small_number)
            | made("cast({0} as varchar)", strict(str), small_number)
            | made(
                "(case when {0} then {1} end)", lambda c, a: a if c is True else None, truth, text
            )
        )
    return st.one_of(
        *nothing,
        *(
            made(
                f"({{0}} {sign} {{1}})",
                strict(lambda a, b, m=m: getattr(a, m)(b)),
                number,
                small_number,
            )
            for sign, m in comparisons.items()
        ),
        made("({0} = {1})", strict(str.__eq__), text, small_text),
        made("({0} IN (1, {1}))", _is_in, small_number, literal_number),
        made("({0} AND {1})", both, truth, truth),
        made("({0} OR {1})", either, truth, truth),
        made("(NOT {0})", strict(lambda a: not a), truth),
    )


def _is_in(a: int | None, b: int) -> bool | None:
    return None if a is None else a in (1, b)


@st.composite
def spaced(draw: st.DrawFn, kind: st.SearchStrategy[Sql]) -> Sql:
    found = draw(kind)
    return Sql(
        draw(st.sampled_from(WHITE)) + found.text + draw(st.sampled_from(WHITE)), found.value
    )


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Connection:
    made = connect(tmp_path_factory.mktemp("sql") / "db", InProcessRunner)
    table = made.create_table("t", data().slice(0, 3), storage_options=STABLE)
    for start in range(3, ROWS, 3):
        table.add(data().slice(start, 3))
    return made


_NAMES = itertools.count()


@pytest.mark.slow
@given(
    condition=spaced(truth),
    columns=st.lists(spaced(number) | spaced(text) | spaced(truth), min_size=1, max_size=4),
)
def test_one_meaning_everywhere(db: Connection, condition: Sql, columns: list[Sql]) -> None:
    rows: list[Row] = data().to_pylist()
    table = db.open_table("t")
    dataset = lance.dataset(table.ref.uri)
    chosen = [row["id"] for row in rows if condition.value(row) is True]
    expected = [
        {"id": i, **{f"s{k}": sql.value(rows[i]) for k, sql in enumerate(columns)}} for i in chosen
    ]

    fragments = [fragment_facts(f.metadata) for f in dataset.get_fragments()]
    for some in (fragments, fragments[1:2]):
        found = read_matching_rows(dataset, some, condition.text)
        got = [f.id * 3 + i for f in some for i in found[f.id].offsets().tolist()]
        assert got == [i for i in chosen if any(f.id == i // 3 for f in some)]
    ids = read_row_ids(dataset, None)
    assert len(read_row_ids(dataset, condition.text)) == len(chosen)
    assert (ids[0] in read_matching_ids(dataset, ids[:1], condition.text)) is (0 in chosen)

    sources = {"id": "id", **{f"s{k}": sql.text for k, sql in enumerate(columns)}}
    query = table.query().where(condition.text).select(sources)
    assert query.to_list() == expected
    name = f"v{next(_NAMES)}"
    view = db.create_materialized_view(name, query)
    view.refresh()
    stored = view.to_arrow().select(list(sources)).sort_by("id").to_pylist()
    db.drop_table(name)
    assert stored == expected
