"""Copies of slow tasks (spark.speculation): the first one to end counts, the other is killed."""

from __future__ import annotations

import json
from collections import Counter
from datetime import timedelta
from pathlib import Path

import lance
import pytest

from cluster import LONG_ON_A_CLUSTER, running_cluster
from geneva import Connection, Table
from geneva.execution.runner import InProcessRunner
from processes import nothing_left_in, start_script
from support import by_id, connect, make_table

pytestmark = LONG_ON_A_CLUSTER

SCRIPT = """
    import json, os, sys, time
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    import pyarrow as pa
    import geneva
    from cluster import Cluster
    folder = {folder!r}

    def is_first(name):
        try:
            os.close(os.open(os.path.join(folder, name), os.O_CREAT | os.O_EXCL))
            return True
        except FileExistsError:
            return False

    def squared(what, id):
        is_first(f"{{what}}-{{id}}-{{time.time_ns()}}")
        if id == 5 and is_first(f"{{what}}-slow"):
            time.sleep(3600)  # the task hangs; its copy doesn't
        if id == 25 and is_first(f"{{what}}-original"):
            while is_first(f"{{what}}-copy"):
                os.unlink(os.path.join(folder, f"{{what}}-copy"))
                time.sleep(0.1)
        elif id == 25:
            is_first(f"{{what}}-copy")
            time.sleep(3600)  # the copy hangs; the task goes on as soon as it is there
        return id * id

    @geneva.udf(data_type=pa.int64())
    def y(id: int) -> int:
        return squared("column", id)

    @geneva.udf(data_type=pa.int64())
    def z(id: int) -> int:
        return squared("view", id)

    def rows(batches):
        for batch in batches:
            for id in batch.column("id").to_pylist():
                yield pa.RecordBatch.from_pydict({{"id": [id], "y": [squared("write", id)]}})

    cluster = Cluster({url!r}, Path({directory!r}), workers=2, cores=2, gpus=0)
    settings = {{
        "spark.speculation": "true",
        "spark.speculation.interval": "200ms",
        "spark.speculation.quantile": "0.25",
        "spark.speculation.task.duration.threshold": "3s",
    }}
    with cluster.session(**settings) as spark:
        db = geneva.connect({uri!r}, spark=spark)
        table = db.open_table("t")
        table.add_columns({{"y": y}})
        done = [table.backfill("y", task_size=20, checkpoint_size=5)]
        view = db.create_materialized_view("v", table.query().select({{"id": "id", "z": z}}))
        done.append(view.refresh())
        geneva.register(spark)
        made = spark.range(0, 40, 1, 4).mapInArrow(rows, "id long, y long")
        made.write.format("geneva").mode("append").save({uri!r} + "/written.lance")
        again = [table.backfill("y").rows_computed, view.refresh().rows_computed]
        print(json.dumps([*(job.status for job in done), *again]))
    """


@pytest.fixture
def db(tmp_path: Path) -> Connection:
    """The table as this process sees it; it never computes anything here."""
    return connect(tmp_path / "db", InProcessRunner)


def test_everything_lands_once_and_killed_copies_do_no_harm(db: Connection, tmp_path: Path) -> None:
    make_table(db, [20, 20], stable_row_ids=True)
    calls = tmp_path / "calls"
    calls.mkdir()
    with running_cluster(workers=2, cores=2) as cluster, nothing_left_in(tmp_path / "driver"):
        script = SCRIPT.format(
            tests=str(Path(__file__).parents[1]),
            folder=str(calls),
            url=cluster.url,
            directory=str(cluster.directory),
            uri=db.uri,
        )
        process = start_script(tmp_path / "driver", script)
        output, errors = process.communicate(timeout=400)
        assert process.returncode == 0, errors
    assert json.loads(output.splitlines()[-1]) == ["DONE", "DONE", 0, 0]
    for what, name, column in (("column", "t", "y"), ("view", "v", "z"), ("write", "written", "y")):
        table = db.open_table(name)
        assert by_id(table, column) == {i: i * i for i in range(40)}
        assert table.count_rows() == 40
        ran = Counter(path.name.split("-")[1] for path in calls.glob(f"{what}-*-*"))
        assert ran.keys() == {str(i) for i in range(40)}
        assert max(ran.values()) == 2  # the task and its copy
        assert (ran["5"], ran["25"]) == (2, 2)
        assert_nothing_is_left(table)
    assert {job.status for job in db.list_jobs()} == {"DONE"}


def assert_nothing_is_left(table: Table) -> None:
    """What killed attempts have left goes with the next clean-up."""
    folder = Path(table.ref.uri)
    table.cleanup_checkpoints(timedelta(0))
    table.cleanup_old_versions(timedelta(0), delete_unverified=True)
    dataset = lance.dataset(table.ref.uri)
    known = {file.path for f in dataset.get_fragments() for file in f.data_files()}
    assert {path.name for path in (folder / "data").iterdir()} == known
    assert not list((folder / "_checkpoints").glob("attempt-*"))
