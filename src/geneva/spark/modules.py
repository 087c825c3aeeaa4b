"""Sending folders and files of Python modules to Spark's workers."""

from __future__ import annotations

import zipfile
from pathlib import Path

from geneva.errors import UserInputError

_LEFT_OUT = {"__pycache__"}


def module_archive(module: str, folder: Path) -> Path:
    """A module as one file that Spark can send: itself, or a zip of its folder."""
    path = Path(module).expanduser()
    if not path.exists():
        raise UserInputError(f"py_modules: there is no file or folder {module!r}.")
    if path.is_file():
        return path
    archive = folder / f"{path.name}.zip"
    # A folder with an __init__.py is a package; any other holds modules.
    root = path.parent if (path / "__init__.py").exists() else path
    with zipfile.ZipFile(archive, "w") as target:
        for file in sorted(path.rglob("*")):
            if file.is_file() and not _LEFT_OUT.intersection(file.parts):
                target.write(file, file.relative_to(root))
    return archive
