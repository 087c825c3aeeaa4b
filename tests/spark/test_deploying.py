"""What docs/deploy.md says of clusters: submitting, Connect, nodes that come and go."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest

from cluster import (
    LONG_ON_A_CLUSTER,
    QUIET,
    SUBMIT,
    connect_server,
    running_cluster,
    submit_environment,
    wait_for,
)
from geneva import Connection, udf
from geneva.execution.runner import InProcessRunner
from processes import start_script
from support import Calls, column, connect, make_table

pytestmark = LONG_ON_A_CLUSTER


@pytest.fixture
def db(tmp_path: Path) -> Connection:
    """The table as this process sees it; it never computes anything here."""
    return connect(tmp_path / "db", InProcessRunner)


SUBMITTED = """
import json, sys
from pyspark.sql import SparkSession
import geneva
from features import triple
spark = SparkSession.builder.getOrCreate()
db = geneva.connect(sys.argv[1], spark=spark)
table = db.open_table("t")
table.add_columns({"y": triple})
print(json.dumps([table.backfill("y").status, table.to_spark(where="y > 3").count()]))
"""
FEATURES = """
import geneva

@geneva.udf
def triple(id: int) -> int:
    return id * 3
"""


def test_submitted_with_py_files(db: Connection, tmp_path: Path) -> None:
    table = make_table(db, [5, 5])
    (tmp_path / "job.py").write_text(SUBMITTED)
    with zipfile.ZipFile(tmp_path / "features.zip", "w") as archive:
        archive.writestr("features.py", FEATURES)
    with running_cluster(workers=1, cores=2) as cluster:

        def submit(*options: str) -> subprocess.CompletedProcess[str]:
            files = ("--py-files", str(tmp_path / "features.zip"), str(tmp_path / "job.py"), db.uri)
            return subprocess.run(
                [SUBMIT, "--master", cluster.url, *options, *QUIET, *files],
                env=submit_environment(),
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=400,
            )

        run = submit()
        assert run.returncode == 0, run.stderr[-3000:]
        assert json.loads(run.stdout.splitlines()[-1]) == ["DONE", 8]
        refused = submit("--deploy-mode", "cluster")
        assert "not supported for python applications on standalone" in refused.stderr
    assert column(table, "y") == [3 * i for i in range(10)]


PACKED = """
import json, os, sys
from pathlib import Path
from pyspark.sql import SparkSession
import geneva
uri, remote, archive = sys.argv[1:]
if remote:
    spark = SparkSession.builder.remote(remote).getOrCreate()
    spark.addArtifacts(archive + "#env", archive=True)
    spark.conf.set("spark.sql.execution.pyspark.python", "env/bin/python")
else:
    spark = SparkSession.builder.getOrCreate()

@geneva.udf
def place(id: int) -> str:
    import os
    return str(os.environ.get("OF_THE_ARCHIVE"))

table = geneva.connect(uri, spark=spark).open_table("t")
table.add_columns({"y": place})
print(json.dumps([table.backfill("y").status, table.to_spark(where="y = 'yes'").count()]))
"""


def packed_environment(folder: Path) -> Path:
    """An archive as `venv-pack` makes it, but for the packages: its Python is the one here."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nOF_THE_ARCHIVE=yes exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with tarfile.open(folder / "env.tar.gz", "w:gz") as archive:
        archive.add(python, "bin/python")
    # A driver plans data frames with the Python of the same path.
    (folder / "env" / "bin").mkdir(parents=True)
    python.rename(folder / "env" / "bin" / "python")
    return folder / "env.tar.gz"


@pytest.mark.parametrize("kind", ["classic", "connect"])
def test_a_packed_environment(db: Connection, tmp_path: Path, kind: str) -> None:
    table = make_table(db, [5, 5])
    archive = packed_environment(tmp_path)
    (tmp_path / "job.py").write_text(PACKED)
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(running_cluster(workers=1, cores=2))
        packed = ("--archives", f"{archive}#env")
        environ = submit_environment() | {"PYSPARK_PYTHON": "./env/bin/python"}
        command, remote = [SUBMIT, "--master", cluster.url, *packed, *QUIET], ""
        if kind == "connect":
            remote = stack.enter_context(connect_server(cluster.url, tmp_path))
            command, environ = [sys.executable], dict(os.environ)
        run = subprocess.run(
            [*command, str(tmp_path / "job.py"), db.uri, remote, str(archive)],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1]) == ["DONE", 10]
    assert set(column(table, "y")) == {"yes"}


REMOTE = """
    import json
    from pyspark.sql import SparkSession
    import geneva
    spark = SparkSession.builder.remote({remote!r}).getOrCreate()
    db = geneva.connect({uri!r}, spark=spark)
    table = db.open_table("t")
    result = table.backfill("y", checkpoint_size=10, task_size=20)
    frame = table.to_spark(where="y >= 100")
    found = db.get_job(result.job_id).spark
    print(json.dumps([result.status, result.rows_computed, frame.count(), found]))
    spark.stop()
    """


def test_a_connect_server_on_a_cluster_whose_nodes_come_and_go(
    db: Connection, calls: Calls, tmp_path: Path
) -> None:
    table = make_table(db, [100, 100])

    @udf(data_type=pa.int64(), input_columns=["id"])
    def square(id: int) -> int:
        import time

        calls.note([id])
        time.sleep(0.05)
        return id * id

    table.add_columns({"y": square})
    with (
        running_cluster(workers=1, cores=2) as cluster,
        connect_server(cluster.url, tmp_path) as remote,
    ):
        script = REMOTE.format(remote=remote, uri=db.uri)
        process = start_script(tmp_path / "driver", script)
        wait_for(lambda: calls.count >= 20 or process.poll() is not None, "the UDF to run", 180)
        cluster.add_worker(1)
        cluster.lose_worker(0)
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    status, _, count, found = json.loads(output.splitlines()[-1])
    assert (status, count) == ("DONE", 190)
    assert column(table, "y") == [i * i for i in range(200)]
    assert set(calls.rows) == set(range(200))
    assert found["operations"]


ALLOCATED = """
    import json, os, sys
    from pyspark.sql import SparkSession
    import geneva
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master({url!r})
    for name, value in {settings!r}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    db = geneva.connect({uri!r}, spark=spark)
    table = db.open_table("t")
    statuses = [table.backfill(name).status for name in ("half", "gpu")]
    print(json.dumps(statuses))
    spark.stop()
    """


def test_dynamic_allocation_with_needs_of_each_function(db: Connection, tmp_path: Path) -> None:
    table = make_table(db, [10, 10])

    @udf(data_type=pa.string(), input_columns=["id"], num_cpus=0.5)
    def half(id: int) -> str:
        from pyspark import TaskContext

        return str(sorted(TaskContext.get().resources()))

    @udf(data_type=pa.string(), input_columns=["id"], num_gpus=1, num_cpus=1)
    def gpu(id: int) -> str:
        from pyspark import TaskContext

        return str(sorted(TaskContext.get().resources()))

    table.add_columns({"half": half, "gpu": gpu})
    with running_cluster(workers=2, cores=1, gpus=1) as cluster:
        settings = cluster._settings() | {
            "spark.dynamicAllocation.enabled": "true",
            "spark.dynamicAllocation.shuffleTracking.enabled": "true",
            "spark.dynamicAllocation.minExecutors": "0",
            "spark.dynamicAllocation.maxExecutors": "2",
            "spark.dynamicAllocation.executorIdleTimeout": "5s",
        }
        script = ALLOCATED.format(url=cluster.url, settings=settings, uri=db.uri)
        process = start_script(tmp_path / "driver", script)
        output, errors = process.communicate(timeout=400)
        assert process.returncode == 0, errors
    assert json.loads(output.splitlines()[-1]) == ["DONE", "DONE"]
    assert set(column(table, "gpu")) == {"['gpu']"}
    assert None not in column(table, "half")
