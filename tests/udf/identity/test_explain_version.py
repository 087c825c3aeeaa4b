"""`udf.explain_version()` says what is in a version, and says it of the walk that makes it."""

from __future__ import annotations

import sys
import textwrap

import pyarrow as pa

import geneva
from geneva.udf.declare import deserialize_udf, serialize_udf, udf, udf_digest
from workshop import Workshop

HELPERS = """
    import math
    LIMIT = 10
    def clean(x):
        return math.floor(min(x, LIMIT))
    def other(x):
        return x
"""

USER = """
    import threading
    import numpy as np
    import helpers
    MEMO, WEIGHTS, LOCK = {}, {"a": 1.0}, threading.Lock()
    class Model:
        size = 3
        def run(self, x):
            return x * self.size
    MODEL = Model()
    def remembered(x):
        if x not in MEMO:
            MEMO[x] = helpers.clean(x)
        return MEMO[x]
    def make(module, factor):
        def f(x, k=2):
            import lazily
            with LOCK:
                y = remembered(x) * factor * np.sqrt(WEIGHTS["a"]) + MODEL.run(k)
            return lazily.g(y) + getattr(module, "other")(y)
        return f
    f = make(helpers, 2.5)
"""


def test_everything_that_counts_is_listed(workshop: Workshop):
    workshop.write("helpers", HELPERS)
    workshop.write("lazily", "def g(x):\n    return x\n")
    made = udf(workshop.load(USER, "user").f, data_type=pa.float64())
    explained = made.explain_version()
    assert str(explained) == textwrap.dedent(
        f"""\
        version {made.version} of 'f', a fingerprint of:
        function make.<locals>.f (user.py:16)
          default k: 2
          closure variable factor: 2.5
          closure variable module: helpers (the whole module)
            its LIMIT: 10
            its clean: function clean (helpers.py:4)
              global LIMIT: 10
              global math: module math (installed: by name)
              global min: builtins.min (installed: by name)
            its math: math, see above
            its other: function other (helpers.py:6)
          global LOCK: _thread.lock (by type only)
          global MODEL: Model object
            class Model of user
              its run: function Model.run (user.py:8)
              its size: 3
          global WEIGHTS: {{'a': 1.0}}
          global getattr: builtins.getattr (installed: by name)
          global np: module numpy (installed: by name)
          global remembered: function remembered (user.py:11)
            global MEMO: dict (filled by calls: by type, without its contents)
            global helpers.clean: clean, see above
          import: lazily (the whole file, as it is now)
        type: double"""
    )
    assert explained.version == made.fingerprint
    assert not explained.is_declared
    assert {part.kind for part in explained.parts} == {
        *("function", "class", "module", "file", "installed", "value", "memo", "opaque")
    }


def test_a_version_that_the_user_gave():
    given = udf(lambda x: x, data_type=pa.int64(), version="v7").explain_version()
    assert given.is_declared
    assert given.version == "v7"
    assert str(given).startswith("version 'v7' of 'lambda', given by version=: it alone counts.")
    assert given.fingerprint in str(given)


def test_a_udf_that_was_loaded():
    made = udf(lambda x: x + 1, data_type=pa.int64(), name="plus")
    data = serialize_udf(made)
    loaded = deserialize_udf(data, udf_digest(data)).explain_version()
    assert loaded.is_pinned
    assert loaded.version == made.version
    assert "when it was stored" in str(loaded)


def test_odd_values_are_shown_in_short():
    class Broken:
        def __repr__(self) -> str:
            raise ValueError("no")

    values = [Broken()], "x" * 500, [[list(range(100))] * 100] * 100, b"\n" * 9

    def f(x: int) -> object:
        return values, Broken

    shown = str(udf(f, data_type=pa.int64()).explain_version())
    assert max(map(len, shown.splitlines())) < 140


def test_values_do_not_hide_the_functions_in_them(workshop: Workshop):
    source = """
        def one(x):
            return x
        STEPS = {"one": [one, (len, one)], "two": lambda x: x}
        def f(x):
            return STEPS
    """
    parts = udf(workshop.load(source, "steps").f, data_type=pa.int64()).explain_version().parts
    assert [part.reached_as for part in parts] == ["", "global STEPS", "", "", "type"]
    assert [part.kind for part in parts][1:4] == ["value", "function", "function"]


def test_explaining_imports_nothing(workshop: Workshop):
    workshop.write("never", "raise RuntimeError('imported')\n")
    module = workshop.load("def f(x):\n    import never\n    return never\n")
    assert "never" in str(udf(module.f, data_type=pa.int64()).explain_version())
    assert "never" not in sys.modules


def test_it_is_a_method_of_every_udf():
    made = geneva.udf(lambda x: x, data_type=pa.int64())
    assert made.version in str(made.explain_version())
