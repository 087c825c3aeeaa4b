"""A driver on pyspark-client, without Spark's jars: the distribution of packaging/client, as it is.

It is installed into a throw-away environment, and talks to a Connect server of the installed
pyspark. Skipped where pyspark-client can't be had.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from cluster import connect_server
from geneva import Connection, udf
from geneva.execution.runner import InProcessRunner
from support import Calls, column, connect, make_table

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.spark,
    pytest.mark.timeout(900),
]


@pytest.fixture
def db(tmp_path: Path) -> Connection:
    """The table as this process sees it; it never computes anything here."""
    return connect(tmp_path / "db", InProcessRunner)


@pytest.fixture(scope="module")
def client_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has geneva-spark-client, and nothing else of ours."""
    folder = tmp_path_factory.mktemp("client")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    wanted = ["download", "-q", "--no-deps", "-d", str(folder), "pyspark-client>=4.2.0,<5"]
    if subprocess.run([*pip, *wanted], capture_output=True, timeout=300).returncode:
        pytest.skip("pyspark-client can't be had here")
    install = [*pip, "install", "-q", str(ROOT / "packaging" / "client")]
    made = subprocess.run(install, capture_output=True, text=True, timeout=600)
    assert made.returncode == 0, made.stderr
    return python


def run(python: Path, folder: Path, code: str, *arguments: str) -> str:
    """Run a script in an environment, with the geneva that is installed there."""
    folder.mkdir()
    (folder / "driver.py").write_text(code)  # with -c, pyspark takes itself to be in a doctest
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    made = subprocess.run(
        [python, "driver.py", *arguments],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert made.returncode == 0, made.stderr
    return made.stdout.splitlines()[-1]


REMOTE = """
import json, sys
from pathlib import Path
import pyspark
from pyspark.sql import SparkSession
import geneva
assert not Path(pyspark.__file__).parent.joinpath("jars").exists()
uri, remote = sys.argv[1:]
spark = SparkSession.builder.remote(remote).getOrCreate()
db = geneva.connect(uri, spark=spark)
table = db.open_table("t")
result = table.backfill("y")
read = table.to_spark(columns=["id", "y"], where="y >= 100").collect()
views = db.register_views(spark)
(total,) = spark.sql("SELECT sum(y) FROM t").collect()[0]
geneva.register(spark)
for _ in range(2):
    writer = spark.range(200, 203).write.format("geneva").mode("append")
    writer.option("app_id", "client").option("batch_id", 0).save(table.ref.uri)
table.checkout_latest()
again = table.backfill("y")
facts = [result.status, len(read), views, total, again.rows_computed]
print(json.dumps([*facts, db.get_job(result.job_id).spark["session"] is not None]))
spark.stop()
"""


def test_a_driver_reads_computes_and_writes(
    db: Connection, calls: Calls, tmp_path: Path, client_python: Path
) -> None:
    table = make_table(db, [100, 100])

    @udf(data_type=pa.int64(), input_columns=["id"])
    def square(id: int) -> int:
        calls.note([id])
        return id * id

    table.add_columns({"y": square})
    with connect_server("local[2]", tmp_path) as remote:
        said = run(client_python, tmp_path / "driver", REMOTE, db.uri, remote)
    total = sum(i * i for i in range(200))
    assert json.loads(said) == ["DONE", 190, ["t"], total, 3, True]
    assert column(table, "y") == [i * i for i in range(203)]
    assert calls.rows == list(range(203))


ALONE = """
import sys
import geneva
table = geneva.connect(sys.argv[1]).open_table("t")
try:
    table.backfill("y")
except geneva.errors.GenevaError as error:
    print(type(error).__name__, str(error).replace("\\n", " "))
"""


def test_without_a_server_there_is_no_spark(
    db: Connection, tmp_path: Path, client_python: Path
) -> None:
    @udf(data_type=pa.int64(), input_columns=["id"])
    def same(id: int) -> int:
        return id

    make_table(db, [10]).add_columns({"y": same})
    said = run(client_python, tmp_path / "driver", ALONE, db.uri)
    assert said.startswith("SparkUnavailableError")
    assert "geneva.connect(..., spark=" in said
