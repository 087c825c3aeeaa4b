"""Functions that earlier releases stored can be loaded."""

from __future__ import annotations

import io
import types
from enum import Enum, Flag, StrEnum, auto, member
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from geneva import udf
from geneva.udf import declare
from geneva.udf.call import StatefulCallable, UDFArgType
from geneva.udf.chunker import Chunker
from geneva.udf.declare import deserialize_udf, serialize_udf, udf_digest
from geneva.udf.policy import Action, ErrorPolicy, Rule

# What pickles of 0.1 name, seen in pickles of functions, callable classes and chunkers.
NAMED = {
    ("geneva.udf", "UDF"): declare.UDF,
    ("geneva.udf_call", "UDFArgType"): UDFArgType,
    ("geneva.udf_call", "StatefulCallable"): StatefulCallable,
    ("geneva.on_error", "ErrorPolicy"): ErrorPolicy,
    ("geneva.on_error", "Rule"): Rule,
    ("geneva.on_error", "Action"): Action,
    ("geneva.chunker", "Chunker"): Chunker,
}


@pytest.mark.parametrize(("module", "name"), NAMED)
def test_names_of_the_first_release_are_found(module: str, name: str) -> None:
    pickled = f"c{module}\n{name}\n.".encode()
    assert declare._Unpickler(io.BytesIO(pickled)).load() is NAMED[module, name]


def test_a_script_function_behind_lru_cache_travels() -> None:
    """By itself pickle knows it by its name, which the module of a script has on no worker."""
    script = types.ModuleType("__main__")
    code = (
        "from functools import lru_cache\n"
        "@lru_cache(maxsize=3)\n"
        "def model(): return {'k': 5}\n"
        "def scaled(x: int) -> int: return x * model()['k']\n"
    )
    exec(compile(code, "script.py", "exec"), script.__dict__)
    stored = serialize_udf(udf(script.scaled))
    read = deserialize_udf(stored, udf_digest(stored))
    assert read.func(2) == 10
    cached = read.func.__globals__["model"]
    assert cached.cache_parameters() == {"maxsize": 3, "typed": False}
    assert cached() is cached()


@pytest.mark.parametrize("ufunc", [np.add, np.linalg._umath_linalg.det], ids=str)
def test_a_ufunc_of_c_code_travels_by_name(ufunc: np.ufunc) -> None:
    """Numpy says of the ufuncs of other modules, scipy's too, that they are its own."""
    made = udf(lambda x: ufunc, data_type=pa.int64())
    stored = serialize_udf(made)
    assert deserialize_udf(stored, udf_digest(stored)).func(1) is ufunc


class Closed:
    """Answers no questions, as a lazy module or a client without a connection."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"asked for {name}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (Closed, ())


def test_objects_that_are_sent_are_asked_for_nothing() -> None:
    closed = Closed()
    stored = serialize_udf(udf(lambda x: type(closed).__name__, data_type=pa.string()))
    assert deserialize_udf(stored, udf_digest(stored)).func(1) == "Closed"


class Scaled:
    factor = 1

    def __call__(self, x: int) -> int:
        return self.factor * x


class Unit(Enum):
    METRE = 1


def in_unit(x: int) -> str:
    return f"{x} {Unit.METRE.label}"


def stored_and_read(made: declare.UDF) -> declare.UDF:
    data = serialize_udf(made)
    return deserialize_udf(data, udf_digest(data))


def test_functions_of_a_class_that_was_changed_keep_it_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = stored_and_read(udf(Scaled)())
    monkeypatch.setattr(Scaled, "factor", 10)
    data = serialize_udf(udf(Scaled)())
    monkeypatch.setattr(Scaled, "factor", 100)
    second = deserialize_udf(data, udf_digest(data))
    assert (first.func(2), second.func(2), Scaled()(2)) == (2, 20, 200)


def test_the_same_holds_for_an_enum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unit, "label", "m", raising=False)
    first = stored_and_read(udf(in_unit))
    monkeypatch.setattr(Unit, "label", "metres")
    second = stored_and_read(udf(in_unit))
    assert (first.func(2), second.func(2)) == ("2 m", "2 metres")


def test_reading_a_function_changes_nothing_in_what_is_stored_next() -> None:
    data = serialize_udf(udf(Scaled)())
    deserialize_udf(data, udf_digest(data))
    assert serialize_udf(udf(Scaled)()) == data


class Planet(Enum):
    MERCURY = (3.3, 2.4)
    EARTH = (6.0, 6.4)
    HOME = EARTH

    def __init__(self, mass: float, radius: float) -> None:
        self.mass, self.radius = mass, radius

    @property
    def gravity(self) -> float:
        return self.mass / self.radius


class Label(StrEnum):
    CAT = ("cat", "A cat")

    def __new__(cls, name: str, title: str) -> Label:
        made = str.__new__(cls, name)
        made._value_ = name
        made.title_of = title
        return made


class Right(Flag):
    READ = auto()
    WRITE = auto()
    BOTH = READ | WRITE


class Step(Enum):
    TWICE = member(lambda x: 2 * x)
    DOUBLE = member(TWICE)

    def then(self, x: int) -> int:
        return self.value(x) + 1  # type: ignore[no-any-return]


def of_steps(x: int) -> bool:
    return Step["DOUBLE"] is Step.TWICE and Step.DOUBLE.then(x) == 2 * x + 1


def of_planets(x: int) -> bool:
    return Planet["HOME"] is Planet.EARTH and Planet((3.3, 2.4)).gravity == 3.3 / 2.4


def of_labels(x: int) -> str:
    return Label("cat").title_of + Label.CAT


def of_rights(x: int) -> bool:
    return Right.BOTH is Right.READ | Right.WRITE and Right.READ in Right["BOTH"]


def test_enums_travel_with_their_aliases_and_what_their_members_have() -> None:
    assert stored_and_read(udf(of_planets)).func(1)
    assert stored_and_read(udf(of_labels)).func(1) == "A catcat"
    assert stored_and_read(udf(of_rights)).func(1)
    assert stored_and_read(udf(of_steps)).func(1)
