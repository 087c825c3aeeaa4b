"""Whose code is it: the user's, or installed, wherever that was put."""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import pathlib
import sys
import types
import weakref
import zipfile
from collections.abc import Iterator

import pyarrow as pa
import pytest

from geneva import udf
from geneva.udf.declare import deserialize_udf, serialize_udf, udf_digest
from geneva.udf.identity.user_code import (
    _files_of_distributions,
    is_user_code,
    is_user_file,
    is_user_module,
    qualified_name,
    user_modules,
)
from workshop import Workshop, of


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Ask anew: the answers of other tests are of other folders."""
    for cached in (is_user_file, _files_of_distributions):
        cached.cache_clear()
    yield
    for cached in (is_user_file, _files_of_distributions):
        cached.cache_clear()


def install(
    folder: pathlib.Path, name: str, source: str, direct_url: str | None = None
) -> dict[str, str]:
    """Write what `pip install --target` writes: a package and its dist-info. Returns the files."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}/__init__.py": source,
        f"{name}/inner.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
    }
    if direct_url is not None:
        files[f"{info}/direct_url.json"] = direct_url
    record = "".join(f"{file},sha256=x,1\n" for file in files)
    files[f"{info}/RECORD"] = record
    for file, text in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return files


SOURCE = "N = 1\ndef g(x):\n    return x + N\n"


def test_a_package_that_pip_put_into_a_folder(
    workshop: Workshop, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    target = tmp_path_factory.mktemp("target")
    monkeypatch.syspath_prepend(str(target))
    install(target, "theirs", SOURCE)
    (target / "mine.py").write_text(SOURCE)
    module = workshop.load("import theirs.inner\nfrom mine import g\ndef f(x):\n    return g(x)")
    assert not is_user_module("theirs")
    assert not is_user_module("theirs.inner")
    assert not is_user_code(module.theirs.g.__code__, module.theirs.g.__globals__)
    assert is_user_module("mine"), "nobody installed that file, it only lies there"
    assert "theirs" not in [m.__name__ for m in user_modules()]
    assert qualified_name(module.theirs.g) == "theirs.g"


def test_a_module_that_is_reloaded_from_another_place(
    workshop: Workshop, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    """First the installed one, then a checkout of it: the same module object."""
    target = tmp_path_factory.mktemp("target")
    monkeypatch.syspath_prepend(str(target))
    install(target, "theirs", SOURCE)
    module = workshop.load("import theirs\ndef f(x):\n    return theirs.g(x)", "user")
    assert module.theirs not in user_modules()
    workshop.write("theirs.__init__", SOURCE.replace("+", "-"))
    monkeypatch.syspath_prepend(str(workshop.directory))
    assert importlib.reload(module.theirs) is sys.modules["theirs"]
    assert is_user_module("theirs")
    assert module.theirs in user_modules()
    data = serialize_udf(udf(module.f, data_type=pa.int64()))
    monkeypatch.syspath_prepend(str(target))
    workshop.forget()
    assert deserialize_udf(data, udf_digest(data))(3) == 2, "what a worker with theirs computes"


def test_what_is_not_the_users_is_told_by_facts_and_not_kept(monkeypatch: pytest.MonkeyPatch):
    late, other = types.ModuleType("another name"), types.ModuleType("installed_one")
    other.__file__ = types.__file__
    for name, made in (("late_user", late), ("installed_one", other)):
        monkeypatch.setitem(sys.modules, name, made)
    assert late not in user_modules()
    late.__name__ = "late_user"
    assert late in user_modules()
    there = weakref.ref(other)
    del sys.modules["installed_one"]
    del other, made
    gc.collect()
    assert there() is None


def test_an_installed_package_counts_by_name_wherever_it_is(
    workshop: Workshop, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    prints = {}
    for place, source in {"a": SOURCE, "b": SOURCE.replace("+", "-")}.items():
        target = tmp_path_factory.mktemp(place)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(target))
            install(target, "theirs", source)
            for name in ("theirs", "theirs.inner", "user"):
                sys.modules.pop(name, None)
            prints[place] = of(workshop.load("from theirs import g as f\n", "user").f)
    assert prints["a"] == prints["b"]


def test_an_archive_with_an_installed_package(
    workshop: Workshop, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    archive = tmp_path / "deps.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for name, text in install(tmp_path / "unpacked", "zipped_theirs", SOURCE).items():
            file.writestr(name, text)
        file.writestr("zipped_mine.py", SOURCE)
    monkeypatch.syspath_prepend(str(archive))
    theirs = importlib.import_module("zipped_theirs")
    importlib.import_module("zipped_mine")
    assert ".zip" in str(theirs.__file__)
    assert not is_user_module("zipped_theirs")
    assert is_user_module("zipped_mine")


@pytest.mark.parametrize(
    "leftover",
    ["editable", "egg-info"],
)
def test_ones_own_project_stays_ones_own(workshop: Workshop, leftover: str):
    """An editable install leaves a note of itself, in some layouts next to the source."""
    if leftover == "editable":
        url = '{"url": "file:///project", "dir_info": {"editable": true}}'
        install(workshop.directory, "project", SOURCE, url)
    else:
        workshop.write("project.__init__", SOURCE)
        info = workshop.directory / "project.egg-info"
        info.mkdir()
        (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: project\nVersion: 1.0\n")
        (info / "SOURCES.txt").write_text("project/__init__.py\n")
        (info / "top_level.txt").write_text("project\n")
    importlib.invalidate_caches()
    importlib.import_module("project")
    assert is_user_module("project")


def test_an_extension_module_is_never_the_users(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
):
    workshop.write("native.__init__", "")
    package = importlib.import_module("native")
    extension = type(sys)("native._fast")
    extension.__file__ = str(
        workshop.directory / "native" / "_fast.cpython-311-x86_64-linux-gnu.so"
    )
    monkeypatch.setitem(sys.modules, "native._fast", extension)
    assert package
    assert is_user_module("native")
    assert not is_user_module("native._fast")
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        assert not is_user_file(f"/anywhere/_fast{suffix}")


def test_code_without_a_file():
    def made(namespace: dict[str, object], file: str = "<string>") -> bool:
        exec(compile("def f(): pass", file, "exec"), namespace)
        function = namespace["f"]
        return is_user_code(function.__code__, namespace)  # type: ignore[attr-defined]

    assert made({})
    assert made({"__name__": "__main__"})
    assert made({"__name__": "numpy"}), "it says so, but it is not in there"
    import json

    assert not is_user_code(compile("1", "<generated>", "eval"), vars(json))
    assert not is_user_code(compile("1", "<frozen importlib._bootstrap>", "eval"), {})


def test_names_that_every_python_agrees_on():
    import io
    import operator

    assert qualified_name(open) == qualified_name(io.open) == "builtins.open"
    assert qualified_name(len) == "builtins.len"
    assert qualified_name(pathlib.Path) == "pathlib.Path"
    assert qualified_name(operator.add) == "operator.add"
    assert qualified_name(io.BytesIO) == "io.BytesIO"


def test_asking_is_cheap(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    """Only the folder of the file is asked for what pip put there, and only once."""
    monkeypatch.setattr(
        "importlib.metadata.packages_distributions", lambda: pytest.fail("reads all that there is")
    )
    for _ in range(3):
        workshop.load("def f(x):\n    return x\n")
    assert is_user_module("workshop_1")
    assert is_user_module("workshop_3")
    assert _files_of_distributions.cache_info().misses <= 1


def test_what_only_says_that_it_is_a_module_is_no_reason_to_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Library:  # as those that cffi puts into sys.modules, for cryptography among others
        __slots__ = ()
        __class__ = property(lambda self: types.ModuleType)  # type: ignore[assignment]

    monkeypatch.setitem(sys.modules, "some_package.lib", Library())

    @udf
    def double(x: int) -> int:
        return 2 * x

    assert serialize_udf(double)
