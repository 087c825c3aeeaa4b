"""Functions of a script, `python script.py`, in a process that has no such script."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HEAD = """\
import enum, functools, typing
import geneva, pyarrow as pa
import typing_extensions
"""

TAIL = """
from pathlib import Path
from geneva.udf.declare import serialize_udf
declared = geneva.udf(f, data_type=pa.string())
Path("stored").write_bytes(serialize_udf(declared))
print(f(1), declared.fingerprint)
"""

WORKER = """\
import dataclasses
from pathlib import Path
from geneva.udf.declare import deserialize_udf, serialize_udf, udf_digest
data = Path("stored").read_bytes()
read = deserialize_udf(data, udf_digest(data))
again = serialize_udf(read)
read = deserialize_udf(again, udf_digest(again))
print(read(1), dataclasses.replace(read, pinned_fingerprint=None).fingerprint)
"""

DISPATCHER = """\
@functools.singledispatch
def show(x):
    return "object"
@show.register
def _(x: int):
    return "int"
"""

SCRIPTS = {
    "around a dispatcher": f"""{DISPATCHER}
@functools.wraps(show)
def loud(x):
    return show(x) + "!"
def f(x):
    return loud(x) + loud.dispatch(float)(x)
""",
    "around what is around a dispatcher": f"""{DISPATCHER}
def plus(function):
    @functools.wraps(function)
    def inner(x):
        return function(x) + "+"
    return inner
f = plus(functools.lru_cache(plus(show)))
""",
    "a dispatcher that calls what is around it": f"""{DISPATCHER}
@functools.wraps(show)
def loud(x):
    return show(x) + "!"
@show.register
def _(x: list):
    return "".join(map(loud, x))
def f(x):
    return show([x, str(x)])
""",
    "registered through what is around a dispatcher": f"""{DISPATCHER}
@functools.wraps(show)
def loud(x):
    return show(x)
def f(x):
    loud.register(str, lambda x: "text")
    return show(str(x)) + str(loud.registry == show.registry)
""",
    "a dispatcher's function by itself": f"""{DISPATCHER}
pick = show.dispatch
def f(x):
    return pick(bool)(x)
""",
    "a dispatcher of a class": """
class Shows:
    @functools.singledispatchmethod
    def show(self, x):
        return "object"
    @show.register
    def _(self, x: int):
        return "int"
    @functools.wraps(show)
    def loud(self, x):
        return self.show(x) + "!"
def f(x):
    return Shows().loud(x)
""",
    "a new type": """
Age = typing.NewType("Age", int)
def f(x):
    return str(Age(x) + 1)
""",
    "a new type as an annotation": """
Age = typing.NewType("Age", int)
def older(x: Age) -> Age:
    return Age(x + 1)
def f(x: Age) -> str:
    return str(older(x)) + str(older.__annotations__["x"] is Age)
""",
    "a new type of a class that refers to it": """
class Person:
    def __init__(self, age=0):
        self.age = age
    def named(self):
        return Name(Person(self.age + 1))
Name = typing.NewType("Name", Person)
def f(x):
    return str(Name(Person(x)).named().age) + str(Name.__supertype__ is Person)
""",
    "parameters of types": """
P = typing.ParamSpec("P")
Ts = typing.TypeVarTuple("Ts")
T = typing.TypeVar("T")
def called(g: typing.Callable[P, T], *args: P.args) -> T:
    return g(*args)
def first(*args: *Ts) -> tuple[*Ts]:
    return args
def f(x):
    return called(str, *first(x))
""",
    "an alias": """
Json = typing_extensions.TypeAliasType("Json", "int | list[Json]")
Nested = typing_extensions.TypeAliasType("Nested", list[Json])
def g(x: Nested) -> Json:
    return x[0]
def f(x):
    return str(g([x])) + str(g.__annotations__["x"].__value__ == list[Json])
""",
    "an alias in an alias": """
Text = typing_extensions.TypeAliasType("Text", list["Text"])
Pair = typing_extensions.TypeAliasType("Pair", tuple[Text, Text])
def f(x) -> Pair:
    return str(x)
""",
    "one that is known by its name": """
class Sentinel:
    def __init__(self, name):
        self.name = name
    def __reduce__(self):
        return self.name
class Frozen:
    def __setattr__(self, name, value):
        raise AttributeError(name)
    def __reduce__(self):
        return "FROZEN"
MISSING = Sentinel("MISSING")
FROZEN = Frozen()
object.__setattr__(FROZEN, "value", 7)
def f(x, default=MISSING):
    return str(default is MISSING) + MISSING.name + str(FROZEN.value)
""",
    "one of a class that has only one": """
class Missing:
    one = None
    def __new__(cls):
        if cls.one is None:
            cls.one = super().__new__(cls)
        return cls.one
    def __reduce__(self):
        return "MISSING"
MISSING = Missing()
def f(x):
    return str(Missing() is MISSING)
""",
    "members that are known by their names": """
class Color(enum.Flag):
    RED = 1
    BLUE = 2
    def __reduce_ex__(self, protocol):
        return self.name
def f(x, default=Color.RED | Color.BLUE):
    return str(default is Color.RED | Color.BLUE) + str(Color.RED.value)
""",
}


@pytest.mark.parametrize("code", SCRIPTS.values(), ids=SCRIPTS)
def test_functions_of_a_script_travel(code: str, tmp_path: Path) -> None:
    """They do the same and mean the same in another process, and when they go on from there."""

    def said(script: str) -> str:
        (tmp_path / "script.py").write_text(script)
        command = [sys.executable, "script.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert said(HEAD + textwrap.dedent(code) + TAIL) == said(WORKER)
