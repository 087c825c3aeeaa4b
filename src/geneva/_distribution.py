"""Two distributions have a package `geneva`: this one, geneva-spark, and LanceDB's own, geneva."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

_OTHER = "geneva"


def check_distribution(package: Path) -> None:
    """Refuse to run from a folder that the other distribution has put its files into, too.

    Beside it, in another folder of the import path, it is only hidden: that is a warning.
    """
    if not any(map(_may_hold_other, sys.path)):
        return
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        other = distribution(_OTHER)
    except PackageNotFoundError:
        return
    theirs = Path(str(other.locate_file(_OTHER)))
    both = (
        f"Two distributions that have a package 'geneva' are installed: 'geneva-spark' and "
        f"'geneva' {other.version}"
    )
    if theirs.exists() and theirs.resolve() == package.resolve():
        raise ImportError(
            f"{both}, in one folder ({package}), where each overwrites files of the other. Remove "
            "both, pip uninstall -y geneva geneva-spark, and install the one you want: this one "
            "with `pip install .` in a checkout of geneva-spark."
        )
    warnings.warn(
        f"{both}. This is geneva-spark, in {package}; the other one, in {theirs}, can't be "
        "imported beside it.",
        RuntimeWarning,
        stacklevel=2,
    )


def _may_hold_other(folder: str) -> bool:
    """Whether a folder of the import path has metadata of a distribution of that name.

    Listing the folder is quicker than importing what reads the metadata.
    """
    try:
        names = [found.name for found in Path(folder or ".").iterdir()]
    except NotADirectoryError:  # an archive
        return True
    except OSError:
        return False
    return any(name.lower().startswith(f"{_OTHER}-") for name in names)


check_distribution(Path(__file__).parent)
