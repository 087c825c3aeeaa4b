"""Sending folders and files of Python modules to Spark's workers."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from pathlib import Path

from geneva.errors import UserInputError

_LEFT_OUT = {"__pycache__"}


def module_archive(module: str, folder: Path) -> Path:
    """A module as one file that Spark can send: a zip, or what is an archive already.

    It is named by what is in it: Spark takes each name once in a session, wherever the file is, and
    a module that was changed is another one.
    """
    path = Path(module).expanduser()
    if not path.exists():
        raise UserInputError(f"py_modules: there is no file or folder {module!r}.")
    is_archive = path.is_file() and path.suffix != ".py"
    if is_archive and not zipfile.is_zipfile(path):
        raise UserInputError(
            f"py_modules: {module!r} is no folder, no .py file and no zip archive. Compiled "
            "modules must be installed where functions run."
        )
    # A folder with an __init__.py is a package; any other holds modules.
    is_module = path.is_file() or (path / "__init__.py").exists()
    root = path.parent if is_module else path
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    # With the folders, too: from an archive Python imports no package without an `__init__` else.
    files = [file for file in found if not _LEFT_OUT.intersection(file.parts)]
    digest = hashlib.sha256()
    for file in files:
        content = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
        digest.update(f"{file.relative_to(root).as_posix()} {content}\n".encode())
    suffix = path.suffix if is_archive else ".zip"
    archive = folder / f"{path.stem}-{digest.hexdigest()[:12]}{suffix}"
    if archive.exists():
        return archive
    if is_archive:
        shutil.copyfile(path, archive)
        return archive
    with zipfile.ZipFile(archive, "w") as target:
        for file in files:
            target.write(file, file.relative_to(root))
    return archive
