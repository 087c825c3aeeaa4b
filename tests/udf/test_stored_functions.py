"""Functions that earlier releases stored can be loaded."""

from __future__ import annotations

import io

import pytest

from geneva.udf import declare
from geneva.udf.call import StatefulCallable, UDFArgType
from geneva.udf.chunker import Chunker
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
