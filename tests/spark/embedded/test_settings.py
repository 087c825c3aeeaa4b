"""The embedded Spark as a process: its settings, its silence, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import geneva
from cluster import names_in, processes_in, run_script, wait_for
from geneva.errors import SparkUnavailableError
from geneva.spark.embedded import settings as local_spark
from geneva.spark.embedded.settings import LocalOptions, local_settings, start_jvm

OPTIONS = LocalOptions(slots=2, class_archive=False)


class TestSettings:
    def test_socket_needs_a_short_path(self, tmp_path: Path) -> None:
        key = "spark.python.unix.domain.socket.enabled"
        assert local_settings(Path("/tmp/geneva-1"), OPTIONS)[key] == "true"
        assert local_settings(Path("/tmp") / ("x" * 80), OPTIONS)[key] == "false"

    def test_private_directory_moves_to_a_shorter_place(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        deep = tmp_path / ("d" * 100)
        deep.mkdir()
        monkeypatch.setattr(local_spark.tempfile, "tempdir", str(deep))
        made = local_spark.private_directory()
        try:
            assert made.parent == Path("/tmp")
            assert not names_in(deep)
            assert made.stat().st_mode & 0o077 == 0
        finally:
            made.rmdir()

    def test_master_has_retries(self) -> None:
        assert local_settings(Path("/t"), LocalOptions(slots=3))["spark.master"] == "local[3,4]"

    @pytest.mark.parametrize(
        ("files", "cores"),
        [
            ({"cpu.max": "150000 100000\n"}, 2),
            ({"cpu.max": "max 100000\n"}, 8),
            ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
            ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
            ({}, 8),
        ],
    )
    def test_container_quota_counts(
        self, tmp_path: Path, files: dict[str, str], cores: int
    ) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        assert local_spark._container_cores(tmp_path, 8) == cores

    def test_jvm_that_does_not_start_shows_its_output(self, tmp_path: Path) -> None:
        with pytest.raises(SparkUnavailableError, match="no such flag"):
            start_jvm(["/bin/sh", "-c", "echo no such flag >&2; exit 1"], tmp_path)
        assert tmp_path.exists()


@pytest.mark.spark
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
class TestProcess:
    @pytest.mark.slow
    def test_leaves_nothing_behind_and_says_nothing(self, tmp_path: Path) -> None:
        script = run_script(
            """
            session = embedded_session(LocalOptions(slots=2, class_archive=False))
            print(SparkRunner(session).submit(str, [1, 2]).result())
            """,
            tmp_path,
        )
        assert script.communicate(timeout=120) == ("['1', '2']\n", "")
        wait_for(lambda: not processes_in(tmp_path), "the JVM to leave", 10)
        assert names_in(tmp_path) == ["tmp"]
        assert names_in(tmp_path / "tmp") == []

    @pytest.mark.slow
    def test_ctrl_c_cancels_and_the_session_lives_on(self, tmp_path: Path) -> None:
        script = run_script(
            """
            session = embedded_session(LocalOptions(slots=2, class_archive=False))
            runner = SparkRunner(session)
            job = runner.submit(time.sleep, [60, 60])
            print("ready", flush=True)
            try:
                job.result()
            except KeyboardInterrupt:
                runner.cancel()
                print(type(job.exception()).__name__)
            print(SparkRunner(session).submit(str, [1]).result())
            """,
            tmp_path,
        )
        assert script.stdout is not None
        assert script.stdout.readline() == "ready\n"
        time.sleep(1)
        os.killpg(script.pid, signal.SIGINT)  # as the terminal does: to the whole group
        assert script.communicate(timeout=30) == ("JobCancelledError\n['1']\n", "")
        wait_for(lambda: not processes_in(tmp_path), "the JVM to leave", 10)

    @pytest.mark.slow
    def test_killed_python_takes_spark_along(self, tmp_path: Path) -> None:
        script = run_script(
            """
            session = embedded_session(LocalOptions(slots=2, class_archive=False))
            SparkRunner(session).submit(time.sleep, [60])
            print("ready", flush=True)
            time.sleep(60)
            """,
            tmp_path,
        )
        assert script.stdout is not None
        assert script.stdout.readline() == "ready\n"
        time.sleep(1)
        assert len(processes_in(tmp_path)) >= 3  # Python, the shell, the JVM
        script.kill()
        script.communicate()
        wait_for(lambda: not processes_in(tmp_path), "the JVM to leave", 15)
        assert names_in(tmp_path / "tmp") == []

    @pytest.mark.slow
    def test_start_that_fails_shows_the_log(self, tmp_path: Path) -> None:
        script = run_script(
            """
            from geneva.errors import SparkUnavailableError
            try:
                embedded_session(LocalOptions(memory_mb=100, class_archive=False))
            except SparkUnavailableError as error:
                print(error)
            session = embedded_session(LocalOptions(slots=2, class_archive=False))
            print(SparkRunner(session).submit(str, [1]).result())
            """,
            tmp_path,
        )
        output, errors = script.communicate(timeout=120)
        assert "could not be started here" in output
        assert "System memory" in output
        assert "must be at least" in output
        assert output.endswith("['1']\n")
        assert errors == ""

    @pytest.mark.slow
    def test_scripts_of_spark_are_used_where_configured(self, tmp_path: Path) -> None:
        (tmp_path / "conf").mkdir()
        (tmp_path / "conf" / "spark-defaults.conf").write_text("spark.geneva.test  yes\n")
        script = run_script(
            """
            session = embedded_session(LocalOptions(slots=2))
            print(session.sparkContext.getConf().get("spark.geneva.test"))
            print(SparkRunner(session).submit(str, [1]).result())
            """,
            tmp_path,
            SPARK_CONF_DIR=str(tmp_path / "conf"),
        )
        assert script.communicate(timeout=120) == ("yes\n['1']\n", "")
        wait_for(lambda: not processes_in(tmp_path), "the JVM to leave", 10)
        assert not list((tmp_path / "tmp").glob("geneva-*"))


def test_importing_geneva_imports_no_pyspark() -> None:
    code = (
        "import geneva, geneva.spark.runner, geneva.spark.sessions, geneva.execution.runner, sys\n"
        "sys.exit('pyspark' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("seconds", [0.3, 1.0])
def test_nothing_is_left_where_the_start_is_cut_off(sig: signal.Signals, seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="g-") as short:  # else Spark's folder is elsewhere
        folder = Path(short)
        code = "embedded_session(LocalOptions(slots=1, class_archive=False))"
        with run_script(code, folder) as process:
            wait_for(lambda: names_in(folder / "tmp"), "its folder")
            time.sleep(seconds)
            process.send_signal(sig)
            process.communicate(timeout=60)
        wait_for(lambda: not names_in(folder / "tmp"), "its folder to go")
        wait_for(lambda: not processes_in(folder), "its processes to end")


def test_an_editable_install_is_found_by_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path(geneva.__file__).resolve().parents[1]
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(local_spark.sysconfig, "get_path", lambda _: str(tmp_path))
    assert not local_spark._is_found_by_others()
    (tmp_path / "other.pth").write_text("import something\n/somewhere/else\n")
    assert not local_spark._is_found_by_others()
    (tmp_path / "gone.pth").symlink_to(tmp_path / "nowhere")
    (tmp_path / "._copied.pth").write_bytes(b"\0\0\n")
    (tmp_path / "bytes.pth").write_bytes(b"/a\0b\n")
    assert not local_spark._is_found_by_others()
    (tmp_path / "editable.pth").write_text(f"{here}\n")
    assert local_spark._is_found_by_others()
