"""Declaring UDFs, fitting them to tables, and sending them to other processes."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import functools
import math
import pickle
import subprocess
import sys
import textwrap
import threading
import types
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Optional, TypedDict

import attrs
import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pytest
from lance.arrow import BFloat16Type

from geneva.errors import (
    ColumnNotFoundError,
    InvalidUDFError,
    TypeMismatchError,
    UDFIntegrityError,
    UserInputError,
)
from geneva.udf.chunker import chunker
from geneva.udf.declare import (
    UDF,
    ResolvedInput,
    UDFArgType,
    deserialize_udf,
    resolve_inputs,
    serialize_udf,
    udf,
    udf_digest,
)
from geneva.udf.table_function import udtf
from geneva.udf.types import holds


class Point(NamedTuple):
    x: int
    y: Optional[float]  # noqa: UP045 - this spelling must work, too


@dataclasses.dataclass
class Box:
    label: str
    corner: Point


class Info(TypedDict):
    width: int
    tags: list[str]


class Node(TypedDict):
    children: list[Node]


# ------------------------------------------------------------------------------ declaring


def test_a_bare_decorator_infers_everything():
    @udf
    def double(x: int) -> int:
        """Twice."""
        return x * 2

    assert isinstance(double, UDF)
    assert double(3) == 6
    assert (double.name, double.data_type, double.arg_type) == (
        "double",
        pa.int64(),
        UDFArgType.SCALAR,
    )
    assert double.input_columns == ["x"]
    assert (double.__name__, double.__doc__) == ("double", "Twice.")
    assert double.__wrapped__ is double.func
    assert repr(double) == "<UDF double(x) -> int64, scalar>"
    assert double.version == double.fingerprint
    assert len(double.fingerprint) == 32


def test_options_are_kept():
    declared = udf(
        lambda text: text,
        data_type="float",
        version="v1",
        name="embed",
        input_columns=["title"],
        num_cpus=0.5,
        num_gpus=0,
        memory=1 << 30,
        batch_size=10,
        checkpoint_size=20,
        min_checkpoint_size=1,
        max_checkpoint_size=100,
        task_size=1000,
        field_metadata={"unit": "m"},
        nullable=False,
    )
    assert declared.version == "v1"
    assert declared.fingerprint != "v1"
    assert declared.data_type == pa.float32()
    assert (declared.num_cpus, declared.num_gpus, declared.memory) == (0.5, 0, 1 << 30)
    assert (declared.batch_size, declared.checkpoint_size, declared.task_size) == (10, 20, 1000)
    assert (declared.min_checkpoint_size, declared.max_checkpoint_size) == (1, 100)
    assert declared.field_metadata == {"unit": "m"}
    assert not declared.nullable
    assert "version='v1'" in repr(declared)


def test_a_field_brings_nullability_and_metadata():
    field = pa.field("ignored", pa.int8(), nullable=False, metadata={"a": "1"})
    declared = udf(lambda x: x, data_type=field, field_metadata={"b": "2"})
    assert declared.data_type == pa.int8()
    assert not declared.nullable
    assert declared.field_metadata == {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"batch_size": 1.5},
        {"checkpoint_size": -1},
        {"task_size": True},
        {"memory": "1g"},
        {"num_cpus": 0},
        {"num_gpus": -0.5},
        {"num_gpus": math.nan},
        {"num_gpus": math.inf},
        {"num_cpus": math.inf},
        {"timeout": math.inf},
        {"timeout": 1e300},
        {"min_checkpoint_size": 5, "max_checkpoint_size": 4},
        {"data_type": "no such type"},
        {"data_type": 7},
        {"input_columns": "x"},
        {"input_columns": []},
        {"input_columns": [1]},
        {"input_columns": ["a", "b"]},
        {"version": True},
        {"version": b"1"},
        {"version": 1.5},
        {"field_metadata": {"dim": 3}},
        {"field_metadata": {3: "dim"}},
        {"field_metadata": "unit"},
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any]):
    with pytest.raises(InvalidUDFError):
        udf(lambda x: x, **{"data_type": pa.int64(), **options})


@pytest.mark.parametrize("several", [False, True])
def test_a_type_that_can_not_be_hashed_is_refused(several: bool):
    kind = BFloat16Type()
    types = {"output_schema": pa.schema({"a": kind})} if several else {"data_type": kind}
    with pytest.raises(InvalidUDFError, match=r"'f' can't fill .*bfloat16.*pa.float32\(\)"):
        udf(**types, name="f")(lambda x: x)


def test_versions_and_metadata_become_text():
    fresh = uuid.uuid4()
    assert udf(lambda x: x, data_type=pa.int64(), version=fresh).version == str(fresh)
    declared = udf(lambda x: x, data_type=pa.int64(), version=3, field_metadata={b"unit": b"m"})
    assert (declared.version, declared.field_metadata) == ("3", {"unit": "m"})
    assert attrs.evolve(declared, version=4).version == "4"
    yields = {"output_schema": pa.schema([("a", pa.int64())])}
    assert chunker(lambda x: [], version=fresh, **yields).version == str(fresh)
    assert udtf(lambda rows: [], version=0, **yields).version == "0"


def test_record_can_be_replaced_but_not_changed():
    declared = udf(lambda x: x, data_type=pa.int64())
    with pytest.raises(dataclasses.FrozenInstanceError):
        declared.name = "other"  # type: ignore[misc]
    assert dataclasses.replace(declared, num_gpus=1).num_gpus == 1
    with pytest.raises(InvalidUDFError):
        dataclasses.replace(declared, num_gpus=-1)


# ------------------------------------------------------------------------------ kinds and inputs


def test_kinds_by_annotation():
    @udf(data_type=pa.int64())
    def arrays(a: pa.Array, b: pa.Int64Array, scale: int = 2) -> pa.Array:
        return a

    @udf(data_type=pa.int64())
    def chunked(a: pa.ChunkedArray) -> pa.Array:
        return a

    @udf(data_type=pa.int64())
    def batch(rows: pa.RecordBatch) -> pa.Array:
        return rows.column(0)

    @udf(data_type=pa.int64())
    def for_checkers(a: pa.Array[pa.Int64Scalar] | None) -> pa.Array:
        return a

    assert (arrays.arg_type, arrays.input_columns) == (UDFArgType.ARRAY, ["a", "b"])
    assert chunked.arg_type is UDFArgType.ARRAY
    assert for_checkers.arg_type is UDFArgType.ARRAY
    assert (batch.arg_type, batch.input_columns) == (UDFArgType.RECORD_BATCH, None)


def test_annotations_that_cannot_be_resolved_are_ignored():
    @udf(data_type=pa.int64())
    def odd(x: NoSuchName) -> AlsoMissing:  # type: ignore[name-defined]  # noqa: F821
        return x

    assert odd.arg_type is UDFArgType.SCALAR
    assert resolve_inputs(odd, pa.schema({"x": pa.string()}))[0].path == "x"


def _mixed(a: pa.Array, b: int): ...
def _array_and_bare(a: pa.Array, b): ...
def _batch_and_more(a: pa.RecordBatch, b: int): ...
def _table(a: pa.Table): ...
def _series(a: pd.Series): ...
def _stars(*columns): ...
def _keywords(a, **more): ...
def _keyword_only(a, *, b): ...
def _only_defaults(a=1): ...
def _nothing(): ...


def _generator(a):
    yield a


async def _async_generator(a):
    yield a


class _UnawaitedSetup:
    async def setup(self): ...

    def __call__(self, a): ...


class _NotCallable: ...


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (_mixed, "mixes pa.Array"),
        (_array_and_bare, "mixes pa.Array"),
        (_batch_and_more, "one pa.RecordBatch|one\npa.RecordBatch|pa.RecordBatch and nothing else"),
        (_table, "pa.RecordBatch"),
        (_series, "pa.Array per column. Its to_pandas"),
        (_stars, "input_columns"),
        (_keywords, "input_columns"),
        (_keyword_only, "keyword-only parameter 'b'"),
        (_only_defaults, "input_columns"),
        (_nothing, "input_columns"),
        (_generator, "generator"),
        (_async_generator, "generator"),
        (_UnawaitedSetup, "setup.. is a coroutine, but its __call__ is not"),
        (_UnawaitedSetup(), "setup.. is a coroutine, but its __call__ is not"),
        (_NotCallable, "no __call__"),
        (_NotCallable(), "needs a callable"),
        (3, "needs a callable"),
        (udf(lambda x: x, data_type=pa.int64()), "already"),
    ],
)
def test_functions_that_cannot_be_udfs(function: Any, words: str):
    with pytest.raises(InvalidUDFError, match=words):
        udf(function, data_type=pa.int64())


def test_star_arguments_take_the_listed_columns():
    declared = udf(lambda *c: sum(c), data_type=pa.int64(), input_columns=["a", "b", "c"])
    assert declared.input_columns == ["a", "b", "c"]
    assert declared(1, 2, 3) == 6


def test_parameters_with_defaults_are_fed_only_by_position():
    def scaled(a, factor=2, b=0):
        return a * factor + b

    assert udf(scaled, data_type=pa.int64()).input_columns == ["a"]
    two = udf(scaled, data_type=pa.int64(), input_columns=["a", "f"])
    assert two.input_columns == ["a", "f"]
    with pytest.raises(InvalidUDFError, match="by position"):
        udf(scaled, data_type=pa.int64(), input_columns=["a", "b"])


def test_columns_that_are_given_later_feed_parameters_with_defaults_too():
    def scaled(a, factors: list[int] = (), b=0):
        return a * sum(factors) + b

    one = udf(scaled, data_type=pa.int64())
    for count in (1, 2, 3):
        columns = ["x", "y", "z"][:count]
        fed, declared = (
            one.with_inputs(columns),
            udf(one.func, data_type=pa.int64(), input_columns=columns),
        )
        assert fed.input_columns == columns
        assert (fed.python_inputs, fed.version) == (declared.python_inputs, declared.version)
        assert fed.with_inputs(["x"]).version == one.version
    with pytest.raises(InvalidUDFError, match="takes 1 input columns"):
        one.with_inputs(["x", "y", "z", "w"])


def test_callables_of_every_make():
    def add(a, b):
        return a + b

    class Adder:
        def __init__(self, n: int) -> None:
            self.n = n

        def __call__(self, value: int) -> int:
            return value + self.n

        def method(self, value: int) -> int:
            return value - self.n

    partial = udf(functools.partial(add, 1), data_type=pa.int64())
    named = udf(functools.partial(add, b=5), data_type=pa.int64())
    method = udf(Adder(2).method)
    instance = udf(Adder(2))
    assert (partial.name, partial.input_columns, partial(1)) == ("add", ["b"], 2)
    assert (named.input_columns, named(1)) == (["a"], 6)
    assert (method.name, method.input_columns, method(5)) == ("method", ["value"], 3)
    assert (instance.name, instance.data_type, instance(5)) == ("Adder", pa.int64(), 7)
    assert udf(lambda x: x, data_type=pa.int64()).name == "lambda"
    assert udf(math.sqrt, data_type=pa.float64(), input_columns=["x"])(4.0) == 2.0


def test_builtins_without_a_signature_need_input_columns():
    with pytest.raises(InvalidUDFError, match="no signature"):
        udf(max, data_type=pa.int64())
    assert udf(max, data_type=pa.int64(), input_columns=["a", "b"])(1, 2) == 2


# ------------------------------------------------------------------------------ stateful


def test_a_decorated_class_is_made_lazily_and_once():
    events: list[str] = []

    @udf(data_type=pa.string())
    class Greet:
        def __init__(self, word: str = "hello") -> None:
            events.append(f"init {word}")
            self.word = word

        def setup(self) -> None:
            events.append("setup")

        def close(self) -> None:
            events.append("close")

        def __call__(self, name: str) -> str:
            return f"{self.word} {name}"

    hi = Greet(word="hi")
    assert isinstance(hi, UDF)
    assert (hi.name, hi.input_columns) == ("Greet", ["name"])
    assert events == []
    assert [hi("ann"), hi("bob")] == ["hi ann", "hi bob"]
    assert events == ["init hi", "setup"]
    hi.func.close()
    assert events == ["init hi", "setup", "close"]
    assert Greet()("you") == "hello you"
    assert Greet.fingerprint == Greet().fingerprint == Greet("hello").fingerprint
    assert Greet("hi").fingerprint == hi.fingerprint != Greet.fingerprint
    with pytest.raises(InvalidUDFError, match="can't be constructed"):
        Greet(nonsense=1)


def test_a_class_that_needs_arguments_says_so_before_any_job():
    @udf(data_type=pa.int64())
    class Add:
        def __init__(self, n: int) -> None:
            self.n = n

        def __call__(self, x: int) -> int:
            return x + self.n

    schema = pa.schema({"x": pa.int64()})
    with pytest.raises(InvalidUDFError, match="missing a required argument: 'n'"):
        resolve_inputs(Add, schema)
    assert resolve_inputs(Add(1), schema) == (ResolvedInput("x", pa.int64(), "x"),)


def test_a_decorated_class_has_what_it_was_written_with():
    yields = {"output_schema": pa.schema([("a", pa.int64())])}
    for decorate in (udf, chunker(**yields), udtf(**yields)):

        @decorate
        class Embed:
            DIM = 3

            def __init__(self, k: int = 2) -> None:
                self.k = k

            @staticmethod
            def tokens(text: str) -> list[str]:
                return text.split()

            @classmethod
            def named(cls) -> str:
                return cls.__name__

            def __call__(self, x: int) -> int:
                return x * self.k

        for made in (Embed, Embed(5)):
            assert (made.DIM, made.tokens("a b"), made.named()) == (3, ["a", "b"], "Embed")
            with pytest.raises(AttributeError, match=r"no (attribute )?'k'"):
                _ = made.k
            assert not hasattr(made, "__array__")
        assert Embed.__call__ is not None
        with pytest.raises(AttributeError):
            _ = udf(lambda x: x, data_type=pa.int64()).DIM
        assert pickle.loads(pickle.dumps(Embed)).DIM == 3


def test_an_object_that_is_made_elsewhere_is_not_here():
    @udf
    class Embed:
        def setup(self) -> None: ...

        @property
        def size(self) -> int:
            return 1

        def __call__(self, x: int) -> int:
            return x

    assert callable(Embed.setup)
    for name in ("setup", "size"):
        with pytest.raises(AttributeError, match="is made where it runs"):
            getattr(Embed(), name)


def test_a_decorated_class_can_be_extended():
    @udf
    class Base:
        FACTOR = 2

        def __call__(self, x: int) -> int:
            return x * self.FACTOR

    @udf
    class Thrice(Base):  # type: ignore[misc,valid-type]
        FACTOR = 3

        def __call__(self, x: int) -> int:
            return super().__call__(x) + 1

    assert (Base()(2), Thrice()(2), _reloaded(Thrice())(2)) == (4, 7, 7)
    plain = udf(lambda x: x, data_type=pa.int64())
    with pytest.raises(InvalidUDFError, match="a class can't be made of it"):

        class Of(plain): ...  # type: ignore[misc,valid-type]


def test_a_property_that_is_kept_travels():
    def made(n: int) -> UDF:
        @udf
        class Cached:
            @functools.cached_property
            def model(self) -> list[int]:
                return [n]

            def __call__(self, x: int) -> int:
                self.model.append(x)
                return len(self.model)

        return Cached()

    assert made(1).version == made(1).version != made(2).version
    there = _reloaded(made(1))
    assert [there(5), there(5)] == [2, 3]


def test_an_instance_with_setup_stays_as_it_was_declared():
    class Model:
        loaded = False

        def setup(self) -> None:
            self.loaded = True

        def __call__(self, x: int) -> bool:
            return self.loaded

    model = Model()
    declared = udf(model)
    before = declared.fingerprint
    assert declared(1) is True
    assert model.loaded is False
    assert declared.fingerprint == before


# ------------------------------------------------------------------------------ type inference


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (int, pa.int64()),
        (float, pa.float64()),
        (str, pa.string()),
        (bytes, pa.binary()),
        (bool, pa.bool_()),
        (datetime.datetime, pa.timestamp("us")),
        (datetime.date, pa.date32()),
        (datetime.time, pa.time64("us")),
        (datetime.timedelta, pa.duration("us")),
        (Optional[int], pa.int64()),  # noqa: UP045
        (int | None, pa.int64()),
        (list[float], pa.list_(pa.float64())),
        (Sequence[str], pa.list_(pa.string())),
        (tuple[int, ...], pa.list_(pa.int64())),
        (list[list[int] | None], pa.list_(pa.list_(pa.int64()))),
        (dict[str, int], pa.map_(pa.string(), pa.int64())),
        (np.float32, pa.float32()),
        (np.int8, pa.int8()),
        (np.bool_, pa.bool_()),
        (np.str_, pa.string()),
        (npt.NDArray[np.float32], pa.list_(pa.float32())),
        (pa.Int64Array, pa.int64()),
        (pa.StringArray, pa.string()),
        (pa.FloatArray, pa.float32()),
        (Literal["a", "b"], pa.string()),
        (Annotated[list[float], pa.list_(pa.float32(), 768)], pa.list_(pa.float32(), 768)),
        (Annotated[int, "a comment"], pa.int64()),
        (pa.float16(), pa.float16()),
        (Point, pa.struct({"x": pa.int64(), "y": pa.float64()})),
        (Info, pa.struct({"width": pa.int64(), "tags": pa.list_(pa.string())})),
        (
            Box,
            pa.struct(
                {"label": pa.string(), "corner": pa.struct({"x": pa.int64(), "y": pa.float64()})}
            ),
        ),
    ],
    ids=str,
)
def test_the_return_annotation_gives_the_type(annotation: Any, expected: pa.DataType):
    def function(x): ...

    function.__annotations__["return"] = annotation
    assert udf(function).data_type == expected


@pytest.mark.parametrize(
    "annotation",
    [
        *(decimal.Decimal, Any, object, list, dict, np.ndarray, np.datetime64, int | str, None),
        *(pa.Array, pa.ListArray, tuple[int, str], Literal[1, "a"], Node, "NoSuchName"),
    ],
    ids=str,
)
def test_unclear_annotations_ask_for_data_type(annotation: Any):
    def function(x): ...

    function.__annotations__["return"] = annotation
    with pytest.raises(InvalidUDFError, match="data_type="):
        udf(function)
    assert udf(function, data_type=pa.int64()).data_type == pa.int64()


def test_batch_functions_are_inferred_from_array_classes_only():
    @udf
    def concrete(x: pa.Array) -> pa.Int32Array:
        return x

    @udf
    def annotated(x: pa.Array) -> Annotated[pa.Array, pa.list_(pa.float32(), 4)]:
        return x

    assert concrete.data_type == pa.int32()
    assert annotated.data_type == pa.list_(pa.float32(), 4)
    with pytest.raises(InvalidUDFError, match="of a batch"):

        @udf
        def unclear(x: pa.Array) -> list[float]:
            return []


# ------------------------------------------------------------------------------ fitting a table

SCHEMA = pa.schema(
    {
        "text": pa.string(),
        "number": pa.int32(),
        "flag": pa.bool_(),
        "ratio": pa.float32(),
        "raw": pa.large_binary(),
        "when": pa.timestamp("us", "UTC"),
        "vector": pa.list_(pa.float32(), 4),
        "words": pa.large_list(pa.string()),
        "category": pa.dictionary(pa.int32(), pa.string()),
        "price": pa.decimal128(10, 2),
        "meta": pa.struct({"width": pa.int64(), "deep": pa.struct({"x.y": pa.int8()})}),
        "a.b": pa.int16(),
    }
)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("text", ResolvedInput("text", pa.string(), "text")),
        ("meta.width", ResolvedInput("meta.width", pa.int64(), "meta")),
        ("meta.deep.x.y", ResolvedInput("meta.deep.x.y", pa.int8(), "meta")),
        ("a.b", ResolvedInput("a.b", pa.int16(), "a.b")),
        ("`text`", ResolvedInput("text", pa.string(), "text")),
        ("meta.`width`", ResolvedInput("meta.width", pa.int64(), "meta")),
        ("`meta`.deep.`x.y`", ResolvedInput("meta.deep.x.y", pa.int8(), "meta")),
        ("`a.b`", ResolvedInput("a.b", pa.int16(), "a.b")),
    ],
)
def test_inputs_are_found_by_path(path: str, expected: ResolvedInput):
    declared = udf(lambda x: x, data_type=pa.int64()).with_inputs([path])
    assert resolve_inputs(declared, SCHEMA) == (expected,)


def test_a_path_that_leads_to_two_fields_is_refused():
    kind = pa.struct({"x": pa.struct({"y": pa.int8()}), "x.y": pa.int8()})
    declared = udf(lambda x: x, data_type=pa.int64())
    for path in ("st.x.y", "st.`x.y`", "st.x.`y`"):
        with pytest.raises(UserInputError, match=r"several fields \(`st`.`x`.`y`, `st`.`x.y`\)"):
            resolve_inputs(declared.with_inputs([path]), pa.schema({"st": kind}))
    for path in ("meta.`deep.x`.y", "meta.deep.`x`.y", "meta.`", "`meta`deep", "meta.``"):
        with pytest.raises(ColumnNotFoundError):
            resolve_inputs(declared.with_inputs([path]), SCHEMA)


def test_a_missing_column_is_explained():
    declared = udf(lambda txet, meta_width: 1, data_type=pa.int64())
    with pytest.raises(ColumnNotFoundError) as caught:
        resolve_inputs(declared, SCHEMA)
    message = str(caught.value)
    assert message.startswith(
        "UDF expects input columns ['txet', 'meta_width'] which are not found in table schema: "
        "['text', 'number'"
    )
    assert "Did you mean 'text'?" in message
    assert "Did you mean 'meta.width'?" in message
    assert "input_columns" in message
    assert '(udf, ["actual_column_name"])' in message
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("annotation", "fits", "clashes"),
    [
        (str, ["text", "category"], ["number", "raw", "vector"]),
        (int, ["number", "flag"], ["text", "ratio", "price"]),
        (float, ["ratio", "number"], ["text", "price"]),
        (bool, ["flag"], ["number"]),
        (bytes, ["raw"], ["text"]),
        (datetime.datetime, ["when"], ["text", "number"]),
        (decimal.Decimal, ["price"], ["ratio"]),
        (list[float], ["vector"], ["words", "text"]),
        (list[str], ["words"], ["vector"]),
        (np.ndarray, ["vector", "words"], ["ratio"]),
        (npt.NDArray[np.float32], ["vector"], ["meta"]),
        (dict, ["meta"], ["text"]),
        (Info, ["meta"], ["number"]),
        (np.float32, ["ratio", "number"], ["text"]),
        (Optional[str], ["text"], ["number"]),  # noqa: UP045
        (int | str, ["text", "number"], ["raw"]),
        (Any, SCHEMA.names, []),
        (object, SCHEMA.names, []),
        (Point, ["meta"], []),
    ],
    ids=str,
)
def test_parameter_annotations_are_checked(annotation: Any, fits: list[str], clashes: list[str]):
    def function(value): ...

    function.__annotations__["value"] = annotation
    declared = udf(function, data_type=pa.int64())
    for column in fits:
        resolve_inputs(declared.with_inputs([column]), SCHEMA)
    for column in clashes:
        with pytest.raises(TypeMismatchError, match=f"Type mismatch for column {column}: "):
            resolve_inputs(declared.with_inputs([column]), SCHEMA)


def test_array_annotations_are_checked_where_they_say_something():
    def strings(value: pa.StringArray): ...
    def anything(value: pa.Array): ...

    typed, generic = udf(strings, data_type=pa.int64()), udf(anything, data_type=pa.int64())
    resolve_inputs(typed.with_inputs(["text"]), SCHEMA)
    with pytest.raises(TypeMismatchError, match="StringArray"):
        resolve_inputs(typed.with_inputs(["number"]), SCHEMA)
    for column in SCHEMA.names:
        resolve_inputs(generic.with_inputs([column]), SCHEMA)


def test_a_record_batch_function_reads_all_unless_it_says_what():
    def rows(batch: pa.RecordBatch): ...

    declared = udf(rows, data_type=pa.int64())
    assert [f.path for f in resolve_inputs(declared, SCHEMA)] == SCHEMA.names
    found = resolve_inputs(declared.with_inputs(["text", "number"]), SCHEMA)
    assert [f.path for f in found] == ["text", "number"]


def test_renaming_inputs_keeps_the_version():
    declared = udf(lambda a, b: a + b, data_type=pa.int64())
    renamed = declared.with_inputs(["x", "y"])
    assert renamed.input_columns == ["x", "y"]
    assert renamed.version == declared.version
    with pytest.raises(InvalidUDFError, match="takes 2 input columns"):
        declared.with_inputs(["x"])


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (pa.large_string(), pa.string()),
        (pa.string(), pa.large_string()),
        (pa.binary(), pa.binary(4)),
        (pa.int64(), pa.int32()),
        (pa.int16(), pa.uint8()),
        (pa.float64(), pa.float32()),
        (pa.float64(), pa.int32()),
        (pa.string(), pa.dictionary(pa.int8(), pa.string())),
        (pa.dictionary(pa.int8(), pa.string()), pa.string()),
        (pa.large_list(pa.float32()), pa.list_(pa.field("other", pa.float32()))),
        (pa.list_(pa.float32()), pa.list_(pa.float32(), 3)),
        (pa.list_(pa.float32(), 3), pa.list_(pa.float32())),
        (pa.struct({"a": pa.int64()}), pa.struct({"a": pa.int8()})),
        (pa.map_(pa.string(), pa.int64()), pa.map_(pa.string(), pa.int32())),
        (pa.timestamp("ns", "UTC"), pa.timestamp("us", "UTC")),
        (pa.decimal128(12, 3), pa.decimal128(10, 2)),
        (pa.float32(), pa.null()),
    ],
    ids=str,
)
def test_holding_is_one_way_unless_only_the_layout_differs(
    target: pa.DataType, source: pa.DataType
):
    assert holds(target, source)


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (pa.int64(), pa.float64()),
        (pa.float32(), pa.float64()),
        (pa.int32(), pa.int64()),
        (pa.int8(), pa.uint8()),
        (pa.uint64(), pa.int8()),
        (pa.float32(), pa.int32()),
        (pa.string(), pa.binary()),
        (pa.binary(), pa.string()),
        (pa.string(), pa.int64()),
        (pa.int8(), pa.bool_()),
        (pa.list_(pa.float32(), 3), pa.list_(pa.float32(), 4)),
        (pa.list_(pa.float32()), pa.list_(pa.float64())),
        (pa.struct({"a": pa.int64()}), pa.struct({"b": pa.int64()})),
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.timestamp("us"), pa.timestamp("ns")),
        (pa.date32(), pa.timestamp("us")),
        (pa.decimal128(10, 2), pa.decimal128(10, 3)),
    ],
    ids=str,
)
def test_nothing_is_held_that_could_be_lost(target: pa.DataType, source: pa.DataType):
    assert not holds(target, source)


# ------------------------------------------------------------------------------ as bytes


def _reloaded(declared: UDF) -> UDF:
    data = serialize_udf(declared)
    return deserialize_udf(data, udf_digest(data))


def test_a_udf_survives_the_journey():
    offset = 10
    declared = udf(lambda x: x + offset, data_type=pa.int64(), num_gpus=1, version="7")
    loaded = _reloaded(declared)
    assert loaded(1) == 11
    assert loaded.pinned_fingerprint == declared.fingerprint
    for field in dataclasses.fields(UDF):
        if field.name not in ("func", "pinned_fingerprint"):
            assert getattr(loaded, field.name) == getattr(declared, field.name)
    assert pickle.loads(pickle.dumps(declared))(1) == 11


def test_a_loaded_udf_never_computes_its_fingerprint_again(monkeypatch: pytest.MonkeyPatch):
    loaded = _reloaded(udf(lambda x: x, data_type=pa.int64()))
    module = sys.modules["geneva.udf.declare"]
    monkeypatch.setattr(module, "fingerprint", lambda *_: pytest.fail("computed again"))
    assert len(loaded.version) == 32
    assert loaded.with_inputs(["y"]).version == loaded.version
    assert _reloaded(loaded).version == loaded.version


@udf
def factorial(n: int) -> int:
    return 1 if n < 2 else n * factorial(n - 1)


def test_a_recursive_udf_can_be_pickled():
    assert _reloaded(factorial)(5) == 120
    assert pickle.loads(pickle.dumps(factorial))(5) == 120


def test_a_live_object_stays_behind():
    made: list[str] = []

    @udf(data_type=pa.int64())
    class Locked:
        def __init__(self) -> None:
            made.append("made")
            self.lock = threading.Lock()

        def __call__(self, x: int) -> int:
            with self.lock:
                return x

    bound = Locked()
    assert bound(1) == 1
    assert made == ["made"]
    assert _reloaded(bound)(2) == 2


def test_altered_bytes_are_never_unpickled(monkeypatch: pytest.MonkeyPatch):
    data = serialize_udf(factorial)
    monkeypatch.setattr("cloudpickle.loads", lambda _: pytest.fail("unpickled"))
    with pytest.raises(UDFIntegrityError, match="not run"):
        deserialize_udf(data + b"x", udf_digest(data))
    with pytest.raises(InvalidUDFError, match="no UDF"):
        deserialize_udf(b"rubbish", udf_digest(b"rubbish"))
    older = data.replace(b"python=3.", b"python=3.9", 1)
    with pytest.raises(InvalidUDFError, match=r"was defined with Python 3\.9"):
        deserialize_udf(older, udf_digest(older))


LOCK = threading.Lock()


def _helper(x: int) -> int:
    with LOCK:
        return x


def test_what_cannot_be_sent_is_named():
    lock = threading.Lock()

    def closes_over(x: int) -> int:
        with lock:
            return x

    with pytest.raises(InvalidUDFError, match="closure variable 'lock' is a lock"):
        serialize_udf(udf(closes_over))
    with pytest.raises(InvalidUDFError, match="global '_helper' -> global 'LOCK' is a lock"):
        serialize_udf(udf(lambda x: _helper(x), data_type=pa.int64()))


def test_what_an_object_holds_is_named():
    class Model:
        def __init__(self, lock: Any) -> None:
            self.lock = lock

        def __call__(self, x: int) -> int:
            return x

    with pytest.raises(InvalidUDFError, match="attribute 'lock' is a lock"):
        serialize_udf(udf(Model(threading.Lock())))
    with pytest.raises(InvalidUDFError, match="constructor argument 0 is a lock"):
        serialize_udf(udf(Model)(threading.Lock()))


def _python(code: str, *arguments: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_process_without_the_users_files_can_run_it(tmp_path: Path):
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    (project / "mathematics.py").write_text("FACTOR = 3\ndef times(x):\n    return x * FACTOR\n")
    (project / "mine.py").write_text(
        "import mathematics\nfrom mathematics import times\nfrom geneva.udf import udf\n"
        "@udf\ndef both(x: int) -> int:\n    return times(x) + mathematics.times(x)\n"
    )
    stored = tmp_path / "udf.bin"
    digest = _python(
        """
        import sys, mine, cloudpickle
        from geneva.udf.declare import serialize_udf, udf_digest
        data = serialize_udf(mine.both)
        assert not cloudpickle.list_registry_pickle_by_value()
        open(sys.argv[1], "wb").write(data)
        print(udf_digest(data))
        """,
        str(stored),
        cwd=project,
    )
    result = _python(
        """
        import sys
        from geneva.udf.declare import deserialize_udf
        loaded = deserialize_udf(open(sys.argv[1], "rb").read(), sys.argv[2])
        print(loaded(7), loaded.name)
        """,
        str(stored),
        digest,
        cwd=elsewhere,
    )
    assert result == "42 both"


def test_only_what_is_taken_from_a_module_is_sent():
    module = types.ModuleType("their_helpers")
    module.__file__ = "/somewhere/their_helpers.py"
    code = "import threading\nlock = threading.Lock()\nN = 2\ndef times(x): return x * N"
    exec(code, module.__dict__)
    sys.modules["their_helpers"] = module
    their_helpers = module
    try:
        used = udf(_call_helper, data_type=pa.int64())
        used.func.__globals__["their_helpers"] = their_helpers
        data = serialize_udf(used)
        table = udf({"t": module.times}.get, data_type=pa.int64(), input_columns=["x"])
        assert _reloaded(table)("t")(3) == 6
    finally:
        del sys.modules["their_helpers"], _call_helper.__globals__["their_helpers"]
    assert deserialize_udf(data, udf_digest(data))(4) == 8


def _call_helper(x):
    return their_helpers.times(x)  # noqa: F821


def test_a_module_that_is_used_as_a_whole_is_sent_as_a_whole():
    module = types.ModuleType("their_whole_helpers")
    module.__file__ = "/somewhere/their_whole_helpers.py"
    exec("N = 2\ndef times(x): return x * N\ndef plus(x): return x + N", module.__dict__)
    sys.modules["their_whole_helpers"] = module

    def both(x: int, other: Any = module) -> int:
        return their_helpers.times(x) + other.plus(x)  # noqa: F821

    def closes_over(x: int) -> int:
        return their_helpers.times(x) + module.plus(x)  # noqa: F821

    globals()["their_helpers"] = module
    try:
        stored = [serialize_udf(udf(f, input_columns=["x"])) for f in (both, closes_over)]
    finally:
        del sys.modules["their_whole_helpers"], globals()["their_helpers"]
    for data in stored:
        assert deserialize_udf(data, udf_digest(data))(4) == 14


def test_a_missing_module_is_explained():
    module = types.ModuleType("not_installed_here")
    module.__file__ = f"{np.__path__[0]}/not_installed_here.py"  # as if it were installed
    exec("def f(x): return x", module.__dict__)
    sys.modules["not_installed_here"] = module
    try:
        data = serialize_udf(udf(functools.partial(module.f), data_type=pa.int64()))
    finally:
        del sys.modules["not_installed_here"]
    with pytest.raises(InvalidUDFError, match="Module 'not_installed_here' is missing here"):
        deserialize_udf(data, udf_digest(data))


def test_what_a_parameter_gets_by_its_annotation_counts():
    def bare(v):
        return len(v * 2)

    def listed(v: list[float]):
        return len(v * 2)

    def number(v: float):
        return len(v * 2)

    bare_version, other, plain = (
        udf(f, data_type=pa.int64(), name="f").version for f in (bare, listed, number)
    )
    assert bare_version == plain, "what it gets is the same"
    assert other != bare_version
