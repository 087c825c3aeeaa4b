"""Fingerprints stay equal: wherever the code comes from, and whatever calls leave behind."""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import textwrap
import zipfile
from typing import Any

import pytest

from geneva.udf.identity.bytecode import all_codes
from geneva.udf.identity.code_meaning import code_digest
from workshop import Workshop, of

# ------------------------------------------------------------------------------ where code is from

CODE = textwrap.dedent(
    '''
    import collections, dataclasses, enum, functools
    from typing import NamedTuple, TypedDict
    N = 1
    class Kind(enum.Enum):
        A = 1
        def shift(self, x):
            return x + self.value
    @dataclasses.dataclass(order=True)
    class Config:
        size: int = 3
        def __hash__(self):
            return self.size
    class Point(NamedTuple):
        x: int
        y: int = 2
        def total(self):
            return self.x + self.y
    class Box(TypedDict, total=False):
        width: int
    class Base:
        """Document."""
        def g(self, x):
            return [x + i for i in range(3) if i]
    class Model(Base):
        __slots__ = ("cache",)
        def g(self, x):
            return super().g(x)
        @functools.lru_cache
        def slow(self):
            return self.cache
    def helper(x):
        """Document."""
        with open(x) as file:
            return {k: v for k, v in file}
    def f(x, config=Config(4)):
        try:
            print(f"{x!r:>{N}} {helper}", Box(width=1), Point(1).total(), sep=",")
            return Kind.A.shift(x), Model().g(x), collections.OrderedDict(a=lambda: x and N or 2)
        except (KeyError, ValueError) as error:
            raise RuntimeError from error
        finally:
            del x
    '''
)

PRINT = """
import pyarrow as pa
from geneva.udf.identity.fingerprint import fingerprint
print(fingerprint(f, pa.int64()))
"""


IN_ONE_PROCESS = """
import sys
sys.path.insert(0, "archive.zip")
import module, zipped, package.inner
found = {"module": module.f, "zip": zipped.f, "package in a zip": package.inner.f}
source = open("module.py").read()
for where in ({"__name__": "anywhere"}, {}, globals()):
    exec(source, where)
    found[f"exec in {len(found)}"] = where["f"]
import pyarrow as pa
from geneva.udf.identity.fingerprint import fingerprint
for way, function in found.items():
    print(way, fingerprint(function, pa.int64()), sep="=")
"""


def ways_in_one_process(workshop: Workshop, code: str) -> dict[str, str]:
    """Return the fingerprints of a function that is imported and executed in several ways."""
    workshop.write("module", code)
    with zipfile.ZipFile(workshop.directory / "archive.zip", "w") as archive:
        archive.writestr("zipped.py", code)
        archive.writestr("package/__init__.py", "")
        archive.writestr("package/inner.py", f"\n\n{code}")
    printed = workshop.run("-c", IN_ONE_PROCESS).splitlines()
    return dict(line.split("=") for line in printed)


def ways_in_their_own_process(workshop: Workshop, code: str) -> dict[str, str]:
    """Return the fingerprints of a function in a script that Python gets in several ways."""
    script = code + PRINT
    path = workshop.write("script", script)
    return {
        "script": workshop.run(str(path)),
        "-m": workshop.run("-m", "script"),
        "-c": workshop.run("-c", script),
        "stdin, a pipe": workshop.run("-", stdin=script),
        "stdin, a prompt": workshop.run("-i", "-q", stdin=as_typed(script)),
    }


def as_typed(code: str) -> str:
    """Return code as one types it: with an empty line after each definition."""
    lines: list[str] = []
    for line in code.splitlines():
        begins = line and not line[0].isspace() and lines and lines[-1].startswith(" ")
        lines += ["", line] if begins else [line]
    return "\n".join(line for line in [*lines, ""])


@pytest.mark.slow
def test_wherever_the_code_comes_from(workshop: Workshop):
    found = ways_in_one_process(workshop, CODE) | ways_in_their_own_process(workshop, CODE)
    assert len(found) == 11
    assert len(set(found.values())) == 1, found
    # Written down, because every Python must agree on it: on `open`, on what a TypedDict is made
    # of, on comprehensions, and on what dataclasses and enums write into a class.
    assert found["module"] == "b16708e85f73be63024fa0b90e2d8ede"
    changed = ways_in_one_process(workshop, CODE.replace("range(3)", "range(4)"))
    assert len(set(changed.values())) == 1, changed
    assert set(found.values()).isdisjoint(changed.values())


@pytest.mark.parametrize(
    "change",
    [
        ("return x + self.value", "return x - self.value"),
        ("return self.size", "return -self.size"),
        ("size: int = 3", "size: int = 4"),
        ("return self.x + self.y", "return self.x - self.y"),
        ("y: int = 2", "y: int = 3"),
        ("return super().g(x)", "return super().g(-x)"),
        ("open(x)", "open(x, 'rb')"),
        ("Config(4)", "Config(5)"),
        ("{x!r:>{N}}", "{x!s:>{N}}"),
        ("x and N or 2", "x or N and 2"),
        ("ValueError) as", "TypeError) as"),
        ("N = 1", "N = 2"),
    ],
    ids=lambda change: change[1],
)
def test_a_change_is_seen_wherever_the_code_comes_from(workshop: Workshop, change: tuple[str, str]):
    """Also in `<string>`: that is the file of `-c`, and of what dataclasses generate."""
    prints = []
    for code in (CODE, CODE.replace(*change)):
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(code, "<string>", "exec", dont_inherit=True), namespace)
        prints.append(of(namespace["f"]))
        assert workshop.f(code) == prints[-1]
    assert prints[0] != prints[1]


def test_a_file_edited_after_it_was_imported(workshop: Workshop):
    source = "N = 1\ndef g(x):\n    return x + N\ndef f(x):\n    return g(x)\n"
    module = workshop.load(source, "edited")
    before = of(module.f)
    workshop.write("edited", source.replace("x + N", "x - N"))
    assert of(module.f) == before
    workshop.write("edited", "# gone\n")
    assert of(module.f) == before
    (workshop.directory / "edited.py").unlink()
    assert of(module.f) == before
    assert workshop.load(source.replace("x + N", "x - N"), "edited_2")
    assert of(sys.modules["edited_2"].f) != before


# ------------------------------------------------------------------------------ what calls leave

STATE = {
    "memo": """
        MEMO = {}
        def f(x):
            if x not in MEMO:
                MEMO[x] = x + 1
            return MEMO[x]
    """,
    "memo with a long key": """
        MEMO = {}
        def f(x):
            MEMO[(str(x).lower(), x + 1)] = len(MEMO)
            return x
    """,
    "counter": """
        import collections
        COUNTS = collections.Counter()
        def f(x):
            COUNTS[x] += 1
            return x
    """,
    "setdefault": """
        MEMO = {}
        def f(x):
            return MEMO.setdefault(x, x + 1)
    """,
    "list and set": """
        SEEN, ORDER = set(), []
        def f(x):
            SEEN.add(x)
            ORDER.append(x)
            return len(ORDER)
    """,
    "in a helper": """
        MEMO = {}
        def remember(x):
            MEMO[x] = x
        def f(x):
            remember(x)
            return MEMO.get(x)
    """,
    "default": """
        def f(x, memo={}):
            memo[x] = x
            return memo
    """,
    "closure": """
        def memoized(function):
            memo = {}
            def wrapper(x):
                if x not in memo:
                    memo[x] = function(x)
                return memo[x]
            return wrapper
        @memoized
        def f(x):
            return x + 1
    """,
    "attribute of itself": """
        def f(x):
            f.calls = x
            return x
    """,
    "a global that a helper assigns": """
        model = None
        def load():
            global model
            model = model or [1]
        def f(x):
            load()
            return model
    """,
    "a variable that a sibling assigns": """
        def make():
            n = 0
            def count():
                nonlocal n
                n += 1
            def f(x):
                count()
                return x if n else None
            return f
        f = make()
    """,
    "lru_cache": """
        import functools
        @functools.lru_cache(maxsize=None)
        def slow(x):
            return x
        def f(x):
            return slow(x)
    """,
    "cached_property": """
        import functools
        class Model:
            def __init__(self):
                self.n = 1
            @functools.cached_property
            def size(self):
                return self.n + 1
        MODEL = Model()
        def f(x):
            return MODEL.size
    """,
    "cached_property of a callable": """
        import functools
        class Model:
            @functools.cached_property
            def size(self):
                return 2
            def __call__(self, x):
                return self.size
        f = Model()
    """,
    "the generator behind random's functions": """
        from random import choice, random
        def f(x):
            return random() + choice([1, 2])
    """,
    "the generator behind numpy's functions": """
        from numpy.random import rand
        def f(x):
            return rand()
    """,
    "the environment": """
        from os import environ
        def f(x):
            environ["GENEVA_TEST_ENVIRONMENT"] = str(x)
            return x
    """,
    "single dispatch": """
        import functools
        @functools.singledispatch
        def g(x):
            return x
        def f(x):
            return g(x)
    """,
    "memo of another module": """
        import memos
        def f(x):
            memos.MEMO[x] = x
            return x
    """,
}


@pytest.mark.parametrize("source", STATE.values(), ids=STATE)
def test_what_a_call_leaves_behind(
    workshop: Workshop, source: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GENEVA_TEST_ENVIRONMENT", "")
    workshop.write("memos", "MEMO = {}\n")
    module = workshop.load(source)
    before = of(module.f)
    module.f(1)
    module.f(2)
    assert of(module.f) == before


CONSTANTS = {
    "read only": """
        TABLE = {"a": {n}}
        def f(x):
            local = {}
            local[x] = TABLE[x]
            return local
    """,
    "filled by what is not called": """
        TABLE = {}
        def register(key, value):
            TABLE[key] = value
        register("a", {n})
        def f(x):
            return TABLE[x]
    """,
    "filled by a method": """
        class Model:
            def __init__(self):
                self.table = {}
            def add(self, key, value):
                self.table[key] = value
            def __call__(self, x):
                return self.table[x]
        f = Model()
        f.add("a", {n})
    """,
    "a key of what is filled": """
        KEYS, MEMO = [{n}], {}
        def f(x):
            MEMO[KEYS[0]] = x
            return KEYS
    """,
    "a sorted list": """
        TABLE = [{n}, 0]
        def f(x):
            return sorted(TABLE)
    """,
    "what the cached property is made of": """
        import functools
        class Model:
            def __init__(self):
                self.n = {n}
            @functools.cached_property
            def size(self):
                return self.n + 1
        MODEL = Model()
        def f(x):
            return MODEL.size
    """,
    "in a module used as a whole": """
        import sys
        TABLE = {}
        def configure():
            TABLE["a"] = {n}
        configure()
        HERE = sys.modules[__name__]
        def f(x):
            return getattr(HERE, "TABLE")["a"]
    """,
}


@pytest.mark.parametrize("source", CONSTANTS.values(), ids=CONSTANTS)
def test_what_is_no_state(workshop: Workshop, source: str):
    one, same, other = (workshop.f(source.replace("{n}", n)) for n in "112")
    assert one == same != other


# ------------------------------------------------------------------------------ Python versions


def other_pythons() -> list[str]:
    """Return Pythons 3.11 to 3.13 on this machine that are not this one, one of each."""
    found = {}
    versions = [v for v in ("3.11", "3.12", "3.13") if v != "{}.{}".format(*sys.version_info)]
    for version in versions:
        managed = pathlib.Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
        for candidate in [shutil.which(f"python{version}"), *map(str, managed)]:
            asked = [candidate or "false", "-c", "import sys; print(*sys.version_info[:2])"]
            done = subprocess.run(asked, capture_output=True, text=True, check=False)
            if done.stdout.split() == version.split("."):
                found[version] = candidate
    return [python for python in found.values() if python]


DIGESTS = """
import json, sys, types
package = types.ModuleType("identity")  # without what only this Python has installed
package.__path__ = [sys.argv[1]]
for name in ("geneva", "geneva.udf", "geneva.udf.identity"):
    sys.modules[name] = package
from geneva.udf.identity.bytecode import all_codes, is_inlined
from geneva.udf.identity.code_meaning import code_digest
def digest(value):
    if isinstance(value, frozenset):
        value = sorted(map(repr, value))
    return repr((type(value).__name__, value)).encode()
code = compile(sys.stdin.read(), "x", "exec", dont_inherit=True)
found = {c.co_qualname: code_digest(c, digest).hex() for c in all_codes(code) if not is_inlined(c)}
json.dump(found, sys.stdout)
"""

SYNTAX = '''
def conditions(a, b, c):
    if a and (b or not c) and a is not None:
        return a and b or c
    while a < b < c or (a := a + 1) > 3:
        a += 1
        if a == 7: break
        elif a is None: continue
    else:
        return [a, *b], {**c, "k": 1}, a if b else c
    assert a, f"{a!r:>{b}} {c:{a}{b}} {a=} {a!s:{b(c, d=a)!r}}"
    return -a, +b, ~c, not a, a[1:b], a[::2], a[b:]
def comprehensions(a, b):
    x = [i for i in a]
    y = {i: (j, x) for i in a for j in i if j if i}
    z = {i for i in (k for k in a) if [i for i in b]}
    w = [[c for c in r] for r in a if (last := r)]
    return x, y, z, w, [lambda: i + b for i in a], last
def unpacking(a, b, c):
    low, high = a, b
    x, y, z = c, b, a
    (p, q), *r = low, high
    return [low < i < high for i in a], [x + y + z for j in p], q, r
def errors(a, b):
    try:
        with a as c, b(1, *a, k=2, **b):
            return [i for i in c]
    except (KeyError, a.B) as e:
        raise ValueError("no") from e
    except OSError:
        raise
    else:
        del a[0], b.c
    finally:
        b.c[1:2] = a
    for _, _, (x, *y) in a:
        try:
            continue
        finally:
            print(x, end="")
def generators(a):
    try:
        x = yield a
        yield from [x for x in a]
    finally:
        yield
    return (i for i in a if i)
async def asynchronous(a):
    async with a as b:
        async for x in b:
            await x
            yield x
def matching(a):
    match a:
        case {"x": 1, **rest}: return rest
        case [1, *y] if y: return y
        case Kind(b=c) | (c, 1): return c
        case _: return f"", f"{a:{a}}"
def outer(a):
    n = 0
    class Inner(a):
        """Document."""
        k: int = 3
        m = [j for j in range(3)]
        def go(self, *args, x=1, y: int = 2, **kw) -> "str":
            """Document."""
            nonlocal n
            n += 1
            return super().go(*args, x=x, **kw), super(Inner, self).k, __class__
    def decorated(q, /, r=a, *, s=n):
        global G
        import os.path as p, json
        from os import path, sep as separator
        G = p, json, path, separator
        return lambda *t, u=r: (t, u, q, s)
    return Inner, decorated
'''


def test_every_python_reads_the_same():
    pythons = other_pythons()
    if not pythons:
        pytest.skip("no other Python 3.11 to 3.13 on this machine")
    folder = str(pathlib.Path(code_digest.__code__.co_filename).parent)
    names = {c.co_qualname for c in all_codes(compile(SYNTAX, "x", "exec", dont_inherit=True))}
    assert len(names) > 10
    found = {}
    for python in [sys.executable, *pythons]:
        done = subprocess.run(
            [python, "-W", "ignore", "-c", DIGESTS, folder],
            input=SYNTAX,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        assert done.returncode == 0, f"{shlex.quote(python)}: {done.stderr}"
        found[python] = json.loads(done.stdout)
    here = found.pop(sys.executable)
    for python, there in found.items():
        differing = {name for name in here if here[name] != there.get(name, here[name])}
        assert not differing, f"{python}: {differing}"


def test_code_is_digested_once_and_none_is_taken_for_another():
    asked: list[Any] = []

    def digest(constant: Any) -> bytes:
        asked.append(constant)
        return repr(constant).encode()

    once = compile("lambda: 12345", "once", "eval").co_consts[0]
    assert code_digest(once, digest) == code_digest(once, digest)
    assert asked == [12345]
    # Each is gone before the next is made, so that their ids are used again.
    made = {
        code_digest(compile(f"lambda: {n}", "one", "eval").co_consts[0], digest) for n in range(99)
    }
    assert len(made) == 99
