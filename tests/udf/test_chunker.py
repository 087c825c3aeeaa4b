"""Chunkers: functions that make several rows of one, which to the engine are UDFs of lists."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple, TypedDict

import numpy as np
import pyarrow as pa
import pytest

from geneva import udf
from geneva.errors import InvalidUDFError, UDFError
from geneva.execution.apply.batch import Applier
from geneva.udf.chunker import Chunker, chunker
from geneva.udf.declare import deserialize_udf, resolve_inputs, serialize_udf, udf_digest

SCHEMA = pa.schema([("start", pa.int64()), ("text", pa.string())])
STRUCT = pa.struct(list(SCHEMA))


@dataclasses.dataclass
class Word:
    start: int
    text: str


class WordDict(TypedDict):
    start: int
    text: str


class WordTuple(NamedTuple):
    start: int
    text: str


def applied(made: Chunker, *values: Any) -> list[Any]:
    """What a worker gets, after the function went there."""
    data = serialize_udf(made.udf)
    loaded = deserialize_udf(data, udf_digest(data))
    assert loaded.fingerprint == made.version
    batch = pa.record_batch([pa.array(list(values), pa.string())], names=["body"])
    with Applier(loaded, pa.field("chunks", loaded.data_type)) as applier:
        return applier.apply(batch).to_pylist()


def as_dataclasses(body: str) -> Iterator[Word]:
    for start, text in enumerate(body.split()):
        yield Word(start, text)


def as_dicts(body: str) -> Iterator[WordDict]:
    for start, text in enumerate(body.split()):
        yield {"start": start, "text": text}


def as_named_tuples(body: str) -> list[WordTuple]:
    return [WordTuple(start, text) for start, text in enumerate(body.split())]


def as_tuples(body: str) -> Any:
    return enumerate(body.split())


def as_arrays(body: pa.Array) -> Any:
    return [as_named_tuples(text) for text in body.to_pylist()]


@pytest.mark.parametrize("written", [as_dataclasses, as_dicts, as_named_tuples])
def test_the_columns_are_those_of_the_annotation(written: Callable[..., Any]) -> None:
    made = chunker(written)
    assert made.output_schema == SCHEMA
    assert made.udf.data_type == pa.list_(STRUCT)
    assert made.name == written.__name__
    words = [{"start": 0, "text": "a"}, {"start": 1, "text": "b"}]
    assert applied(made, "a b", "", "a b") == [words, [], words]


@pytest.mark.parametrize("given", [{"output_schema": SCHEMA}, {"output_schema": list(SCHEMA)}])
@pytest.mark.parametrize("written", [as_tuples, as_dicts, as_arrays])
def test_the_columns_are_given(written: Callable[..., Any], given: dict[str, Any]) -> None:
    made = chunker(**given)(written)
    assert made.output_schema == SCHEMA
    assert applied(made, "a") == [[{"start": 0, "text": "a"}]]


@pytest.mark.parametrize("kind", [STRUCT, pa.list_(STRUCT)])
def test_the_columns_are_given_as_a_type(kind: pa.DataType) -> None:
    assert chunker(data_type=kind)(as_tuples).output_schema == SCHEMA


def test_none_is_no_row() -> None:
    @chunker(output_schema=SCHEMA)
    def nothing(body: str) -> Any:
        return None

    assert applied(nothing, "a", "b") == [[], []]


class TestWhatIsUsedAgain:
    """What a chunker yields is stored as it was then, and what it gets is its own."""

    SCHEMA = pa.schema([("pair", pa.list_(pa.int64(), 2))])

    def test_an_array(self) -> None:
        def count(body: str) -> Iterator[dict[str, Any]]:
            pair = np.empty(2, np.int64)
            for place in range(3):
                pair[:] = place
                yield {"pair": pair}

        made = chunker(count, output_schema=self.SCHEMA)
        assert applied(made, "a") == [[{"pair": [i, i]} for i in range(3)]]

    def test_a_row(self) -> None:
        async def count(body: str) -> AsyncIterator[dict[str, Any]]:
            row: dict[str, Any] = {}
            for place in range(3):
                row["pair"] = [place, place]
                yield row

        made = chunker(count, output_schema=self.SCHEMA)
        assert applied(made, "a") == [[{"pair": [i, i]} for i in range(3)]]

    def test_the_memory_of_a_batch(self) -> None:
        @chunker(batch=True, output_schema=self.SCHEMA, input_columns=["body"])
        class Lengths:
            def __init__(self) -> None:
                self.pair = np.empty(2, np.int64)

            def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
                self.pair[:] = len(batch["body"][0].as_py())
                pairs = pa.FixedSizeListArray.from_arrays(pa.array(self.pair), 2)
                return pa.record_batch({"pair": pairs})

        assert applied(Lengths(), "a", "bb") == [[{"pair": [1, 1]}], [{"pair": [2, 2]}]]

    def test_the_inputs_of_a_batch(self) -> None:
        def letters(batch: pa.RecordBatch) -> pa.RecordBatch:
            ends = np.frombuffer(batch["body"].buffers()[1], np.int32)
            parents = range(batch.num_rows)
            pairs = [[ends[0], ends[i + 1] - ends[i]] for i in parents]
            return pa.record_batch({"parent_row": pa.array(parents), "pair": pairs})

        made = chunker(letters, batch=True, output_schema=self.SCHEMA, input_columns=["body"])
        found = applied(made, "a", "bb", "ccc")
        assert found == [[{"pair": [0, 1]}], [{"pair": [0, 2]}], [{"pair": [0, 3]}]]


def test_it_is_still_callable() -> None:
    made = chunker(as_dicts)
    assert made("a b") == [{"start": 0, "text": "a"}, {"start": 1, "text": "b"}]


@chunker(output_schema=SCHEMA)
class Splitter:
    def __init__(self, separator: str) -> None:
        self.separator, self.state = separator, "new"

    def setup(self) -> None:
        self.state = "set up"

    def __call__(self, body: str) -> Iterator[tuple[int, str]]:
        for start, text in enumerate(body.split(self.separator)):
            yield start, f"{text} {self.state}"


def test_a_class_is_made_once_where_it_works() -> None:
    commas, semicolons = Splitter(","), Splitter(";")
    assert isinstance(commas, Chunker)
    assert applied(commas, "a,b;c") == [
        [{"start": 0, "text": "a set up"}, {"start": 1, "text": "b;c set up"}]
    ]
    assert applied(semicolons, "a") == [[{"start": 0, "text": "a set up"}]]
    assert Splitter(",").version == commas.version != semicolons.version
    commas.check_bound()
    with pytest.raises(InvalidUDFError, match="separator"):
        Splitter.check_bound()


def test_the_version_is_that_of_the_function() -> None:
    made = chunker(as_dicts)
    assert chunker(as_dicts).version == made.version
    assert chunker(as_dataclasses).version != made.version
    assert chunker(as_dicts, version="7").version == "7"

    @chunker(output_schema=SCHEMA)
    def shorter(body: str) -> Any:
        return []

    @chunker(output_schema=SCHEMA)
    def longer(body: str) -> Any:
        return [(1, "")]

    assert shorter.version != longer.version


def test_the_inputs_are_the_functions() -> None:
    made = chunker(as_dicts)
    assert made.udf.input_columns == ["body"]
    assert made.with_inputs(["page.text"]).udf.input_columns == ["page.text"]
    assert chunker(as_tuples, output_schema=SCHEMA, input_columns=["t"]).udf.input_columns == ["t"]
    with pytest.raises(TypeError, match="str"):
        resolve_inputs(made.udf, pa.schema([("body", pa.int64())]))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([None], "None"),
        ("text", "str"),
        ({"start": 1}, "dict"),
        ([(1,)], "one value for each"),
        ([{"end": 1}], "end"),
        ([{"start": "x"}], "start|int|str"),
    ],
)
def test_rows_that_do_not_fit_are_the_functions_failure(rows: Any, message: str) -> None:
    @chunker(output_schema=SCHEMA)
    def wrong(body: str) -> Any:
        return rows

    with pytest.raises(UDFError, match=message):
        applied(wrong, "a")


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: chunker(as_tuples), "columns of its rows"),
        (lambda: chunker(lambda body: []), "columns of its rows"),
        (lambda: chunker(as_dicts, data_type=pa.int64()), "struct"),
        (lambda: chunker(as_dicts, data_type=pa.struct([])), "one or more"),
        (lambda: chunker(as_dicts, output_schema=7), "output_schema"),
        (lambda: chunker(as_dicts, output_schema=SCHEMA, data_type=STRUCT), "not both"),
        (lambda: chunker(as_dicts, nullable=False), "nullable"),
        (lambda: chunker(chunker(as_dicts)), "already"),
        (lambda: chunker(udf(data_type=pa.int64())(len_of)), "already"),
        (lambda: chunker(7, output_schema=SCHEMA), "callable"),
    ],
)
def test_wrong_declarations_say_what_is_wrong(declare: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidUDFError, match=message):
        declare()


def len_of(body: str) -> int:
    return len(body)


def test_batches_are_record_batches() -> None:
    schema = pa.schema([("text", pa.string())])

    def array(text: pa.Array) -> pa.RecordBatch:
        raise AssertionError

    def two(text: pa.RecordBatch, other: pa.RecordBatch) -> pa.RecordBatch:
        raise AssertionError

    def none() -> pa.RecordBatch:
        raise AssertionError

    def an_option_missing(batch: pa.RecordBatch, *, option: int) -> pa.RecordBatch:
        raise AssertionError

    for refused in (array, two, none, an_option_missing):
        with pytest.raises(
            InvalidUDFError,
            match=rf"one argument, a pa\.RecordBatch, and it is declared as {refused.__name__}\(",
        ):
            chunker(refused, batch=True, output_schema=schema)

    def plain(batch, more=None):  # type: ignore[no-untyped-def]
        raise AssertionError

    def options(batch, **options):  # type: ignore[no-untyped-def]
        raise AssertionError

    def anything(batch: object) -> pa.RecordBatch:
        raise AssertionError

    def optional(batch: pa.RecordBatch | None, *more: int) -> pa.RecordBatch:
        raise AssertionError

    def places(*batches: pa.RecordBatch) -> pa.RecordBatch:
        raise AssertionError

    for taken in (plain, options, anything, optional, places, functools.partial(two, None)):
        assert chunker(taken, batch=True, output_schema=schema).batch
