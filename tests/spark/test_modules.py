"""Modules of the user's as one file that Spark can send."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path
from typing import IO, Any

import pytest

from geneva.spark.modules import module_archive


@pytest.fixture
def sent(tmp_path: Path) -> Path:
    folder = tmp_path / "sent"
    folder.mkdir()
    return folder


def package(folder: Path, **sources: str) -> Path:
    folder.mkdir(parents=True)
    for name, source in {"__init__": "", **sources}.items():
        (folder / f"{name}.py").write_text(source)
    return folder


def names_in(archive: Path) -> list[str]:
    with zipfile.ZipFile(archive) as opened:
        assert opened.testzip() is None
        return opened.namelist()


def test_what_is_no_file_is_left_out_and_dates_do_not_matter(tmp_path: Path, sent: Path):
    """Files from before 1980, links of Emacs's to nowhere, pipes: nobody would write to one."""
    source = package(tmp_path / "parcel", a="A = 1", z="Z = 1")
    os.utime(source / "a.py", (0, 0))
    (source / "lock.py").symlink_to("me@host.123")
    (source / "linked.py").symlink_to(source / "z.py")
    os.mkfifo(source / "pipe.py")
    for _ in range(2):
        archive = module_archive(str(source), sent)
        assert names_in(archive) == [
            *("parcel/", "parcel/__init__.py", "parcel/a.py", "parcel/linked.py", "parcel/z.py"),
        ]
    assert list(sent.iterdir()) == [archive]


def test_equal_contents_are_equal_archives(tmp_path: Path, sent: Path):
    archives = []
    for year in (0, 2_000_000_000):
        shutil.rmtree(tmp_path / "parcel", ignore_errors=True)
        source = package(tmp_path / "parcel", a="A = 1")
        (source / "inner").mkdir()
        for file in source.iterdir():
            os.utime(file, (year, year))
        archive = module_archive(str(source), sent)
        archives.append((archive.name, archive.read_bytes()))
    assert archives[0] == archives[1]


@pytest.mark.parametrize("is_archive", [False, True])
def test_an_archive_that_was_not_finished_is_none(
    tmp_path: Path, sent: Path, monkeypatch: pytest.MonkeyPatch, *, is_archive: bool
):
    source = package(tmp_path / "parcel", a="A = 1", z="Z = 1")
    if is_archive:
        source = Path(shutil.make_archive(str(tmp_path / "made"), "zip", tmp_path, "parcel"))

    def fails(*files: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", fails)
        patch.setattr(shutil, "copyfile", fails)
        patch.setattr(zipfile.ZipFile, "write", fails)
        with pytest.raises(OSError, match="full"):
            module_archive(str(source), sent)
    assert list(sent.iterdir()) == []
    assert "parcel/z.py" in names_in(module_archive(str(source), sent))


def test_processes_that_share_a_session_have_names_of_their_own(tmp_path: Path, sent: Path):
    """Each has a folder; Spark refuses a second file of the same name from another place."""
    source = package(tmp_path / "parcel", a="A = 1")
    other = tmp_path / "of another process"
    other.mkdir()
    names = [module_archive(str(source), folder).name for folder in (sent, other, sent)]
    assert names[0] == names[2] != names[1]


def test_what_is_hidden_stays_here(tmp_path: Path, sent: Path):
    """A repository, an environment, bytecode: but not what is in a hidden folder as a whole."""
    source = package(tmp_path / ".work" / "parcel", a="A = 1")
    package(source / "inner", b="B = 1")
    for folder in (".git", ".venv/lib", "__pycache__", "inner/__pycache__"):
        package(source / folder)
    (source / ".env").write_text("KEY=s3cr3t")
    (source / "circle").symlink_to(source)
    names = ["a.py", "inner/", "inner/__init__.py", "inner/b.py"]
    assert names_in(module_archive(str(source), sent)) == [
        *("parcel/", "parcel/__init__.py", *(f"parcel/{name}" for name in names))
    ]
    (source / "__init__.py").unlink()
    assert names_in(module_archive(str(source), sent)) == names


def test_only_what_was_changed_is_read_again(
    tmp_path: Path, sent: Path, monkeypatch: pytest.MonkeyPatch
):
    """Every start of a job asks for the archives of its modules."""
    source = package(tmp_path / "parcel", a="A = 1")
    opened: list[str] = []
    own = Path.open

    def noted(path: Path, *args: Any, **settings: Any) -> IO[Any]:
        opened.append(path.name)
        return own(path, *args, **settings)

    first = module_archive(str(source), sent)
    monkeypatch.setattr(Path, "open", noted)
    monkeypatch.setattr(Path, "read_bytes", lambda path: noted(path, "rb").read())
    assert module_archive(str(source), sent) == first
    assert opened == []
    (source / "a.py").write_text("A = 22")
    edited = module_archive(str(source), sent)
    assert edited != first
    assert "a.py" in opened
    (source / "a.py").write_text("A = 1")
    assert module_archive(str(source), sent) == first


def test_a_name_that_is_no_part_of_an_address(tmp_path: Path, sent: Path):
    """Spark ends with a raw error of Java where an archive's name has a `#`."""
    source = tmp_path / "c# ünï"
    source.mkdir()
    (source / "parts.py").write_text("A = 1")
    archive = module_archive(str(source), sent)
    assert archive.name.startswith("c__ünï-")
    assert names_in(archive) == ["parts.py"]
    renamed = archive.rename(tmp_path / "c#.zip")
    assert module_archive(str(renamed), sent).name.startswith("c_-")
