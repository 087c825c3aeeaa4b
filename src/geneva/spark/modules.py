"""Sending folders and files of Python modules to Spark's workers."""

from __future__ import annotations

import uuid
import zipfile
from pathlib import Path

from geneva.errors import UserInputError

_LEFT_OUT = {"__pycache__"}


def module_archive(module: str, folder: Path) -> Path:
    """A module as one file that Spark can send: a zip, or what is an archive already.

    Spark takes each name once in a session, wherever the file is: ours are named once and for all.
    """
    path = Path(module).expanduser()
    if not path.exists():
        raise UserInputError(f"py_modules: there is no file or folder {module!r}.")
    if path.is_file() and path.suffix != ".py":
        return path
    archive = folder / f"{path.stem}-{uuid.uuid4().hex[:12]}.zip"
    # A folder with an __init__.py is a package; any other holds modules.
    is_module = path.is_file() or (path / "__init__.py").exists()
    root = path.parent if is_module else path
    with zipfile.ZipFile(archive, "w") as target:
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file() and not _LEFT_OUT.intersection(file.parts):
                target.write(file, file.relative_to(root))
    return archive
