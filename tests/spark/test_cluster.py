"""Backfills on sessions of the user's own: a standalone cluster of two workers, and Spark Connect.

Each runs in a process of its own: a session takes the place of any other in its process.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from cluster import Cluster, running_cluster, wait_for
from conftest import connect
from geneva import Connection, udf
from geneva.execution.runner import InProcessRunner
from geneva.model.jobs import JobStatus
from processes import kill, nothing_left_in, processes_in, start_script
from support import Calls, column, make_table

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.spark,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(workers=2, cores=1, gpus=1) as cluster:
        yield cluster


@pytest.fixture
def db(tmp_path: Path) -> Connection:
    """The table as this process sees it; it never computes anything here."""
    return connect(tmp_path / "db", InProcessRunner)


CLUSTER_SCRIPT = """
    import json, sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from cluster import Cluster
    import geneva
    cluster = Cluster({url!r}, Path({directory!r}), workers=2, cores=1, gpus=1)
    with cluster.session() as spark:
        db = geneva.connect({uri!r}, spark=spark)
        table = db.open_table("t")
        plain = table.backfill("y", checkpoint_size=10, task_size=50)
        gpu = table.backfill("gpus")
        assert db._make_runner()._session is spark
        print(json.dumps([plain.status, plain.rows_computed, gpu.status, gpu.rows_computed]))
    """


def test_executor_killed_and_gpus_asked_for(
    cluster: Cluster, db: Connection, calls: Calls, tmp_path: Path
) -> None:
    table = make_table(db, [100, 100, 100])

    @udf(data_type=pa.int64(), input_columns=["id"])
    def square(id: int) -> int:
        import time

        calls.note([id])
        time.sleep(0.02)
        return id * id

    @udf(data_type=pa.string(), input_columns=["id"], num_gpus=1, num_cpus=1)
    def gpus(id: int) -> str:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        return f"{context.cpus()} {context.resources()['gpu'].addresses}"

    table.add_columns({"y": square, "gpus": gpus})
    folder = tmp_path / "driver"
    script = CLUSTER_SCRIPT.format(
        tests=str(Path(__file__).parents[1]),
        url=cluster.url,
        directory=str(cluster.directory),
        uri=db.uri,
    )
    with nothing_left_in(folder):
        process = start_script(folder, script)
        wait_for(lambda: calls.count >= 100 or process.poll() is not None, "the UDF to run", 60)
        assert process.poll() is None, kill(process)
        before = set(cluster.executors())
        victim = cluster.kill_executor()
        output, errors = process.communicate(timeout=90)
        assert process.returncode == 0, errors
        wait_for(lambda: not processes_in(folder), "the driver's JVM to leave", 10)
    assert len(before) == 2
    assert victim in before
    y, computed, z, gpu_rows = json.loads(output.splitlines()[-1])
    assert (y, z, gpu_rows) == ("DONE", "DONE", 300)
    assert column(table, "y") == [i * i for i in range(300)]
    assert set(column(table, "gpus")) == {"1 ['0']"}
    assert set(calls.rows) == set(range(300))
    # The executor's one open batch: what it had checkpointed is used by whoever takes over.
    assert calls.count <= 300 + 10
    assert computed <= 300
    assert [job.status for job in db.list_jobs()] == [JobStatus.DONE] * 2


MODULES_SCRIPT = """
    import json, os, sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from cluster import Cluster
    import geneva
    cluster = Cluster({url!r}, Path({directory!r}), workers=2, cores=1, gpus=1)
    folder = Path({modules!r})
    folder.mkdir()
    helpers = "def g(x):\\n    print('g of', x)\\n    return x + 1\\n"
    (folder / "cluster_helpers.py").write_text(helpers)
    sys.path.insert(0, str(folder))

    def f(id: int) -> str:
        import os
        import cluster_helpers
        return f"{{cluster_helpers.g(id)}} {{os.environ.get('KEY')}} {{os.environ.get('LATER')}}"

    with cluster.session() as spark:
        os.environ["LATER"] = "of this machine"
        db = geneva.connect({uri!r}, spark=spark, env={{"KEY": "key"}})
        table = db.open_table("t")
        table.add_columns({{"y": geneva.udf(f)}})
        (folder / "cluster_helpers.py").unlink()
        job = table.backfill("y")
        print(json.dumps(str(db.get_job(job).logs())))
    """


def test_modules_variables_and_output(cluster: Cluster, db: Connection, tmp_path: Path) -> None:
    """Workers of a cluster have nothing but what was sent to them."""
    table = make_table(db, [3, 3])
    folder = tmp_path / "driver"
    script = MODULES_SCRIPT.format(
        tests=str(Path(__file__).parents[1]),
        url=cluster.url,
        directory=str(cluster.directory),
        modules=str(tmp_path / "modules"),
        uri=db.uri,
    )
    process = start_script(folder, script)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert column(table, "y") == [f"{i + 1} key None" for i in range(6)]
    told = json.loads(output.splitlines()[-1])
    assert sorted(line for line in told.splitlines() if line.startswith("g of")) == [
        f"g of {i}" for i in range(6)
    ]


CONNECT_SCRIPT = """
    import json, time
    from pathlib import Path
    from pyspark.sql import SparkSession
    import geneva
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    db = geneva.connect({uri!r}, spark=spark)
    table = db.open_table("t")
    result = table.backfill("y", checkpoint_size=10)
    table.add([{{"id": 200 + i}} for i in range(20)])
    more = table.backfill("y")
    failed = None
    try:
        table.backfill("bad")
    except geneva.errors.UDFError as error:
        failed = str(error)
    future = table.backfill_async("slow")
    while not Path({mark!r}).exists():
        time.sleep(0.05)
    future.cancel()
    try:
        future.result(20)
        cancelled = None
    except geneva.errors.JobCancelledError as error:
        cancelled = str(error)
    print(json.dumps([result.status, result.rows_computed, more.rows_computed, failed, cancelled]))
    spark.stop()
    """


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("grpc", "grpc_status", "google", "zstandard"))),
    reason="Spark Connect's client is not installed: pip install 'pyspark[connect]'",
)
def test_spark_connect(db: Connection, calls: Calls, tmp_path: Path) -> None:
    table = make_table(db, [100, 100])

    @udf(data_type=pa.int64(), input_columns=["id"])
    def square(id: int) -> int:
        calls.note([id])
        return id * id

    @udf(data_type=pa.int64(), input_columns=["id"])
    def bad(id: int) -> int:
        raise ValueError("nothing good")

    mark = str(tmp_path / "slow")

    @udf(data_type=pa.int64(), input_columns=["id"])
    def slow(id: int) -> int:
        import time

        Path(mark).touch()
        time.sleep(1)
        return id

    table.add_columns({"y": square, "bad": bad, "slow": slow})
    folder = tmp_path / "driver"
    script = CONNECT_SCRIPT.format(uri=db.uri, mark=mark)
    with nothing_left_in(folder):
        process = start_script(folder, script, PYSPARK_PYTHON=sys.executable)
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        wait_for(lambda: not processes_in(folder), "the server to leave", 15)
    status, computed, more, failed, cancelled = json.loads(output.splitlines()[-1])
    assert (status, computed, more) == ("DONE", 200, 20)
    assert "nothing good" in failed
    assert "column 'bad'" in failed
    assert "cancelled" in cancelled
    assert column(table, "y") == [i * i for i in range(220)]
    assert calls.rows == list(range(220))


CONTEXT_SCRIPT = """
    import json, os, sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from cluster import Cluster
    import geneva
    from geneva.cluster import GenevaCluster
    from geneva.manifest import GenevaManifest
    cluster = Cluster({url!r}, Path({directory!r}), workers=2, cores=1, gpus=1)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    folder = Path({modules!r})
    (folder / "context_package").mkdir(parents=True)
    (folder / "context_package" / "__init__.py").write_text("from context_package.one import g")
    (folder / "context_package" / "one.py").write_text("def g(x):\\n    return x + 1\\n")
    (folder / "context_module.py").write_text("WORD = 'shipped'")

    def f(id: int) -> str:
        import os
        import context_module
        import context_package
        number = context_package.g(id)
        return f"{{number}} {{context_module.WORD}} {{os.environ['OF_THE_MANIFEST']}}"

    db = geneva.connect({uri!r})
    made = GenevaCluster.create_spark("real").master(cluster.url).conf(cluster._settings()).build()
    db.define_cluster("real", made)
    manifest = GenevaManifest.create_pip("helpers").pip(["pyarrow"])
    manifest = manifest.py_modules([str(folder / "context_package")])
    manifest = manifest.add_py_module(str(folder / "context_module.py"))
    db.define_manifest("helpers", manifest.env_vars({{"OF_THE_MANIFEST": "yes"}}).build())
    table = db.open_table("t")
    table.add_columns({{"y": geneva.udf(f), "z": geneva.udf(f)}})
    with db.context(cluster="real", manifest="helpers"):
        # Both want the session at once, and so does this thread.
        futures = [table.backfill_async(name) for name in ("y", "z")]
        master = db._session().sparkContext.master
    jobs = [db.get_job(future.job_id) for future in futures]
    facts = [[job.status, job.cluster_name, job.manifest_id, job.error] for job in jobs]
    print(json.dumps([master, *facts]))
    """


def test_a_context_with_a_manifest(cluster: Cluster, db: Connection, tmp_path: Path) -> None:
    table = make_table(db, [20, 20])
    script = CONTEXT_SCRIPT.format(
        tests=str(Path(__file__).parents[1]),
        url=cluster.url,
        directory=str(cluster.directory),
        modules=str(tmp_path / "modules"),
        uri=db.uri,
    )
    folder = tmp_path / "driver"
    with nothing_left_in(folder):
        process = start_script(folder, script)
        output, errors = process.communicate(timeout=180)
        assert process.returncode == 0, errors
        wait_for(lambda: not processes_in(folder), "the driver's JVM to leave", 10)
    facts = ["DONE", "real", "helpers", None]
    assert json.loads(output.splitlines()[-1]) == [cluster.url, facts, facts]
    table.checkout_latest()
    expected = [f"{i + 1} shipped yes" for i in range(40)]
    assert (column(table, "y"), column(table, "z")) == (expected, expected)
