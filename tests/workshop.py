"""Modules that a test writes to a folder of its own, and fingerprints of what is in them."""

from __future__ import annotations

import importlib
import os
import pathlib
import subprocess
import sys
import textwrap
import types
from typing import Any

import pyarrow as pa

from geneva.udf.identity.fingerprint import fingerprint


def of(function: Any) -> str:
    return fingerprint(function, pa.int64())


def value_of(value: Any) -> str:
    return of(lambda: value)


class Workshop:
    """Writes modules to a directory, and takes fingerprints of their `f`."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self._before = set(sys.modules)
        self._count = 0

    def write(self, name: str, source: str) -> pathlib.Path:
        """Write a module: "pk.sub" is the file pk/sub.py, "pk.__init__" makes it a package."""
        path = self.directory / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return path

    def load(self, source: str, name: str | None = None) -> types.ModuleType:
        self._count += 1
        name = name or f"workshop_{self._count}"
        self.write(name, source)
        sys.modules.pop(name, None)
        return importlib.import_module(name)

    def f(self, source: str) -> str:
        return of(self.load(source).f)

    def without_source(self, source: str) -> str:
        """Take the fingerprint where only the bytecode is there."""
        namespace: dict[str, Any] = {"__name__": "nowhere"}
        exec(compile(textwrap.dedent(source), "<nowhere>", "exec", dont_inherit=True), namespace)
        return of(namespace["f"])

    def forget(self) -> None:
        """Forget the modules that were loaded from the directory, as a new process would."""
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            if name not in self._before and file.startswith(str(self.directory)):
                del sys.modules[name]

    def run(self, *arguments: str, stdin: str | None = None, seed: str = "0") -> str:
        """Run Python in the directory and return what it prints."""
        path = os.pathsep.join(p for p in sys.path if p)
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            input=stdin,
            cwd=self.directory,
            env={
                **os.environ,
                "PYTHONHASHSEED": seed,
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONPATH": path,
            },
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()
