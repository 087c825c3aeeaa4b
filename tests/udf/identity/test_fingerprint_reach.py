"""Fingerprints see every change: in whatever way a function gets at what changed."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import pathlib
import sys
import textwrap
import types
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from geneva.udf.declare import deserialize_udf, serialize_udf, udf, udf_digest
from geneva.udf.identity.class_meaning import attributes_that_count
from geneva.udf.identity.fingerprint import fingerprint
from workshop import Workshop, of, value_of

# ------------------------------------------------------------------------------ imports in the body

IMPORTS = {
    "from package import module": "from pk import sub\n    return sub.g(x)",
    "from module import name": "from pk.sub import g\n    return g(x)",
    "import": "import pk.sub\n    return pk.sub.g(x)",
    "import as": "import pk.sub as s\n    return s.g(x)",
    "inside a lambda": "h = lambda: __import__('pk.sub').sub\n    return h().g(x)",
    "import_module": "import importlib\n    return importlib.import_module('pk.sub').g(x)",
    "__import__": "return __import__('pk.sub').sub.g(x)",
    "import_module of a constant": "import importlib as i\n    return i.import_module(NAME).g(x)",
    "sys.modules": "import sys, between\n    return sys.modules['pk.sub'].g(x)",
    "through another module": "import between\n    return between.sub.g(x)",
    "through a star": "import stars\n    return stars.sub.g(x)",
}
RELATIVE = {
    "from . import module": "from . import sub\n    return sub.g(x)",
    "from .module import name": "from .sub import g\n    return g(x)",
}


def _write_package(workshop: Workshop, number: int = 1, note: str = "") -> None:
    workshop.write("between", "from pk import sub\n")
    workshop.write("stars", "from pk import *\n")
    workshop.write("pk.__init__", "__all__ = ['sub']\n")
    workshop.write("pk.lower", f"{note}\nN = {number}\n")
    workshop.write("pk.sub", "from . import lower\ndef g(x):\n    return x + lower.N\n")


def _assert_body_import_counts(workshop: Workshop, function: Any) -> None:
    before = of(function)
    assert "pk.sub" not in sys.modules, "taking a fingerprint must not import anything"
    _write_package(workshop, note="# a comment")
    assert of(function) == before
    _write_package(workshop, number=2)
    assert of(function) != before
    _write_package(workshop)
    assert function(1) == 2
    assert of(function) == before, "it is loaded now: that is no change"


@pytest.mark.parametrize("body", IMPORTS.values(), ids=IMPORTS)
def test_what_is_imported_inside(workshop: Workshop, body: str):
    _write_package(workshop)
    module = workshop.load(f"NAME = 'pk.sub'\ndef f(x):\n    {body}\n")
    _assert_body_import_counts(workshop, module.f)


@pytest.mark.parametrize("body", RELATIVE.values(), ids=RELATIVE)
def test_what_is_imported_from_the_own_package(workshop: Workshop, body: str):
    _write_package(workshop)
    module = workshop.load(f"def f(x):\n    {body}\n", "pk.user")
    _assert_body_import_counts(workshop, module.f)


def test_what_is_imported_from_the_package_above(workshop: Workshop):
    workshop.write("top.__init__", "")
    workshop.write("top.a.__init__", "")
    workshop.write("top.b.__init__", "")
    workshop.write("top.b.sub", "N = 1\n")
    module = workshop.load("def f(x):\n    from ..b import sub\n    return sub.N\n", "top.a.user")
    before = of(module.f)
    workshop.write("top.b.sub", "N = 2\n")
    assert of(module.f) != before


def test_importing_runs_the_packages_above_too(workshop: Workshop):
    workshop.write("pk.__init__", "N = 1\n")
    workshop.write("pk.sub", "import pk\n")
    module = workshop.load("def f(x):\n    import pk.sub\n    return pk.N\n")
    before = of(module.f)
    workshop.write("pk.__init__", "N = 2\n")
    assert of(module.f) != before


def test_which_module_has_which_content(workshop: Workshop):
    workshop.write("left", "N = 1\n")
    workshop.write("right", "N = 2\n")
    module = workshop.load("def f(x):\n    import left, right\n    return left.N - right.N\n")
    before = of(module.f)
    workshop.write("left", "N = 2\n")
    workshop.write("right", "N = 1\n")
    assert of(module.f) != before


def test_a_module_without_a_file_that_is_imported_inside(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
):
    made = types.ModuleType("made_by_hand")
    made.N = 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_by_hand", made)
    module = workshop.load("def f(x):\n    import made_by_hand\n    return made_by_hand.N\n")
    before = of(module.f)
    made.N = 2  # type: ignore[attr-defined]
    assert of(module.f) != before


# ------------------------------------------------------------------------------ modules as values

MODULE_USES = {
    "alias": "def f(x):\n    return h.g(x)",
    "getattr": "def f(x):\n    return getattr(h, 'g')(x)",
    "argument": "def call(m, x):\n    return m.g(x)\ndef f(x):\n    return call(h, x)",
    "closure": "def make(m):\n    return lambda x: m.g(x)\nf = make(h)",
    "default": "def f(x, m=h):\n    return m.g(x)",
    "keyword default": "def f(x, *, m=h):\n    return m.g(x)",
    "attribute": "class C:\n    pass\no = C()\no.m = h\ndef f(x):\n    return o.m.g(x)",
    "class attribute": "class C:\n    m = h\ndef f(x):\n    return C.m.g(x)",
    "dict item": "d = {'m': h}\ndef f(x):\n    return d['m'].g(x)",
    "list item": "d = [h]\ndef f(x):\n    return d[0].g(x)",
    "tuple item": "d = (h,)\ndef f(x):\n    return d[0].g(x)",
    "partial": "import functools as t\ndef c(m, x):\n    return m.g(x)\nf = t.partial(c, h)",
    "either of two": "import math\ndef f(x):\n    return (h if x else math).g(x)",
    "a package's module": "import inside\ndef f(x):\n    return inside.h.g(x)",
}


@pytest.mark.parametrize("use", MODULE_USES.values(), ids=MODULE_USES)
def test_a_users_module(workshop: Workshop, use: str):
    helpers = "N = {n}\ndef g(x):\n    return x + N\n"
    workshop.write("inside", "import helpers as h\n")
    found = []
    for n in (1, 1, 2):
        workshop.forget()
        workshop.write("helpers", helpers.format(n=n))
        found.append(of(workshop.load(f"import helpers as h\n{use}\n", "user").f))
    assert found[0] == found[1] != found[2]


def test_a_module_used_as_a_whole_counts_as_it_is_loaded(workshop: Workshop):
    workshop.write("helpers", "import sys\nN = 1\ndef g(x):\n    return x\n")
    module = workshop.load(
        "import helpers\ndef f(x, name='g'):\n    return getattr(helpers, name)(x)"
    )
    before = of(module.f)
    workshop.write("helpers", "N = 3\n")  # edited, and not loaded
    assert of(module.f) == before
    sys.modules["helpers"].N = 2  # type: ignore[attr-defined]
    assert of(module.f) != before


def test_modules_that_import_each_other(workshop: Workshop):
    workshop.write("left", "import right\nN = 1\n")
    workshop.write("right", "import left\nN = 1\n")
    module = workshop.load("import left\ndef f(x):\n    return getattr(left, x)\n")
    before = of(module.f)
    sys.modules["right"].N = 2  # type: ignore[attr-defined]
    assert of(module.f) != before


# ------------------------------------------------------------------------------ exec


def executed(source: str, **namespace: Any) -> Any:
    exec(textwrap.dedent(source), namespace)
    return namespace["f"]


def test_functions_made_by_exec():
    source = "def f(x):\n    return x + N"
    assert of(executed(source, N=1)) == of(executed(source, N=1))
    assert of(executed(source, N=1)) != of(executed(source, N=2))
    assert of(executed(source, N=1)) != of(executed(source.replace("+", "-"), N=1))
    named = of(executed(source, N=1, __name__="anything"))
    assert named == of(executed(source, N=1)), "where it was made does not matter"
    assert named == of(executed(source, N=1, __name__="numpy")), "whatever it says"


def test_classes_made_by_exec():
    source = (
        "class C:\n    n = {n}\n    g = lambda self, x: x {op} 1\ndef f(x):\n    return C().g(x)"
    )
    plain = of(executed(source.format(n=1, op="+")))
    assert plain == of(executed(source.format(n=1, op="+")))
    assert plain != of(executed(source.format(n=2, op="+")))
    assert plain != of(executed(source.format(n=1, op="-")))
    bare = "class C:\n    n = {n}\ndef f(x):\n    return C.n"
    assert of(executed(bare.format(n=1))) != of(executed(bare.format(n=2)))


def test_code_that_is_kept_to_be_executed():
    codes = [compile(text, "<text>", "eval") for text in ("x + 1", "x + 1 ", "x + 2")]
    assert value_of(codes[0]) == value_of(codes[1]) != value_of(codes[2])


def test_names_that_exec_was_given_as_built_in():
    source = "def f(x):\n    return len(x)"
    lengths = [lambda x: 1, lambda x: 2]
    one, two = (of(executed(source, __builtins__={"len": length})) for length in lengths)
    assert len({one, two, of(executed(source))}) == 3


# ------------------------------------------------------------------------------ functions


def test_a_function_that_looks_like_an_installed_one():
    def make(n: int) -> Any:
        @functools.wraps(logging.getLogger)
        def f(x: int) -> int:
            return x + n

        return f

    def otherwise(n: int) -> Any:
        @functools.wraps(logging.getLogger)
        def f(x: int) -> int:
            return x - n

        return f

    assert of(make(1)) == of(make(1)) != of(make(2))
    assert of(make(1)) != of(otherwise(1))


def test_an_inner_variable_with_the_name_of_an_outer_one():
    def make(n: int) -> Any:
        def f(x: int) -> Any:
            def inner() -> Any:
                n = 5  # its own
                return lambda: n

            return inner()() + n

        return f

    assert of(make(1)) == of(make(1)) != of(make(2))


def test_an_inner_variable_with_the_name_of_a_global(workshop: Workshop):
    source = """
        N = {n}
        class Box:
            N = 7
        def f(x):
            def inner():
                N = 5
                return [N for N in range(3)], (lambda N: N)(2)
            class Local:
                N = N
            return inner(), N, Local
    """
    assert workshop.f(source.format(n=1)) == workshop.f(source.format(n=1))
    assert workshop.f(source.format(n=1)) != workshop.f(source.format(n=2))


def test_attributes_of_a_function(workshop: Workshop):
    source = "def f(x):\n    return x + f.{read}\nf.n = {n}\n"
    assert workshop.f(source.format(read="n", n=1)) == workshop.f(source.format(read="n", n=1))
    assert workshop.f(source.format(read="n", n=1)) != workshop.f(source.format(read="n", n=2))


def test_names_of_keyword_arguments():
    one = executed("def f(x):\n    return dict(a=x, b=1)")
    other = executed("def f(x):\n    return dict(b=x, a=1)")
    assert of(one) != of(other)


@pytest.mark.parametrize("body", ["globals()['N']", "eval('N')", "exec('print(N)')"])
def test_a_function_that_sees_everything(workshop: Workshop, body: str):
    source = f"N = {{n}}\ndef f(x):\n    return {body}\n"
    assert workshop.f(source.format(n=1)) == workshop.f(source.format(n=1))
    assert workshop.f(source.format(n=1)) != workshop.f(source.format(n=2))


def test_long_chains(workshop: Workshop):
    steps = "".join(f"def f{i}(x):\n    return f{i + 1}(x)\n" for i in range(600))
    source = steps + "def f600(x):\n    return x + {n}\nf = f0\n"
    assert workshop.f(source.format(n=1)) == workshop.f(source.format(n=1))
    assert workshop.f(source.format(n=1)) != workshop.f(source.format(n=2))
    nested: list[Any] = []
    for _ in range(2_000):
        nested = [nested]
    assert value_of(nested) != value_of([nested])


# ------------------------------------------------------------------------------ classes

CLASSES = {
    "enum method": """
        import enum
        class Kind(enum.Enum):
            A = 1
            def g(self, x):
                return x + {n}
        def f(x):
            return Kind.A.g(x)
    """,
    "enum method behind a member": """
        import enum
        class Kind(enum.Enum):
            A = 1
            def g(self, x):
                return x + {n}
        MEMBER = Kind.A
        def f(x):
            return MEMBER.g(x)
    """,
    "enum member's attribute": """
        import enum
        class Kind(enum.Enum):
            A = 1
            def __init__(self, value):
                self.extra = value + {n}
        MEMBER = Kind.A
        def f(x):
            return MEMBER.extra
    """,
    "enum attribute that is no member": """
        import enum
        class Kind(enum.Enum):
            A = 1
        Kind.shift = {n}
        def f(x):
            return Kind.A.shift
    """,
    "enum alias": """
        import enum
        class Kind(enum.Enum):
            A = 1
            B = {n}
            C = B
        def f(x):
            return Kind["C"]
    """,
    "partialmethod": """
        import functools
        class Model:
            def g(self, n, x):
                return x + n
            h = functools.partialmethod(g, {n})
        def f(x):
            return Model().h(x)
    """,
    "descriptor": """
        class Constant:
            def __init__(self, value):
                self.value = value
            def __get__(self, instance, owner):
                return self.value
        class Model:
            n = Constant({n})
        def f(x):
            return Model().n
    """,
    "descriptor's code": """
        class Constant:
            def __get__(self, instance, owner):
                return {n}
        class Model:
            n = Constant()
        def f(x):
            return Model().n
    """,
    "data descriptor's code": """
        class Constant:
            def __get__(self, instance, owner):
                return {n}
            def __set__(self, instance, value):
                pass
        class Model:
            n = Constant()
        def f(x):
            return Model().n
    """,
    "property of one's own kind": """
        class Shifted(property):
            def __get__(self, instance, owner=None):
                return super().__get__(instance, owner) + {n}
        class Model:
            @Shifted
            def n(self):
                return 1
        def f(x):
            return Model().n
    """,
    "array": """
        import numpy as np
        class Shifted(np.ndarray):
            def total(self):
                return self.sum() + {n}
        WEIGHTS = np.ones(3).view(Shifted)
        def f(x):
            return WEIGHTS.total()
    """,
    "array's attribute": """
        import numpy as np
        class Shifted(np.ndarray):
            pass
        WEIGHTS = np.ones(3).view(Shifted)
        WEIGHTS.shift = {n}
        def f(x):
            return WEIGHTS.sum() + WEIGHTS.shift
    """,
    "path": """
        import pathlib
        class Shifted(type(pathlib.Path())):
            def total(self):
                return {n}
        PATH = Shifted("a")
        def f(x):
            return PATH.total()
    """,
    "path's attribute": """
        import pathlib
        class Shifted(type(pathlib.Path())):
            pass
        PATH = Shifted("a")
        PATH.shift = {n}
        def f(x):
            return PATH.shift
    """,
    "logger": """
        import logging
        class Shifted(logging.Logger):
            def total(self):
                return {n}
        LOGGER = Shifted("a")
        def f(x):
            return LOGGER.total()
    """,
    "logger's attribute": """
        import logging
        class Shifted(logging.Logger):
            pass
        LOGGER = Shifted("a")
        LOGGER.shift = {n}
        def f(x):
            return LOGGER.shift
    """,
    "partial": """
        import functools
        class Shifted(functools.partial):
            def __call__(self, *args):
                return super().__call__(*args) + {n}
        g = Shifted(int)
        def f(x):
            return g(x)
    """,
    "partial's attribute": """
        import functools
        class Shifted(functools.partial):
            def __call__(self, *args):
                return super().__call__(*args) + self.shift
        g = Shifted(int)
        g.shift = {n}
        def f(x):
            return g(x)
    """,
    "set": """
        class Shifted(set):
            shift = 0
        NAMES = Shifted("ab")
        NAMES.shift = {n}
        def f(x):
            return NAMES.shift
    """,
    "dict": """
        class Shifted(dict):
            def __missing__(self, key):
                return {n}
        NAMES = Shifted()
        def f(x):
            return NAMES[x]
    """,
    "number": """
        class Shifted(float):
            def __add__(self, other):
                return {n}
        NUMBER = Shifted(1)
        def f(x):
            return NUMBER + x
    """,
    "dataclass's own method": """
        import dataclasses
        @dataclasses.dataclass
        class Model:
            n: int
            def __eq__(self, other):
                return {n}
        def f(x):
            return Model(1) == x
    """,
    "dataclass that compares": """
        import dataclasses
        @dataclasses.dataclass(eq={n} == 1)
        class Model:
            n: int
        def f(x):
            return Model(1) == Model(1)
    """,
    "dataclass's field that compares": """
        import dataclasses
        @dataclasses.dataclass
        class Model:
            n: int = dataclasses.field(compare={n} == 1)
        def f(x):
            return Model(1) == Model(2)
    """,
    "dataclass field's metadata": """
        import dataclasses
        @dataclasses.dataclass
        class Model:
            n: int = dataclasses.field(default=0, metadata={"n": {n}})
        def f(x):
            return x * dataclasses.fields(Model)[0].metadata["n"]
    """,
    "dataclass's field that is shown": """
        import dataclasses
        @dataclasses.dataclass
        class Model:
            n: int = dataclasses.field(default=0, repr={n} == 1)
        def f(x):
            return str(Model(x))
    """,
    "dataclass's field by keyword": """
        import dataclasses
        @dataclasses.dataclass
        class Model:
            n: int = dataclasses.field(default=0, kw_only={n} == 1)
        def f(x):
            return Model(x)
    """,
    "annotated type": """
        import typing
        KIND = typing.Annotated[int, {n}]
        def f(x):
            return x * KIND.__metadata__[0]
    """,
    "metadata of a class's annotation": """
        import typing
        class Model:
            n: list[typing.Annotated[int, {n}]]
        def f(x):
            hints = typing.get_type_hints(Model, include_extras=True)
            return x * hints["n"].__args__[0].__metadata__[0]
    """,
    "metadata in a union": """
        import typing
        class Model:
            n: typing.Annotated[int, {n}] | None
        def f(x):
            return str(Model.__annotations__["n"])
    """,
    "metadata in an annotation that is text": """
        from __future__ import annotations
        import typing
        class Model:
            n: typing.Annotated[int, {n}]
        def f(x):
            return Model.__annotations__["n"]
    """,
    "metadata of a typed dict's annotation": """
        import typing
        class Model(typing.TypedDict):
            n: typing.Annotated[int, {n}]
        def f(x):
            return typing.get_type_hints(Model, include_extras=True)["n"].__metadata__[0]
    """,
    "metadata of a parameter's annotation": """
        import typing
        def g(n: typing.Callable[[typing.Annotated[int, {n}]], int]):
            return n
        def f(x):
            return str(g.__annotations__["n"])
    """,
    "metadata of an alias": """
        import typing, typing_extensions
        Deep = typing_extensions.TypeAliasType("Deep", "Deep")
        Limit = typing_extensions.TypeAliasType("Limit", typing.Annotated[int, {n}])
        def g(n: list[Limit], m: Deep):
            return n
        def f(x):
            return str(g.__annotations__["n"])
    """,
    "metadata of a dataclass's parameter": """
        import dataclasses, typing
        @dataclasses.dataclass
        class Model:
            n: dataclasses.InitVar[typing.Annotated[int, {n}]]
        def f(x):
            return str(Model.__annotations__)
    """,
    "metadata in a part that is text": """
        import typing
        def g(n: typing.List["typing.Annotated[int, {n}]"]):
            return n
        def f(x):
            return str(g.__annotations__["n"])
    """,
    "metaclass": """
        class Meta(type):
            def g(cls):
                return {n}
        class Model(metaclass=Meta):
            pass
        def f(x):
            return Model.g()
    """,
    "class inside a list of types": """
        class Model:
            n = {n}
        KIND = list[Model]
        def f(x):
            return KIND.__args__[0].n
    """,
    "object that is pickled by name": """
        class Model:
            def __init__(self):
                self.shift = {n}
            def __reduce__(self):
                return "MODEL"
        MODEL = Model()
        def f(x):
            return MODEL.shift
    """,
    "memo's class": """
        class Memo(dict):
            def __missing__(self, key):
                return {n}
        MEMO = Memo()
        def f(x):
            MEMO[x] = x
            return MEMO[0]
    """,
    "memo's factory": """
        import collections
        MEMO = collections.defaultdict(lambda: {n})
        def f(x):
            MEMO[x] += x
            return MEMO[0]
    """,
    "single dispatch": """
        import functools
        @functools.singledispatch
        def g(x):
            return x
        @g.register(int)
        def _(x):
            return x + {n}
        def f(x):
            return g(x)
    """,
    "single dispatch that calls itself": """
        import collections.abc, functools
        class Model:
            @functools.singledispatchmethod
            def g(self, x):
                return x
            @g.register
            def _(self, x: int):
                return h([x, x])
        @functools.singledispatch
        def h(x):
            return x + {n}
        @h.register(collections.abc.Sequence)
        def _(x):
            return sum(map(h, x))
        def f(x):
            return Model().g(x)
    """,
    "numpy function made of a function": """
        import numpy as np
        def g(x):
            return x + {n}
        h = np.frompyfunc(g, 1, 1)
        def f(x):
            return h(x)
    """,
    "vectorized function": """
        import numpy as np
        @np.vectorize
        def g(x):
            return x + {n}
        def f(x):
            return g(x)
    """,
    "attribute that shares its name": """
        class Box:
            pass
        def f(x):
            box = Box()
            box.n = 5
            return f.n
        f.n = {n}
    """,
    "unpicklable object": """
        class Model:
            def __init__(self):
                self.shift = {n}
            def __reduce__(self):
                raise TypeError("not me")
        MODEL = Model()
        def f(x):
            return MODEL.shift
    """,
}


@pytest.mark.parametrize("source", CLASSES.values(), ids=CLASSES)
def test_a_class(workshop: Workshop, source: str):
    one, same, other = (workshop.f(source.replace("{n}", n)) for n in "112")
    assert one == same != other
    assert workshop.without_source(source.replace("{n}", "1")) == one
    assert workshop.without_source(source.replace("{n}", "2")) == other


def test_a_field_by_keyword_is_said_once():
    """By `__match_args__`: in another place as well, columns were computed anew for nothing."""

    @dataclasses.dataclass
    class Plain:
        n: int = 0

    @dataclasses.dataclass(kw_only=True)
    class ByKeyword:
        n: int = 0

    plain, by_keyword = (dict(attributes_that_count(cls)) for cls in (Plain, ByKeyword))
    assert {name for name in plain if plain[name] != by_keyword[name]} == {"__match_args__"}


COUNTED = """
    import itertools
    NUMBERS = itertools.count()
    class Field:
        def __init__(self, low, check=None):
            self.low, self.checks, self.number = low, [check], next(NUMBERS)
        def __repr__(self):
            return f"Field({self.low}, {self.checks})"
"""
IN_FIELD = """
    import counted, dataclasses
    def check(x):
        return x > {n}
    @dataclasses.dataclass
    class Model:
        x: int = dataclasses.field(metadata={"a": [counted.Field({low}, check)]})
    def f(x):
        return Model(x)
"""
IN_ANNOTATION = """
    import counted, typing
    def check(x):
        return x > {n}
    def f(x: typing.Annotated[int, counted.Field({low}, check)]):
        return x
"""


@pytest.mark.parametrize("source", [IN_FIELD, IN_ANNOTATION], ids=["field", "annotation"])
def test_metadata_of_an_installed_type_counts_by_what_it_shows(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, source: str
):
    """Not by what it counts itself, which is another number for each order of imports."""
    workshop.write("site-packages/counted", COUNTED)
    monkeypatch.syspath_prepend(workshop.directory / "site-packages")
    source = source.replace("{low}", "0")
    one, same, other_function = (workshop.f(source.replace("{n}", n)) for n in "112")
    assert one == same != other_function
    assert workshop.f(source.replace("Field(0", "Field(1").replace("{n}", "1")) != one


def test_metadata_that_shows_a_set_is_the_same_in_each_process(workshop: Workshop):
    """Where texts in a set have another order, its `repr` is another text."""
    workshop.write("site-packages/counted", COUNTED)
    workshop.write(
        "declared",
        """
        import sys
        sys.path.append("site-packages")
        import counted, typing
        from geneva.udf.identity.fingerprint import fingerprint
        import pyarrow as pa
        def f(x: typing.Annotated[str, counted.Field({"a", "b", "c", "d"}, len)]):
            return x
        print(fingerprint(f, pa.string()))
        """,
    )
    assert len({workshop.run("declared.py", seed=seed) for seed in "1234"}) == 1


OF_OUTPUT = """
    import dataclasses, typing
    import geneva, numpy as np, pyarrow as pa
    @dataclasses.dataclass
    class Record:
        vector: {vector}
    def plain(x: int) -> {plain}:
        return np.zeros(3)
    def nested(x: int) -> Record:
        return Record(np.zeros(3))
    def several(x: int) -> {several}:
        return Record(np.zeros(3))
"""


def test_what_says_the_type_of_the_output_counts_as_that_alone(workshop: Workshop):
    """A column of vectors is not computed anew for how its type was said."""
    vector = "typing.Annotated[np.ndarray, pa.list_(pa.{of}(), 3)]"
    said = workshop.load(
        OF_OUTPUT.replace("{vector}", vector.replace("{of}", "float32"))
        .replace("{plain}", vector.replace("{of}", "float32"))
        .replace("{several}", "geneva.Columns[Record] | None")
    )
    bare = workshop.load(
        OF_OUTPUT.replace("{vector}", "np.ndarray")
        .replace("{plain}", "np.ndarray")
        .replace("{several}", "Record")
    )
    other = workshop.load(
        OF_OUTPUT.replace("{vector}", vector.replace("{of}", "float64"))
        .replace("{plain}", vector.replace("{of}", "float64"))
        .replace("{several}", "geneva.Columns[Record]")
    )
    kind = pa.list_(pa.float32(), 3)
    of_column = {"plain": kind, "nested": pa.struct({"vector": kind})}
    of_column["several"] = of_column["nested"]
    for name, output in of_column.items():
        function = getattr(said, name)
        version = udf(function).fingerprint
        assert version == udf(getattr(bare, name), data_type=output).fingerprint
        assert version != udf(getattr(other, name)).fingerprint
        # Of another output, it is what it says to programs.
        assert fingerprint(function, pa.int64()) != fingerprint(getattr(other, name), pa.int64())


def test_an_annotation_may_be_any_object(workshop: Workshop):
    source = """
        class Odd:
            __args__ = None
            def __getattr__(self, name):
                raise RuntimeError(name)
        class Endless:
            def __getattr__(self, name):
                return Endless()
        def g(x: {annotation}):
            return x
        def f(x):
            return g(x)
    """
    versions = {workshop.f(source.replace("{annotation}", a)) for a in ("Odd()", "Endless()", "0")}
    assert len(versions) == 1


# ------------------------------------------------------------------------------ values


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2], mask=[1, 0])),
        (np.ma.array([1, 2], fill_value=3), np.ma.array([1, 2], fill_value=4)),
        (np.array([[1, 2]]), np.rec.array([[1, 2]])),
        (pc.ScalarAggregateOptions(min_count=1), pc.ScalarAggregateOptions(min_count=2)),
        (pc.MatchSubstringOptions("a"), pc.MatchSubstringOptions("b")),
        (
            pc.SetLookupOptions(value_set=pa.array(range(100))),
            pc.SetLookupOptions(value_set=pa.array([*range(50), 0, *range(51, 100)])),
        ),
        (pc.field("a") > 1, pc.field("a") > 2),
        (pa.field("a", pa.int64()), pa.field("a", pa.int64(), metadata={"k": "v"})),
        (pa.schema({"a": pa.int64()}), pa.schema({"a": pa.int64()}, metadata={"k": "v"})),
        (
            pa.schema({"a": pa.int64()}, metadata={"k": "v" * 200 + "1"}),
            pa.schema({"a": pa.int64()}, metadata={"k": "v" * 200 + "2"}),
        ),
        (slice(1, 2), slice(1, 3)),
        (pathlib.PurePosixPath("a"), pathlib.PurePosixPath("b")),
    ],
    ids=lambda v: type(v).__name__,
)
def test_different_values(one: Any, other: Any):
    assert value_of(one) != value_of(other)
    assert value_of(one) == value_of(one)


def test_options_of_arrow_functions_are_equal_by_value():
    assert value_of(pc.MatchSubstringOptions("a")) == value_of(pc.MatchSubstringOptions("a"))


def test_a_slice_with_an_object_of_the_users(workshop: Workshop):
    source = "class N:\n    n = {n}\nS = slice(N(), None)\ndef f(x):\n    return S.start.n\n"
    assert workshop.f(source.format(n=1)) == workshop.f(source.format(n=1))
    assert workshop.f(source.format(n=1)) != workshop.f(source.format(n=2))


def test_reloading_is_no_change(workshop: Workshop):
    module = workshop.load("N = 1\ndef f(x):\n    return x + N\n", "reloaded")
    before = of(module.f)
    assert of(importlib.reload(module).f) == before


# Pickle refuses these, or forgets a part of them.
NOT_SENT = {
    *("property of one's own kind", "logger", "logger's attribute", "unpicklable object"),
    *("array's attribute", "path's attribute"),
}


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in NOT_SENT])
def test_a_function_that_was_sent_means_the_same(workshop: Workshop, name: str):
    """What a worker loads has the fingerprint of what was sent, also if it takes it anew."""
    declared = udf(workshop.load(CLASSES[name].replace("{n}", "1")).f, data_type=pa.int64())
    before = declared.fingerprint
    data = serialize_udf(declared)
    loaded = dataclasses.replace(deserialize_udf(data, udf_digest(data)), pinned_fingerprint=None)
    assert loaded.fingerprint == declared.fingerprint == before


def test_sets_of_ones_own_kind_have_no_order(workshop: Workshop):
    source = """
        class Names(frozenset):
            pass
        NAMES = Names(["one", "two", "three", "four", "five"])
        def f(x):
            return x in NAMES
        import pyarrow as pa
        from geneva.udf.identity.fingerprint import fingerprint
        print(fingerprint(f, pa.int64()))
    """
    script = str(workshop.write("script", source))
    assert len({workshop.run(script, seed=seed) for seed in "123"}) == 1
