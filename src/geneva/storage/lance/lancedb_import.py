"""LanceDB, imported when it is first asked for something: that takes longer than all the rest.

Most of it is a client of REST namespaces, which LanceDB imports for the classes of its requests and
answers alone. The client itself is loaded when somebody asks for it.
"""

from __future__ import annotations

import sys
from abc import ABCMeta
from functools import cache
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

_CLIENT = "lance_namespace_urllib3_client"


@cache
def lancedb() -> ModuleType:
    """The package."""
    _put_client_off()
    import lancedb

    from geneva.storage.lance.lancedb_methods import ConnectionMethods, TableMethods

    # Ours are LanceDB's for whoever asks with isinstance, where its classes can be told so: from
    # Python 3.12 on, that of connections is a plain one.
    for theirs, ours in (
        (lancedb.DBConnection, ConnectionMethods),
        (lancedb.table.Table, TableMethods),
        (lancedb.table.LanceTable, TableMethods),  # what `lancedb.permutation` can pickle
    ):
        if isinstance(theirs, ABCMeta):
            theirs.register(ours)
    return lancedb


def _put_client_off() -> None:
    """Let `import lance_namespace_urllib3_client.models` load the models, and no more."""
    spec = find_spec(_CLIENT) if _CLIENT not in sys.modules else None
    if spec is None or spec.loader is None:
        return
    loader, package = spec.loader, module_from_spec(spec)

    def load(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        del package.__getattr__
        loader.exec_module(package)
        return getattr(package, name)

    package.__getattr__ = load  # type: ignore[method-assign]
    sys.modules[_CLIENT] = package
