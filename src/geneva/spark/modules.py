"""Sending folders and files of Python modules to Spark's workers."""

from __future__ import annotations

import hashlib
import re
import shutil
import stat
import uuid
import zipfile
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

from geneva.errors import UserInputError


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
    return _archive(path, tuple(_entries(path)), folder, is_archive=is_archive)


class _Entry(NamedTuple):
    """A file of a module, or a folder. Size and time are there so that a change is noticed."""

    path: Path
    is_folder: bool
    size: int
    changed: int


def _entries(path: Path) -> Iterator[_Entry]:
    """What there is of a module: regular files and folders, and nothing that is hidden.

    Links to folders are not followed: they may lead in circles.
    """
    try:
        facts = path.stat()
    except OSError:  # a link to nowhere, or gone meanwhile
        return
    if stat.S_ISREG(facts.st_mode):
        yield _Entry(path, False, facts.st_size, facts.st_mtime_ns)
    elif stat.S_ISDIR(facts.st_mode):
        yield _Entry(path, True, 0, 0)
        for inner in sorted(path.iterdir()):
            is_linked = inner.is_symlink() and inner.is_dir()
            if not (inner.name.startswith(".") or inner.name == "__pycache__" or is_linked):
                yield from _entries(inner)


@lru_cache(maxsize=64)
def _archive(path: Path, entries: tuple[_Entry, ...], folder: Path, *, is_archive: bool) -> Path:
    made = folder / f"{uuid.uuid4().hex}.part"
    try:
        if is_archive:
            shutil.copyfile(path, made)
        else:
            _write_zip(path, entries, made)
        with made.open("rb") as content:
            of_folder = partial(hashlib.sha256, str(folder).encode())
            digest = hashlib.file_digest(content, of_folder).hexdigest()
        # Whole, or not there at all: Spark may be serving the one of this name.
        suffix = path.suffix if is_archive else ".zip"
        stem = re.sub(r"[^\w.-]", "_", path.stem)  # Spark takes a # for the part of an address
        return made.replace(folder / f"{stem}-{digest[:12]}{suffix}")
    finally:
        made.unlink(missing_ok=True)


def _write_zip(path: Path, entries: tuple[_Entry, ...], archive: Path) -> None:
    """Write a module, or a folder of modules, as a zip: equal ones where the contents are equal."""
    # A folder with an __init__.py is a package; any other holds modules.
    is_module = path.is_file() or (path / "__init__.py").exists()
    root = path.parent if is_module else path
    with zipfile.ZipFile(archive, "w") as target:
        for entry in entries:
            if entry.path == root:
                continue
            name = entry.path.relative_to(root).as_posix()
            if entry.is_folder:
                # From an archive Python imports no package without an `__init__` else.
                target.writestr(zipfile.ZipInfo(f"{name}/"), b"")
                continue
            member = zipfile.ZipInfo(name)  # with no date: that of a file may be no zip's
            member.file_size = entry.size
            with entry.path.open("rb") as source, target.open(member, "w") as copy:
                shutil.copyfileobj(source, copy)
