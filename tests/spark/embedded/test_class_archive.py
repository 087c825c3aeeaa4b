"""The archive of classes: where it is kept, who makes it, and that nobody notices if it fails."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster import processes_in, run_script, wait_for
from geneva.spark.embedded import class_archive as jvm_archive
from geneva.spark.embedded.java import JavaHome


class TestArchive:
    @pytest.fixture
    def archive(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        self.registered.clear()
        monkeypatch.setattr(
            jvm_archive.atexit, "register", lambda *call: self.registered.append(call)
        )
        (tmp_path / "jars").mkdir()
        (tmp_path / "jars" / "a.jar").write_text("a")
        path = self.path(tmp_path)
        assert path is not None
        return path

    registered: list[object] = []  # noqa: RUF012  what would run at exit, by the fixture above

    @staticmethod
    def path(folder: Path, *flags: str) -> Path | None:
        java = JavaHome(Path("/jdk"), "17.0.1")
        return jvm_archive.archive_for(java, "4.3.0", folder / "jars", flags)

    def test_name_tells_what_it_fits(self, archive: Path, tmp_path: Path) -> None:
        assert archive.name.startswith("spark-4.3.0-java-17.0.1-")
        assert self.path(tmp_path, "-Djava.io.tmpdir=/tmp/x", "-Xmx2g") == archive
        assert self.path(tmp_path, "-XX:+UseG1GC") != archive
        os.utime(tmp_path / "jars" / "a.jar", ns=(1, 1))
        assert self.path(tmp_path) != archive

    def test_is_used_when_there(self, archive: Path) -> None:
        archive.parent.mkdir(parents=True)
        archive.touch()
        assert f"-XX:SharedArchiveFile={archive}" in jvm_archive.flags_or_train(archive)
        assert not self.registered

    def test_is_made_after_exit_otherwise(self, archive: Path) -> None:
        assert jvm_archive.flags_or_train(archive) == []
        assert jvm_archive.flags_or_train(archive) == []
        assert len(self.registered) == 1

    def test_is_not_tried_again_on_the_day_of_a_failure(
        self, archive: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(draft: Path, base: Sequence[str]) -> None:
            draft.write_text("half")
            raise OSError("no space left")

        archive.parent.mkdir(parents=True)
        monkeypatch.setattr(jvm_archive, "_run_spark", broken)
        assert jvm_archive.train(archive) is False
        assert not list(archive.parent.glob("*.draft"))
        assert jvm_archive.flags_or_train(archive) == []
        assert not self.registered
        yesterday = time.time() - 25 * 60 * 60
        os.utime(archive.with_suffix(".failed"), (yesterday, yesterday))
        jvm_archive.flags_or_train(archive)
        assert len(self.registered) == 1

    @pytest.mark.parametrize("makes_a_file", [True, False])
    def test_why_there_is_none_is_logged(
        self,
        archive: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        *,
        makes_a_file: bool,
    ) -> None:
        """A runtime that was made small ends well, and has written nothing."""

        def run(draft: Path, base: Sequence[str]) -> None:
            if makes_a_file:
                raise OSError("no space left")

        archive.parent.mkdir(parents=True)
        monkeypatch.setattr(jvm_archive, "_run_spark", run)
        jvm_archive.train(archive)
        with caplog.at_level("DEBUG", "geneva"):
            jvm_archive.flags_or_train(archive)
        assert ("no space left" if makes_a_file else "this Java made none") in caplog.text

    def test_is_tried_again_when_time_ran_out(
        self, archive: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def slow(draft: Path, base: Sequence[str]) -> None:
            raise TimeoutError

        archive.parent.mkdir(parents=True)
        monkeypatch.setattr(jvm_archive, "_run_spark", slow)
        monkeypatch.setattr(jvm_archive, "TRAINING_LIMIT_SECONDS", 0)
        assert jvm_archive.train(archive) is False
        jvm_archive.flags_or_train(archive)
        assert len(self.registered) == 1

    def test_only_one_process_makes_it(
        self, archive: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        archive.parent.mkdir(parents=True)
        made: list[bool] = []

        def train_meanwhile(draft: Path, base: Sequence[str]) -> None:
            made.append(jvm_archive.train(archive))
            draft.touch()

        monkeypatch.setattr(jvm_archive, "_run_spark", train_meanwhile)
        assert jvm_archive.train(archive) is True
        assert made == [False]

    def test_cache_that_cannot_be_written_is_no_trouble(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        jvm_archive._train_detached(tmp_path / "file" / "classes" / "x.jsa")

    def test_old_archives_go(self, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        archive.parent.mkdir(parents=True)
        for age in range(1, 6):
            old = archive.parent / f"old{age}.jsa"
            old.touch()
            os.utime(old, (time.time() - age * 1000,) * 2)
        monkeypatch.setattr(jvm_archive, "_run_spark", lambda draft, base: draft.touch())
        assert jvm_archive.train(archive)
        left = {path.name for path in archive.parent.glob("*.jsa")}
        assert left == {archive.name, "old1.jsa", "old2.jsa"}

    @pytest.mark.long
    @pytest.mark.slow
    @pytest.mark.spark
    def test_is_made_used_and_ignored_when_broken(self, tmp_path: Path) -> None:
        code = """
            session = embedded_session(LocalOptions(slots=2))
            print(SparkRunner(session).submit(str, [1]).result())
            arguments = session.sparkContext._jvm.java.lang.management.ManagementFactory
            names = arguments.getRuntimeMXBean().getInputArguments()
            print(any("SharedArchiveFile" in name for name in names))
            """
        folder = tmp_path / "cache" / "geneva" / "classes"
        first = run_script(code, tmp_path)
        assert first.communicate(timeout=60) == ("['1']\nFalse\n", "")
        archive = wait_for(lambda: list(folder.glob("*.jsa")), "the archive", 150)[0]
        wait_for(lambda: not processes_in(tmp_path), "the training to end", 30)
        second = run_script(code, tmp_path)
        assert second.communicate(timeout=60) == ("['1']\nTrue\n", "")
        archive.chmod(0o644)
        archive.write_bytes(b"not an archive")
        third = run_script(code, tmp_path)
        assert third.communicate(timeout=60) == ("['1']\nTrue\n", "")
