"""Promises of the project as a whole: what is imported, what is unpickled, what is locked."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "geneva"
MODULES = sorted(PACKAGE.rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCK_LINES = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
LOCK = [Requirement(line) for line in LOCK_LINES if line and not line.startswith("#")]

PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "pyspark.cloudpickle"}
LOADERS = {"load", "loads", "Unpickler"}
MAY_UNPICKLE = PACKAGE / "udf" / "declare.py"
OWN_PROCESSES = PACKAGE / "execution" / "apply" / "preparing.py"
"""Speaks with processes that it has started, over sockets that nobody else has."""


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def unpickling_lines(source: str) -> list[int]:
    """Lines that mention a loader of a pickle module, under any alias."""
    tree = ast.parse(source)
    modules: dict[str, str] = {}  # name in this file -> dotted module it stands for
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.split(".")[0]
                modules[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if node.module in PICKLES and alias.name in LOADERS | {"*"}:
                    lines.append(node.lineno)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in LOADERS:
            first, _, rest = ast.unparse(node.value).partition(".")
            if ".".join(filter(None, [modules.get(first), rest])) in PICKLES:
                lines.append(node.lineno)
    return sorted(lines)


def test_the_version_is_said_once() -> None:
    import geneva

    assert geneva.__version__ == PROJECT["version"], "reinstall the package: scripts/setup dev"


@pytest.fixture(scope="module")
def sources() -> dict[Path, str]:
    """Every module of the package."""
    return {path: path.read_text(encoding="utf-8") for path in MODULES}


def test_a_module_says_what_it_is(sources: dict[Path, str]) -> None:
    assert [name_of(path) for path, text in sources.items() if not text.startswith('"""')] == []


def test_only_one_module_unpickles(sources: dict[Path, str]) -> None:
    told = {path: text for path, text in sources.items() if "pickle" in text or "dill" in text}
    lines = {path: unpickling_lines(text) for path, text in told.items()}
    may = (MAY_UNPICKLE, OWN_PROCESSES)
    assert {name_of(p): found for p, found in lines.items() if found and p not in may} == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import pickle\npickle.loads(b'')", [2]),
        ("import cloudpickle as cp\nf = cp.loads", [2]),
        ("from pickle import loads as read", [1]),
        ("from pyspark import cloudpickle\n\ncloudpickle.load(f)", [3]),
        ("import pyspark.cloudpickle\npyspark.cloudpickle.loads(b'')", [2]),
        ("def f():\n    import pickle\n    return pickle.Unpickler(x)", [3]),
        ("import json, pickle\njson.loads('1')\npickle.dumps(1)", []),
        ("text = 'pickle.loads'", []),
    ],
)
def test_unpickling_is_seen_under_any_alias(source: str, lines: list[int]) -> None:
    assert unpickling_lines(source) == lines


def test_importing_geneva_is_light() -> None:
    heavy = "import sys, geneva; print(*sorted({'pyspark', 'rich', 'typer'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


NOT_INSTALLED_HERE = {"udf-audio", "udf-text-sentence-transformers"}
"""Extras with gigabytes of models' libraries, which no command of the project installs."""


def test_the_lock_pins_everything_the_project_names() -> None:
    extras = PROJECT["optional-dependencies"]
    locked = [extras[name] for name in extras.keys() - NOT_INSTALLED_HERE]
    groups = [PROJECT["dependencies"], *locked]
    for wanted in map(Requirement, chain.from_iterable(groups)):
        if wanted.marker and not wanted.marker.evaluate():
            continue
        pins = [pin for pin in LOCK if normal(pin.name) == normal(wanted.name)]
        here = [pin for pin in pins if not pin.marker or pin.marker.evaluate()]
        assert len(here) == 1, f"{wanted.name}: run scripts/lock"
        (pin,) = next(iter(here)).specifier
        assert pin.operator == "=="
        assert wanted.specifier.contains(pin.version), f"{wanted}: run scripts/lock"


def test_the_lock_names_versions_and_nothing_else() -> None:
    assert not [line for line in LOCK_LINES if "://" in line or "--" in line or " @ " in line]


def test_rows_are_picked_in_one_way() -> None:
    """Arrow's own functions give wrong values of some slices."""
    arrows = re.compile(
        r"\.take\(pa\.|\.filter\(pa\.|\.drop_null\(|\bpc\.(take|filter|drop_null)\("
    )
    found = {name_of(path) for path in MODULES if arrows.search(path.read_text(encoding="utf-8"))}
    assert found == {"udf/picking.py"}
