"""Functions that earlier releases stored can be loaded."""

from __future__ import annotations

import io
import types

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
