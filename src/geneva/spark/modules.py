"""Sending folders and files of Python modules to Spark's workers."""

from __future__ import annotations

import hashlib
import shutil
import uuid
import zipfile
from functools import partial
from pathlib import Path

from geneva.errors import UserInputError

_LEFT_OUT = {"__pycache__"}


def module_archive(module: str, folder: Path) -> Path:
    """A module as one file that Spark can send: a zip, or what is an archive already.

    It is named by what is in it, and by where it is: Spark takes each name once, a module that was
    changed is another one, and processes that share a session have a folder each.
    """
    path = Path(module).expanduser().absolute()
    if not path.exists():
        raise UserInputError(f"py_modules: there is no file or folder {module!r}.")
    is_archive = path.is_file() and path.suffix != ".py"
    if is_archive and not zipfile.is_zipfile(path):
        raise UserInputError(
            f"py_modules: {module!r} is no folder, no .py file and no zip archive. Compiled "
            "modules must be installed where functions run."
        )
    made = folder / f"{uuid.uuid4().hex}.part"
    try:
        if is_archive:
            shutil.copyfile(path, made)
        else:
            _write_zip(path, made)
        with made.open("rb") as content:
            of_folder = partial(hashlib.sha256, str(folder).encode())
            digest = hashlib.file_digest(content, of_folder).hexdigest()
        # Whole, or not there at all: Spark may be serving the one of this name.
        return made.replace(
            folder / f"{path.stem}-{digest[:12]}{path.suffix if is_archive else '.zip'}"
        )
    finally:
        made.unlink(missing_ok=True)


def _write_zip(path: Path, archive: Path) -> None:
    """Write a module, or a folder of modules, as a zip: equal ones where the contents are equal."""
    # A folder with an __init__.py is a package; any other holds modules.
    is_module = path.is_file() or (path / "__init__.py").exists()
    root = path.parent if is_module else path
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    with zipfile.ZipFile(archive, "w") as target:
        for file in found:
            name = file.relative_to(root).as_posix()
            if _LEFT_OUT.intersection(file.parts):
                continue
            if file.is_dir():
                # From an archive Python imports no package without an `__init__` else.
                target.writestr(zipfile.ZipInfo(f"{name}/"), b"")
            elif file.is_file():  # no pipe, and no link to nowhere
                entry = zipfile.ZipInfo(name)  # with no date: that of a file may be no zip's
                entry.file_size = file.stat().st_size
                with file.open("rb") as source, target.open(entry, "w") as copy:
                    shutil.copyfileobj(source, copy)
