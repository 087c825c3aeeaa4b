"""Ours have every public method of LanceDB's table and connection, with the same parameters."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import lancedb
import pyarrow as pa
import pytest
from lancedb.db import AsyncConnection as TheirAsync
from lancedb.db import LanceDBConnection
from lancedb.index import BTree
from lancedb.table import AsyncTable as TheirAsyncTable
from lancedb.table import LanceTable

import geneva
from geneva import AsyncConnection, AsyncTable, Connection, MaterializedView, Table

ROOT = Path(__file__).resolve().parents[1]
CONSTRUCTORS = {"create", "open", "from_inner"}
CLASSES = ((Table, LanceTable), (MaterializedView, LanceTable), (Connection, LanceDBConnection))
REFUSED = {"add", "update", "delete", "merge_insert"}
"""A view's rows come from its source."""
OTHER_DEFAULTS = {
    ("search", "query"): "search(None) is a query of Geneva's",
    ("table_names", "limit"): "all of them",
    ("create_materialized_view", "source"): "query= is another word for it",
    ("create_materialized_view", "with_no_data"): "ours are filled by refresh()",
}


def public_methods() -> Iterator[Any]:
    for ours, theirs in CLASSES:
        for name in sorted(n for n in dir(theirs) if not n.startswith("_")):
            if name not in CONSTRUCTORS and not (ours is MaterializedView and name in REFUSED):
                yield pytest.param(ours, theirs, name, id=f"{ours.__name__}.{name}")


def plain(default: Any) -> Any:
    return default.value if isinstance(default, Enum) else default


def by_position(signature: inspect.Signature) -> list[str]:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [name for name, parameter in signature.parameters.items() if parameter.kind is kind]


@pytest.mark.parametrize(("ours", "theirs", "name"), list(public_methods()))
def test_every_method_is_there_with_its_parameters(ours: type, theirs: type, name: str) -> None:
    found = inspect.getattr_static(ours, name)  # not by __getattr__: editors see it as well
    assert name in dir(ours)
    if not inspect.isfunction(inspect.getattr_static(theirs, name)):
        return
    own = inspect.signature(found).parameters
    for parameter in inspect.signature(getattr(theirs, name)).parameters.values():
        assert parameter.name in own, f"{name}({parameter.name}=...)"
        mine = own[parameter.name]
        assert mine.kind == parameter.kind
        if (name, parameter.name) not in OTHER_DEFAULTS:
            assert plain(mine.default) == plain(parameter.default)
    wanted = by_position(inspect.signature(getattr(theirs, name)))
    given = by_position(inspect.signature(found))
    assert given[: len(wanted)] == wanted, "arguments by position mean the same"


ASYNC_CLASSES = ((AsyncTable, Table, TheirAsyncTable), (AsyncConnection, Connection, TheirAsync))


def async_methods() -> Iterator[Any]:
    for own, ours, asynchronous in ASYNC_CLASSES:
        for name in sorted(n for n in dir(asynchronous) if not n.startswith("_")):
            yield pytest.param(own, ours, asynchronous, name, id=f"{own.__name__}.{name}")


@pytest.mark.parametrize(("own", "ours", "asynchronous", "name"), list(async_methods()))
def test_methods_for_an_event_loop_take_their_parameters(
    own: type, ours: type, asynchronous: type, name: str
) -> None:
    """Those that go to Geneva's own methods; all others are LanceDB's coroutines themselves."""
    wanted = inspect.getattr_static(asynchronous, name)
    found = vars(own).get(name) or vars(ours).get(name)
    if not inspect.isfunction(found) or not inspect.isfunction(wanted):
        return
    taken = inspect.signature(found).parameters
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in taken.values()):
        return
    assert inspect.signature(wanted).parameters.keys() <= taken.keys()


@pytest.mark.slow
def test_the_declarations_are_those_of_the_installed_lancedb(tmp_path: Path) -> None:
    target = ROOT / "src/geneva/storage/lance/lancedb_methods.py"
    script = (ROOT / "scripts" / "lancedb-methods").read_text(encoding="utf-8")
    written = tmp_path / target.name
    code = script.replace(
        'TARGET = Path(__file__).parents[1] / "src/geneva/storage/lance/lancedb_methods.py"',
        f"TARGET = Path({str(written)!r})",
    )
    assert code != script
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    subprocess.run([sys.executable, "-"], input=code, text=True, check=True)
    same = written.read_text() == target.read_text(encoding="utf-8")
    assert same, "LanceDB has other methods now: run scripts/lancedb-methods"


def test_a_call_goes_to_lancedb_as_it_was_made(local_db: Connection) -> None:
    table = local_db.create_table("t", [{"id": i, "v": [float(i), 1.0]} for i in range(4)])
    assert table.count_rows("id > 1") == table.count_rows(filter="id > 1") == 2
    table.create_index("id", config=BTree())
    assert [index.columns for index in table.list_indices()] == [["id"]]
    assert table.update(where="id = 1", values={"id": 9}).rows_updated == 1
    assert table.tags.list() == {}
    assert local_db.list_tables().tables == ["t"]
    with pytest.raises(TypeError, match="wrong"):
        table.count_rows(wrong=1)  # type: ignore[call-arg]


def test_what_a_newer_lancedb_has_is_there_too(
    local_db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = local_db.create_table("t", pa.table({"id": [1]}))
    monkeypatch.setattr(LanceTable, "of_tomorrow", lambda self: self.name, raising=False)
    assert table.of_tomorrow() == "t"  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="count_rowz"):
        table.count_rowz()  # type: ignore[attr-defined]


PROGRAM = """
import geneva

db = geneva.connect("db")
table = db.open_table("t")
number: int = table.count_rows()
db.create_table("x", [{"a": 1}]).add([{"a": 2}])
table.count_rowz()
db.create_tabel("x")
db.open_materialized_view("v")
table.count_rows(fliter="a")
"""


TYPED = """
from collections.abc import Iterator
from typing import NamedTuple

import geneva
import pyarrow as pa


@geneva.udf(data_type=pa.list_(pa.float32(), 2))
class Embed:
    def __init__(self, model: str = "small") -> None:
        self.model = model

    def __call__(self, text: str) -> list[float]:
        return [0.0, 1.0]


class Clip(NamedTuple):
    start: int


@geneva.chunker
def clips(text: str) -> Iterator[Clip]:
    yield Clip(1)


@geneva.udtf(output_schema=pa.schema([("n", pa.int64())]))
class Count:
    def __init__(self, times: int = 1) -> None:
        self.times = times

    def __call__(self, rows: geneva.GenevaQueryBuilder) -> Iterator[pa.Table]:
        yield pa.table({"n": [rows.to_arrow().num_rows * self.times]})


db = geneva.connect("db")
table = db.open_table("t")
table.add_columns({"e": Embed("large"), "f": (Embed(), ["text"])})
result = table.backfill("e", udf=Embed("small"))
table.plan_backfill("e", udf=(Embed(), ["text"]))
table.backfill_async("e", udf=Embed()).result()
table.preview(Embed())
db.create_udtf_view("n", source=table.search(None), udtf=Count(2)).refresh()
db.create_udtf_view("c", source=table.search(None), udtf=clips).refresh()
job = db.get_job(result.job_id)
for metric in job.metrics:
    print(metric.name, metric.n, metric["count"])
print(job.metrics[0].name, job.metrics["rows_committed"])
"""


def mypy_says(tmp_path: Path, text: str) -> list[str]:
    """What mypy has to say of a program."""
    program = tmp_path / "program.py"
    program.write_text(text)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    ended = subprocess.run(
        [*command, "--cache-dir", str(ROOT / ".mypy_cache"), str(program)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    return [line for line in ended.stdout.splitlines() if "program.py" in line]


@pytest.mark.slow
def test_programs_of_the_guides_are_typed(tmp_path: Path) -> None:
    assert mypy_says(tmp_path, TYPED) == []


@pytest.mark.slow
def test_a_misspelt_method_is_an_error_of_mypy(tmp_path: Path) -> None:
    lines = mypy_says(tmp_path, PROGRAM)
    errors = {line.split(":")[1]: line for line in lines if ": error:" in line}
    assert list(errors) == ["8", "9", "11"], lines
    assert 'no attribute "count_rowz"' in errors["8"]
    assert 'no attribute "create_tabel"' in errors["9"]
    assert 'Unexpected keyword argument "fliter"' in errors["11"]


def test_a_plain_connection_is_what_they_say(tmp_path: Path) -> None:
    """Nothing of ours breaks when LanceDB's own objects are used beside it."""
    lancedb.connect(tmp_path / "db").create_table("t", pa.table({"id": [1]}))
    assert geneva.connect(tmp_path / "db").open_table("t").count_rows() == 1
