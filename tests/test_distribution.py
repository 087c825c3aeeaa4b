"""The import name is shared with another distribution: who has both is told so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import geneva
from geneva._distribution import check_distribution

PACKAGE = Path(geneva.__file__).parent


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path where the other distribution says that it is installed."""
    facts = tmp_path / "geneva-0.14.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: geneva\nVersion: 0.14.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_alone_there_is_nothing_to_say() -> None:
    check_distribution(PACKAGE)


def test_in_one_folder_it_is_an_error(other: Path) -> None:
    (other / "geneva").mkdir()
    with pytest.raises(ImportError, match=r"'geneva' 0\.14\.0.*in one folder.*pip uninstall"):
        check_distribution(other / "geneva")


def test_beside_it_is_a_warning(other: Path) -> None:
    with pytest.warns(RuntimeWarning, match="This is geneva-spark"):
        check_distribution(PACKAGE)


def test_it_is_checked_at_import(other: Path) -> None:
    path = [str(other), str(PACKAGE.parent)]
    code = f"import sys; sys.path[:0] = {path!r}; import geneva"
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "This is geneva-spark" in ended.stderr
