"""Modules that a function imports in its body travel with it; compiled packages don't."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import pathlib
import subprocess
import sys
import textwrap
import types
import warnings
import zipfile

import pytest

from geneva.errors import ClassTwiceWarning
from geneva.execution.worker.surroundings import enter_function, trying_functions
from geneva.udf.declare import UDF, deserialize_udf, serialize_udf, udf, udf_digest
from geneva.udf.identity import user_code
from geneva.udf.shipped_modules import activate
from workshop import Workshop, of

WORKER = """
import sys
from geneva.udf.declare import deserialize_udf, udf_digest
from geneva.udf.shipped_modules import activate
for path in sys.argv[1:]:
    data = open(path, "rb").read()
    loaded = deserialize_udf(data, udf_digest(data))
    activate(loaded.modules)
    print(loaded(1))
"""


def on_a_worker(
    folder: pathlib.Path, *functions: UDF, cwd: pathlib.Path | None = None
) -> list[str]:
    """Call functions one after the other in a process that doesn't have the user's files."""
    paths = []
    for number, function in enumerate(functions):
        paths.append(folder / f"{number}.udf")
        paths[-1].write_bytes(serialize_udf(function))
    source = str(pathlib.Path(user_code.__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore", "-c", WORKER, *map(str, paths)],
        env={**os.environ, "PYTHONPATH": source},
        cwd=cwd or "/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def declared(workshop: Workshop, body: str, head: str = "", name: str | None = None) -> UDF:
    source = f"{head}\ndef f(x: int) -> int:\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"
    return udf(workshop.load(source, name).f)


BODIES = {
    "import": "import helpers\nreturn helpers.g(x)",
    "alias": "import pk.deep.leaf as leaf\nreturn leaf.g(x)",
    "from": "from pk.deep.leaf import g\nreturn g(x)",
    "submodule": "from pk.deep import leaf\nreturn leaf.g(x)",
    "by literal name": 'import importlib\nreturn importlib.import_module("pk.deep.leaf").g(x)',
    "nested": "def inner():\n    import helpers\n    return helpers.g(x)\nreturn inner()",
    "circle": "import one\nreturn one.g(x)",
    "namespace": "from spread.part import g\nreturn g(x)",
    "of a called function": "return through(x)",
}


AROUND = {
    "cached": "@functools.cache\ndef g(x):\n    return x + helpers.N",
    "partial": "def add(y, x):\n    return x + y * helpers.N\ng = functools.partial(add, 1)",
    "dispatched": """
@functools.singledispatch
def g(x):
    return [g(y) for y in x]
@g.register
def _(x: int):
    return x + helpers.N
""",
    "method": """
class Model:
    @functools.singledispatchmethod
    def g(self, x): ...
    @g.register
    def _(self, x: int):
        return x + helpers.N
g = Model().g
""",
    "vectorized": "@np.vectorize\ndef g(x):\n    return x + helpers.N",
    "vectorized and called": """
g = np.vectorize(lambda x: x + helpers.N, otypes=[int])
g([1, 2])
""",
    "made by numpy": "g = np.frompyfunc(lambda x: x + helpers.N, 1, 1)",
    "cached around another": "g = functools.cache(np.vectorize(lambda x: x + helpers.N))",
    "called like another": """
@functools.wraps(json.dumps)
def g(x):
    return x + helpers.N
""",
    "class called like another": """
class Model:
    __module__ = "json"
    def __call__(self, x):
        return x + helpers.N
g = Model()
""",
    "wrapped elsewhere": "@helpers.plus\ndef g(x):\n    return x",
}
"""Functions around functions of the user's, which are of Python's or numpy's kinds."""


def test_what_functions_take_from_a_module_is_found_where_they_are_written(
    workshop: Workshop, tmp_path: pathlib.Path
):
    """The module has a lock, so that it can't be sent as a whole; and each change of it counts."""
    helpers = """
        import functools, threading
        LOCK = threading.Lock()
        N = {n}
        def deeper(x):
            return x + N
        def plus(function):
            @functools.wraps(function)
            def wrapped(x):
                return deeper(function(x))
            return wrapped
    """
    head = "import functools, helpers, json, numpy as np"

    def all_declared(n: int) -> list[UDF]:
        workshop.load(helpers.replace("{n}", str(n)), "helpers")
        heads = [f"{head}\n{around}" for around in AROUND.values()]
        return [declared(workshop, "return int(g(x))", each) for each in heads]

    first, second = all_declared(40), all_declared(41)
    assert on_a_worker(tmp_path, *first, *second) == ["41"] * len(first) + ["42"] * len(first)
    for one, other in zip(first, second, strict=True):
        assert one.fingerprint != other.fingerprint


def test_only_what_is_taken_travels_wherever_the_function_is(
    workshop: Workshop, tmp_path: pathlib.Path
):
    """Also inside `np.vectorize`: another function of a module asks for what nobody needs."""
    workshop.write(
        "lower",
        """
        BIG = "b" * 10**6
        N = 40
        def plus(x):
            return x + N
        """,
    )
    workshop.write(
        "upper",
        """
        import lower, numpy as np
        def other():
            return lower.BIG
        def clean(x):
            return deeper(x)
        deeper = np.vectorize(lambda x: lower.plus(x))
        """,
    )
    head = "import numpy as np, upper\ng = np.vectorize(lambda x: upper.clean(x))"
    function = declared(workshop, "return int(g(x))", head)
    assert on_a_worker(tmp_path, function) == ["41"]
    assert len(serialize_udf(function)) < 10**5


def test_a_module_that_is_held_by_an_object_of_others_travels_as_a_whole(
    workshop: Workshop, tmp_path: pathlib.Path
):
    workshop.write("helpers", "N = 40\ndef plus(x):\n    return x + N\n")
    head = "import helpers, numpy as np\nHELD = np.array([helpers], dtype=object)"
    function = declared(workshop, "return HELD[0].plus(x)", head)
    assert on_a_worker(tmp_path, function) == ["41"]


TWICE = {
    "class": (
        "from shapes import Shape",
        "from shapes import make\nreturn int(isinstance(make(), Shape))",
    ),
    "attribute": (
        "import shapes",
        "import uses\nreturn int(isinstance(uses.make(), shapes.Shape))",
    ),
    "base": (
        "class Own(__import__('shapes').Shape): ...",
        "import shapes\nreturn int(issubclass(Own, shapes.Shape))",
    ),
}
ONCE = {
    "at the top": (
        "import shapes\nfrom shapes import Shape",
        "return int(isinstance(shapes.make(), Shape))",
    ),
    "inside": ("", "from shapes import Shape, make\nreturn int(isinstance(make(), Shape))"),
    "in annotations": (
        "import dataclasses, shapes\n@dataclasses.dataclass\nclass Box:\n    shape: shapes.Shape\n"
        "    def put(self, shape: list[shapes.Shape]) -> shapes.Shape:\n        return shape[0]",
        "import shapes as s\nreturn int(isinstance(Box(0).put([s.make()]), s.Shape))",
    ),
    "the module alone": (
        "import uses",
        "import shapes\nreturn int(isinstance(shapes.make(), shapes.Shape))",
    ),
}


@pytest.mark.parametrize("case", [*TWICE, *ONCE])
def test_a_class_that_a_worker_would_have_twice_is_told(
    workshop: Workshop, tmp_path: pathlib.Path, case: str
):
    workshop.write("shapes", "class Shape: ...\ndef make():\n    return Shape()\n")
    workshop.write("uses", "import shapes\ndef make():\n    return shapes.make()\n")
    head, body = (TWICE | ONCE)[case]
    function = declared(workshop, body, head)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        worker = on_a_worker(tmp_path, function)
    assert function(1) == 1
    if case in ONCE:
        assert (worker, told) == (["1"], [])
        return
    (warning,) = told
    assert warning.category is ClassTwiceWarning
    assert "UDF 'f': workers have shapes.Shape twice" in str(warning.message)
    assert worker == ["0"], "it is why"


def test_calls_of_a_vectorized_function_are_no_change(workshop: Workshop):
    source = "import numpy as np\ng = np.vectorize(abs, otypes=[int])\ndef f(x):\n    return g(x)\n"
    module = workshop.load(source)
    before = of(module.f)
    module.g([1, 2])
    assert of(module.f) == before


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_what_is_imported_in_the_body_comes_along(
    workshop: Workshop, tmp_path: pathlib.Path, body: str
):
    g = "def g(x):\n    return x + 40\n"
    workshop.write("helpers", "from pk.deep.leaf import g\n")
    workshop.write("pk.__init__", "")
    workshop.write("pk.deep.__init__", "from . import base\n")
    workshop.write("pk.deep.base", "ONE = 40\n")
    workshop.write("pk.deep.leaf", "from .base import ONE\ndef g(x):\n    return x + ONE\n")
    workshop.write("one", f"import two\n{g}")
    workshop.write("two", "import one\n")
    workshop.write("spread.part", g)
    head = "def through(x):\n    import helpers\n    return helpers.g(x)\n"
    function = declared(workshop, body, head)
    assert function(1) == 41
    assert on_a_worker(tmp_path, function) == ["41"]


def test_relative_imports_in_the_body(workshop: Workshop, tmp_path: pathlib.Path):
    workshop.write("rel.__init__", "")
    workshop.write("rel.other", "N = 4\n")
    function = declared(workshop, "from .other import N\nreturn x + N", name="rel.mine")
    assert on_a_worker(tmp_path, function) == ["5"]


def test_a_module_in_an_archive(
    workshop: Workshop, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    archive = tmp_path / "lib.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("in_a_zip.py", "def g(x):\n    return x + 5\n")
    monkeypatch.syspath_prepend(str(archive))
    function = declared(workshop, "import in_a_zip\nreturn in_a_zip.g(x)")
    data = serialize_udf(function)
    archive.unlink()
    assert b"return x + 5" in data
    monkeypatch.undo()
    sys.modules.pop("in_a_zip", None)
    loaded = deserialize_udf(data, udf_digest(data))
    activate(loaded.modules)
    assert loaded(1) == 6
    activate(())


def test_a_module_without_a_file(
    workshop: Workshop, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    made = types.ModuleType("made_by_hand")
    exec("def g(x):\n    return x + 6\n", made.__dict__)
    monkeypatch.setitem(sys.modules, "made_by_hand", made)
    assert on_a_worker(
        tmp_path, declared(workshop, "import made_by_hand\nreturn made_by_hand.g(x)")
    ) == ["7"]


def test_bytecode_alone(workshop: Workshop, tmp_path: pathlib.Path):
    import py_compile

    source = workshop.write("only_bytecode", "def g(x):\n    return x + 7\n")
    py_compile.compile(str(source), str(source.with_suffix(".pyc")))
    source.unlink()
    function = declared(workshop, "import only_bytecode\nreturn only_bytecode.g(x)")
    assert on_a_worker(tmp_path, function) == ["8"]


def test_each_function_gets_the_modules_that_it_came_with(
    workshop: Workshop, tmp_path: pathlib.Path
):
    """One worker process serves functions of several days; a worker's own file is another one."""
    body = "from pk import same\nreturn same.g(x)"
    workshop.write("pk.__init__", "")
    first_file = workshop.write("pk.same", "def g(x):\n    return x + 1\n")
    first = declared(workshop, body)
    first_data = serialize_udf(first)
    first_file.write_text("def g(x):\n    return x + 100\n")
    second = declared(workshop, body)
    other = tmp_path / "worker" / "pk"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    (other / "same.py").write_text("def g(x):\n    return x + 9000\n")
    stored = deserialize_udf(first_data, udf_digest(first_data))
    assert stored.fingerprint != second.fingerprint
    told = on_a_worker(tmp_path, stored, second, stored, cwd=other.parent)
    assert told == ["2", "101", "2"], "and stored again, a function keeps its modules"


def test_where_it_was_declared_the_users_own_module_is_used(workshop: Workshop):
    workshop.write("mine_here", "calls = []\ndef g(x):\n    calls.append(x)\n    return x\n")
    function = declared(workshop, "import mine_here\nreturn mine_here.g(x)")
    function(1)
    data = serialize_udf(function)
    loaded = deserialize_udf(data, udf_digest(data))
    own = sys.modules["mine_here"]
    activate(loaded.modules)
    loaded(2)
    assert sys.modules["mine_here"] is own
    assert own.calls == [1, 2]


def test_a_function_that_was_tried_leaves_no_modules_behind(workshop: Workshop):
    file = workshop.write("mine_later", "N = 1\n")
    function = declared(workshop, "import mine_later\nreturn x + mine_later.N")
    data = serialize_udf(function)
    loaded = deserialize_udf(data, udf_digest(data))
    with trying_functions({}):
        enter_function(loaded)
        assert loaded(1) == 2
    assert "mine_later" not in sys.modules
    file.write_text("N = 100\n")
    assert workshop.load("import mine_later\nN = mine_later.N\n").N == 100, "the user's own file"


def test_a_function_that_was_tried_leaves_the_users_modules_in_place(workshop: Workshop):
    file = workshop.write("mine_edited", "N = 1\n")
    function = declared(workshop, "import mine_edited\nreturn x + mine_edited.N")
    data = serialize_udf(function)
    loaded = deserialize_udf(data, udf_digest(data))
    own = importlib.import_module("mine_edited")
    file.write_text("N = 100\n")
    with trying_functions({}):
        enter_function(loaded)
        assert loaded(1) == 2, "what it came with"
    assert sys.modules["mine_edited"] is own


def test_importing_runs_nothing_where_it_is_declared(workshop: Workshop, tmp_path: pathlib.Path):
    workshop.write("side_effect", f"open({str(tmp_path / 'ran')!r}, 'a').close()\nN = 1\n")
    function = declared(workshop, "import side_effect\nreturn x + side_effect.N")
    serialize_udf(function)
    assert not (tmp_path / "ran").exists()
    assert on_a_worker(tmp_path, function) == ["2"]
    assert (tmp_path / "ran").exists()


def test_a_module_of_more_names_than_fit_into_one_byte(workshop: Workshop, tmp_path: pathlib.Path):
    names = "\n".join(f"name_{i} = {i}" for i in range(300))
    workshop.write("late", "N = 2\n")
    workshop.write("many", f"{names}\nfrom late import N\n")
    function = declared(workshop, "import many\nreturn x + many.N")
    assert on_a_worker(tmp_path, function) == ["3"]


# --------------------------------------------------------------------- packages with compiled parts


@pytest.fixture
def vendored(workshop: Workshop) -> pathlib.Path:
    """A package that lies on the path, of which nobody knows who made it, with compiled parts."""
    workshop.write("vendored.__init__", "from vendored.part import g\n")
    workshop.write("vendored.part", "class C:\n    pass\ndef g(x):\n    return x + 1\n")
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    library = workshop.directory / "vendored" / "_core" / f"fast{suffix}"
    library.parent.mkdir()
    (library.parent / "__init__.py").write_text("")
    library.write_bytes(b"not really machine code")
    return library


@pytest.mark.parametrize(
    "source",
    [
        "import vendored\ndef f(x: int) -> int:\n    return vendored.g(x)",
        "from vendored.part import g\ndef f(x: int) -> int:\n    return g(x)",
        "def f(x: int) -> int:\n    import vendored\n    return vendored.g(x)",
    ],
)
def test_a_package_with_compiled_parts_is_left_to_the_workers(
    workshop: Workshop, vendored: pathlib.Path, source: str
):
    function = workshop.load(source).f
    data = serialize_udf(udf(function))
    assert b"x + 1" not in data
    assert b"co_code" not in data
    # Nothing that is in it is missed: neither a line of Python nor a byte of machine code.
    before = of(function)
    vendored.write_bytes(b"other machine code")
    changed = of(function)
    assert changed != before
    part = vendored.parents[1] / "part.py"
    part.write_text(part.read_text() + "\nN = 1\n")
    assert of(function) not in (before, changed)


def test_an_object_that_is_known_by_its_name_goes_by_it_where_its_contents_cant_travel(
    workshop: Workshop,
):
    """So one of a module is that of the worker's own, where the worker can import the module."""
    source = """
        import threading
        class Client:
            def __init__(self):
                self.lock = {content}
            def __reduce__(self):
                return "CLIENT"
        CLIENT = Client()
    """
    code = "from {name} import CLIENT\ndef f(x, at=CLIENT):\n    return at\n"
    found = {}
    for name, content in {"locked": "threading.Lock()", "open": "5"}.items():
        workshop.write(name, source.format(content=content))
        declared = udf(workshop.load(code.format(name=name)).f, data_type="int64")
        stored = serialize_udf(declared)
        read = deserialize_udf(stored, udf_digest(stored))
        found[name] = read.func(1) is sys.modules[name].CLIENT
    assert found == {"locked": True, "open": False}
