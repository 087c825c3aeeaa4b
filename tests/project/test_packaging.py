"""The two distributions: with all of Spark, and with the client of Spark Connect alone."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from geneva.render.text import how_to_install

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "packaging" / "client"


def project(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    return found["project"]


def test_the_client_differs_by_pyspark_alone() -> None:
    full, client = project(ROOT), project(CLIENT)
    for same in ("version", "license", "requires-python", "scripts"):
        assert client[same] == full[same]
    needs = {name: set(found["dependencies"]) for name, found in (("f", full), ("c", client))}
    (spark,) = needs["f"] - needs["c"]
    (only_client,) = needs["c"] - needs["f"]
    assert spark.startswith("pyspark>=")
    assert only_client.startswith("pyspark-client>=")


def test_messages_name_extras_that_are_there_and_no_package_of_pypi() -> None:
    extras = project(ROOT)["optional-dependencies"].keys()
    for file in (ROOT / "src").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"pip install [\"']?geneva-spark", text), file
        named = re.findall(r"how_to_install\([\"']([^\"']+)", text)
        named += re.findall(r"require\(\"[^\"]+\", \"([^\"]+)\"\)", text)
        assert set(named) <= extras, file
    assert how_to_install("console") == 'pip install ".[console]" in a checkout of geneva-spark'


@pytest.mark.slow
@pytest.mark.parametrize("folder", [ROOT, CLIENT], ids=["full", "client"])
def test_wheels_hold_the_package_and_are_small(folder: Path, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps"]
    subprocess.run([*build, "-w", tmp_path, folder], check=True, timeout=240, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 1_000_000
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "geneva/__init__.py" in names
    assert "geneva/spark/source/source.py" in names
    assert not [name for name in names if name.startswith("tests/")]
