"""Fingerprints: equal where the meaning is equal, in any process; different where it can differ."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import datetime
import decimal
import enum
import functools
import logging
import math
import os
import pathlib
import random
import re
import sys
import textwrap
import threading
import types
import uuid
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geneva.udf.chunker import RowsFunction
from geneva.udf.identity.fingerprint import fingerprint
from geneva.udf.identity.user_code import is_user_module
from workshop import Workshop, of, value_of

PLAIN = """
    SCALE = 2
    def helper(x):
        return x + 1
    def f(x, k=3):
        return helper(x) * SCALE + k
"""

SAME = {
    "moved, commented, documented": '''
        import os


        # a comment
        SCALE = 1 + 1
        def helper(x):
            """Say what it does."""
            return (x + 1)  # and why
        OTHER = 7
        def f(
            x,
            k=3,
        ):
            """Document."""
            # A comment.

            return helper(x) * SCALE + k
    ''',
    "annotated": """
        from __future__ import annotations
        SCALE: int = 2
        def helper(x: int) -> int:
            return x + 1
        def f(x: int, k: "int | None" = 3) -> float:
            return helper(x) * SCALE + k
    """,
    "annotated with a class that is called AnnotatedList": """
        from __future__ import annotations
        SCALE: int = 2
        class AnnotatedList(list): ...
        def helper(x: AnnotatedList[int]) -> NotAnnotated[int]:
            return x + 1
        def f(x: AnnotatedList, k=3) -> Annotated:
            return helper(x) * SCALE + k
    """,
    "helper below": """
        SCALE = 2
        def f(x, k=3):
            return helper(x) * SCALE + k
        def helper(x):
            return x + 1
    """,
    "default spelled otherwise": """
        SCALE = 2
        def helper(x):
            return x + 1
        def f(x, k=2 + 1):
            return helper(x) * SCALE + k
    """,
}

DIFFERENT = {
    "other constant": PLAIN.replace("SCALE = 2", "SCALE = 2.0"),
    "other helper": PLAIN.replace("x + 1", "x + 2"),
    "other default": PLAIN.replace("k=3", "k=4"),
    "other body": PLAIN.replace("+ k", "- k"),
    "other order of parameters": PLAIN.replace("x, k=3", "k, x=3"),
}


@pytest.mark.parametrize("source", SAME.values(), ids=SAME)
def test_what_does_not_matter(workshop: Workshop, source: str):
    assert workshop.f(source) == workshop.f(PLAIN)


@pytest.mark.parametrize("source", DIFFERENT.values(), ids=DIFFERENT)
def test_what_matters(workshop: Workshop, source: str):
    assert workshop.f(source) != workshop.f(PLAIN)
    assert workshop.without_source(source) != workshop.without_source(PLAIN)


@pytest.mark.parametrize("source", SAME.values(), ids=SAME)
def test_bytecode_alone_is_as_good(workshop: Workshop, source: str):
    assert workshop.without_source(source) == workshop.without_source(PLAIN)


def test_types_and_the_way_of_calling_matter():
    def f(x):
        return x

    assert fingerprint(f, pa.int64()) != fingerprint(f, pa.int32())
    assert fingerprint(f, pa.list_(pa.float32(), 3)) != fingerprint(f, pa.list_(pa.float32(), 4))
    assert fingerprint(f, pa.int64(), "scalar") != fingerprint(f, pa.int64(), "array")
    assert re.fullmatch(r"[0-9a-f]{32}", fingerprint(f, pa.int64()))


def test_the_functions_own_name_does_not_matter(workshop: Workshop):
    module = workshop.load("def f(x):\n    return x + 1\ndef g(x):\n    return x + 1\n")
    assert of(module.f) == of(module.g)


# ------------------------------------------------------------------------------ other processes

SCRIPT = """
    import collections, enum, math, re
    import numpy as np
    import helpers
    from helpers import Config
    LIMITS = {"low": 1, "high": {3, 1, 2}, "names": frozenset({"x", "y", "z"})}
    PATTERN = re.compile("a+", re.I)
    class Kind(enum.Enum):
        A = 1
    class Base:
        factor = 2
        def scaled(self, x):
            return x * self.factor
    class Child(Base):
        def scaled(self, x):
            return super().scaled(x) + 1
    Pair = collections.namedtuple("Pair", "a b", defaults=[1])
    def pick(n):
        return lambda x: x in {"a", "b", "c"} or n
    def f(x, kind=Kind.A, config=Config(3)):
        def inner(y):
            return y if y in {"one", "two", "three"} else helpers.clean(y)
        total = sum(v for v in [1, 2, 3] if v in LIMITS["high"])
        label = f"{x!r:>{total}} {kind}"
        if PATTERN.match(label):
            return np.sqrt(total) + Pair(1).b + Child().scaled(total)
        try:
            return inner(x), math.pi, pick(3), [a + b for a, b in zip("ab", "cd")]
        except (KeyError, ValueError) as error:
            raise RuntimeError("no") from error
        finally:
            total = 0
    import pyarrow as pa
    from geneva.udf.identity.fingerprint import fingerprint
    PRINTED = fingerprint(f, pa.int64())
    if __name__ == "__main__":
        print(PRINTED)
"""

HELPERS = """
    import dataclasses
    @dataclasses.dataclass(frozen=True)
    class Config:
        size: int
        names: tuple = ("a",)
    WORDS = {"the", "a", "an"}
    def clean(text):
        return [w for w in text.split() if w not in WORDS]
"""


@pytest.mark.slow
def test_every_process_agrees(workshop: Workshop):
    workshop.write("helpers", HELPERS)
    here = workshop.load(SCRIPT, "imported").PRINTED
    first = workshop.run(str(workshop.write("script", SCRIPT)), seed="1")
    other = workshop.directory / "other"
    other.mkdir()
    (other / "helpers.py").write_text("# moved\n\n\n" + textwrap.dedent(HELPERS))
    (other / "renamed.py").write_text("#!/usr/bin/env python\n\n" + textwrap.dedent(SCRIPT))
    second = workshop.run(str(other / "renamed.py"), seed="99")
    assert first == second == here
    # Written down, because every Python must agree on it, and because a change here makes the
    # columns of every user stale.
    assert here == "62d76b9deb13cce508dc87b0d153b140"


CALLERS = """
    import pyarrow as pa
    from geneva import chunker, udtf
    SCHEMA = pa.schema([("word", pa.string())])
    @chunker(output_schema=SCHEMA)
    def words(text):
        for word in text.split():
            yield {"word": word}
    @udtf(output_schema=SCHEMA, partition_by="key")
    def shout(rows):
        yield {"word": "HO"}
    def of_chunker(text):
        return len(words(text))
    def of_table_function(rows):
        return len(shout(rows))
"""


@pytest.mark.parametrize(
    ("caller", "known"),
    [
        ("of_chunker", "e6022dbeabf5697fe988288b50d10531"),
        ("of_table_function", "55699a6b5587a27284b15a02a803bd89"),
    ],
)
def test_functions_that_call_one_of_rows_do_not_care_how_that_is_pickled(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, caller: str, known: str
) -> None:
    function = getattr(workshop.load(CALLERS), caller)
    before = of(function)
    monkeypatch.setattr(RowsFunction, "__reduce__", lambda self: (type(self), (self.udf, "more")))
    assert of(function) == before
    monkeypatch.delattr(RowsFunction, "__reduce__")
    assert of(function) == before
    # As earlier releases had it: their values are not stale.
    assert before == known


# ------------------------------------------------------------------------------ finding source


def test_the_right_lambda_of_a_line(workshop: Workshop):
    module = workshop.load(
        """
        def near(n):
            return lambda x: x + n, lambda x: x - n, lambda x, y=1: x * y
        both = [lambda x: x + 1, lambda x: x + 2]; same = lambda x: x + 1
        class Private:
            __hidden = 3
            pair = (lambda self: self.__hidden, lambda self: self.__hidden + 1)
        """
    )
    plus, minus, times = module.near(1)
    assert len({of(plus), of(minus), of(times)}) == 3
    assert of(plus) == of(module.near(1)[0]) != of(module.near(2)[0])
    assert of(module.both[0]) == of(module.same) != of(module.both[1])
    assert of(module.Private.pair[0]) != of(module.Private.pair[1])


def test_a_stale_file_does_not_lie(workshop: Workshop):
    module = workshop.load("def f(x):\n    return x + 1\n", "stale")
    fresh = of(module.f)
    workshop.write("stale", "def f(x):\n    return x + 2\n")
    os.utime(workshop.directory / "stale.py", (1, 1))
    stale = of(module.f)
    edited = workshop.load("def f(x):\n    return x + 2\n", "stale")
    assert stale != of(edited.f)
    assert of(edited.f) != fresh


def test_source_that_python_warns_of_is_read_in_silence(workshop: Workshop):
    source = "def f(x):\n    return x + '{escape}'\n"
    warned = source.replace("{escape}", "\\d")
    with pytest.warns((SyntaxWarning, DeprecationWarning)):
        module = workshop.load(warned)
    assert of(module.f) == workshop.f(source.replace("{escape}", "\\\\d"))


def test_docstrings_and_constants_in_bytecode(workshop: Workshop):
    plain = "def f(x):\n    return x in {'a', 'b', 'c'} and 'k'\n"
    documented = "def f(x):\n    'Doc.'\n    return x in {'c', 'b', 'a'} and 'k'\n"
    assert workshop.without_source(plain) == workshop.without_source(documented)


# ------------------------------------------------------------------------------ references


def test_recursion_ends(workshop: Workshop):
    mutual = """
        def even(n):
            return True if n == 0 else odd(n - 1)
        def odd(n):
            return False if n == 0 else even(n - {step})
        def f(n):
            return f(n - 1) if n else even(n)
    """
    one, two = (workshop.f(mutual.replace("{step}", s)) for s in ("1", "2"))
    assert one == workshop.f(mutual.replace("{step}", "1")) != two


def test_closures_and_partials():
    def make(n: Any) -> Callable[[int], Any]:
        def inner(x: int) -> Any:
            return x + n

        return inner

    assert of(make(1)) == of(make(1)) != of(make(2))
    assert of(functools.partial(make, 1)) == of(functools.partial(make, 1))
    assert of(functools.partial(make, 1)) != of(functools.partial(make, 2))
    assert of(functools.partial(make, n=1)) != of(functools.partial(make, 1))


def test_state_that_the_function_keeps_itself_is_not_its_meaning(workshop: Workshop):
    module = workshop.load(
        """
        import functools
        _model = None
        def get():
            global _model
            if _model is None:
                _model = object()
            return _model
        @functools.lru_cache
        def cached(x):
            return x
        def counter():
            n = 0
            def count(x):
                nonlocal n
                n += 1
                return x
            return count
        count = counter()
        def f(x):
            return get(), cached(x), count(x)
        """
    )
    before = of(module.f)
    module.f(1)
    assert of(module.f) == before


def test_only_what_is_taken_from_a_users_module_counts(workshop: Workshop):
    workshop.write("library", "def used(x):\n    return x\ndef unused(x):\n    return x\n")
    module = workshop.load("import library\ndef f(x):\n    return library.used(x)\n")
    library = sys.modules["library"]
    before = of(module.f)
    library.unused = lambda x: x + 1  # type: ignore[attr-defined]
    assert of(module.f) == before
    library.used = lambda x: x + 1  # type: ignore[attr-defined]
    assert of(module.f) != before


def test_imports_inside_functions_count(workshop: Workshop):
    workshop.write("lower", "N = 1\n")
    workshop.write("upper", "from lower import N\ndef g(x):\n    return x + N\n")
    user = workshop.load("def f(x):\n    from upper import g\n    return g(x)\n")
    before = of(user.f)
    assert "upper" not in sys.modules
    workshop.write("lower", "# only a comment\nN = 1\n")
    assert of(user.f) == before
    workshop.write("lower", "N = 2\n")
    assert of(user.f) != before


def test_installed_code_counts_by_name(workshop: Workshop):
    source = "import {0}\ndef f(x):\n    return {0}.sqrt(x)\n"
    assert workshop.f(source.format("math")) != workshop.f(source.format("cmath"))
    assert of(math.sqrt) != of(math.sin)
    assert of(np.add) != of(np.subtract)
    assert of(json_loads()) == of(json_loads())


def json_loads() -> Any:
    import json

    return json.loads


def test_whose_code_is_it(workshop: Workshop):
    mine = workshop.load("")
    assert is_user_module(mine.__name__)
    assert is_user_module("__main__")
    assert is_user_module(__name__)
    for installed in ("os", "numpy", "numpy.linalg", "pyarrow", "pytest", "geneva.udf", "builtins"):
        assert not is_user_module(installed)
    assert not is_user_module(None)


def test_classes_count_with_their_bases_and_methods(workshop: Workshop):
    source = """
        import dataclasses
        class Base:
            def helper(self):
                return {a}
        @dataclasses.dataclass
        class Model(Base):
            size: int = {b}
            def __call__(self, x):
                return x
            @property
            def width(self):
                return {c}
            @staticmethod
            def fixed():
                return {d}
        f = Model()
    """
    values = {"a": 1, "b": 2, "c": 3, "d": 4}
    base = workshop.f(source.format(**values))
    assert workshop.f(source.format(**values)) == base
    for name in values:
        assert workshop.f(source.format(**{**values, name: 9})) != base


def test_methods_inside_an_installed_decorator_count(workshop: Workshop):
    source = """
        import contextlib
        class Model:
            @contextlib.contextmanager
            def __call__(self, x):
                yield x + {n}
        f = Model()
    """
    one, two = (workshop.f(source.format(n=n)) for n in (1, 2))
    assert one == workshop.f(source.format(n=1)) != two


def test_looking_twice_changes_nothing(workshop: Workshop):
    module = workshop.load("class Model:\n    def __call__(self, x):\n        return x\n")
    model = module.Model()
    before = of(model)
    model.__reduce_ex__(4)  # pickle leaves a note of its own in the class
    assert of(model) == before


def test_instances_count_with_their_state(workshop: Workshop):
    module = workshop.load(
        """
        class Model:
            def __init__(self, n):
                self.n = n
            def __call__(self, x):
                return x + self.n
            def method(self, x):
                return x
        class Slotted:
            __slots__ = ("n",)
            def __init__(self, n):
                self.n = n
            def __call__(self, x):
                return x
        """
    )
    for make in (module.Model, module.Slotted, lambda n: module.Model(n).method):
        assert of(make(1)) == of(make(1)) != of(make(2))


# ------------------------------------------------------------------------------ values


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Setting:
    name: str
    values: list[int]


class Words(list):  # type: ignore[type-arg]
    pass


UTC = datetime.UTC


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("a", b"a"),
        ([1, 2], (1, 2)),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"a": 2}),
        ({1}, {2}),
        (10**5000, 10**5000 + 1),
        (Colour.RED, Colour.BLUE),
        (Setting("a", [1]), Setting("a", [2])),
        (Words([1]), [1]),
        (np.array([1, 2]), np.array([1, 3])),
        (np.array([1, 2]), np.array([[1, 2]])),
        (np.zeros(2, "f4"), np.zeros(1, "f8")),
        (np.float32(1), np.float64(1)),
        (np.array([{"a": 1}]), np.array([{"a": 2}])),
        (np.dtype("f4"), np.dtype("f8")),
        (pa.int64(), pa.int32()),
        (pa.array([1, 2]), pa.array([1, 2], pa.int32())),
        (pa.scalar(1), pa.scalar(2)),
        (pa.table({"a": [1]}), pa.table({"a": [2]})),
        (datetime.datetime(2020, 1, 1, tzinfo=UTC), datetime.datetime(2020, 1, 1)),  # noqa: DTZ001
        (datetime.timedelta(1), datetime.timedelta(2)),
        (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
        (uuid.UUID(int=1), uuid.UUID(int=2)),
        (pathlib.Path("a"), pathlib.Path("b")),
        (re.compile("a"), re.compile("a", re.IGNORECASE)),
        (range(3), range(4)),
        (functools.partial(int, base=2), functools.partial(int, base=8)),
        (collections.deque([1]), collections.deque([2])),
        (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
        (random.Random(1), random.Random(2)),
        (pd.DataFrame({"a": [1]}), pd.DataFrame({"a": [2]})),
        ("x".upper, "y".upper),
        (list[int], list[str]),
    ],
    ids=lambda v: type(v).__name__,
)
def test_different_values(one: Any, other: Any):
    assert value_of(one) != value_of(other)
    assert value_of(one) == value_of(one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({3, 1, 2}, {1, 2, 3}),
        (float("nan"), math.nan),
        (pa.array([0, 1, 2])[1:], pa.array([1, 2])),
        (np.arange(6).reshape(2, 3).T, np.arange(6).reshape(2, 3).T.copy()),
        (threading.Lock(), threading.Lock()),
        (logging.getLogger("a"), logging.getLogger("b")),
        (Setting("a", [1]), Setting("a", [1])),
        (np.random.default_rng(1), np.random.default_rng(1)),
    ],
    ids=lambda v: type(v).__name__,
)
def test_equal_values(one: Any, other: Any):
    assert value_of(one) == value_of(other)


def test_threads_take_fingerprints_at_once():
    """The settings of the process that a walk changes are what they were."""
    before = sys.getrecursionlimit(), list(warnings.filters)
    nested: list[Any] = []
    for _ in range(500):
        nested = [nested]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(value_of, [nested] * 40))) == 1
    assert (sys.getrecursionlimit(), list(warnings.filters)) == before


def test_values_that_contain_themselves():
    ring: list[Any] = [1]
    ring.append(ring)
    other: list[Any] = [2]
    other.append(other)
    assert value_of(ring) == value_of(ring) != value_of(other)


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.decimals(allow_nan=False)
    | st.datetimes()
    | st.frozensets(st.integers() | st.text()),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=12,
)


def rebuilt(value: Any) -> Any:
    """Return an equal value that shares nothing, with sets filled the other way round."""
    if isinstance(value, dict):
        return {rebuilt(k): rebuilt(v) for k, v in value.items()}
    if isinstance(value, frozenset):
        return frozenset(reversed([rebuilt(v) for v in value]))
    if isinstance(value, (list, tuple)):
        return type(value)(rebuilt(v) for v in value)
    return value


def typed(value: Any) -> Any:
    """Return a form whose equality is as strict as a fingerprint's (1 is not True, nor 1.0)."""
    if isinstance(value, dict):
        return "dict", tuple((typed(k), typed(v)) for k, v in value.items())
    if isinstance(value, frozenset):
        return "frozenset", frozenset(map(typed, value))
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple(map(typed, value))
    return type(value).__name__, repr(value)


@given(plain_values, plain_values)
def test_fingerprints_are_equal_exactly_where_values_are(one: Any, other: Any):
    assert value_of(one) == value_of(rebuilt(one))
    assert (value_of(one) == value_of(other)) == (typed(one) == typed(other))
