"""What jobs that died leave behind is removed by the next one; what living ones have is not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from geneva import Connection
from geneva.execution.jobs.heartbeat import driver_identity
from geneva.storage.checkpoints.dead_jobs import _open_files
from geneva.storage.checkpoints.pins import job_tags
from geneva.storage.checkpoints.staging import open_checkpoints
from geneva.storage.jobs.events import JobEvent
from geneva.storage.lance.dataset import open_dataset
from geneva.table import Table
from support import Calls, column, make_table, tripled

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def table(local_db: Connection, calls: Calls) -> Table:
    table = make_table(local_db, [4, 4])
    table.add_columns({"x": tripled(calls)})
    return table


def gone_process() -> dict[str, object]:
    """The identity of a driver on this machine that has ended."""
    ended = subprocess.Popen(["/bin/true"])
    ended.wait()
    return {**driver_identity(), "pid": ended.pid, "started": "1"}


class Left:
    """What a job has left, at the moment of a kill."""

    def __init__(
        self, db: Connection, table: Table, driver: dict[str, object], job: str = "dead"
    ) -> None:
        self.db, self.table, self.job = db, table, job
        created = {"table": table.ref.name, "column": "x", "type": "BACKFILL", "driver": driver}
        status = {"status": "RUNNING"}
        db._history.append([JobEvent(job, "created", created), JobEvent(job, "status", status)])
        db._signals.beat(job, {})
        dataset = open_dataset(table.ref)
        dataset.tags.create(f"geneva-job-{job}.12345678", dataset.version)
        data = Path(table.ref.uri) / "data"
        self.draft = data / ".tmpA1b2C3"
        self.draft.write_bytes(b"half of a file")
        self.staged = data / f"geneva-full-{'0' * 8}-{'1' * 12}-{'2' * 12}-{'3' * 12}.lance"
        self.staged.write_bytes(b"a file that was staged and not recorded")
        self.note = f"attempt-{job}-0-0"
        open_checkpoints(table.ref)[self.note] = pa.record_batch({"a": [1]})

    def is_there(self) -> dict[str, bool]:
        return {
            "heartbeat": self.job in self.db._signals.jobs(),
            "tag": any(self.job in tag for tag in job_tags(open_dataset(self.table.ref))),
            "draft": self.draft.exists(),
            "staged": self.staged.exists(),
            "note": self.note in open_checkpoints(self.table.ref),
        }


@linux
def test_the_next_job_removes_it(local_db: Connection, table: Table, calls: Calls) -> None:
    left = Left(local_db, table, gone_process())
    assert all(left.is_there().values())
    table.backfill("x")
    assert not any(left.is_there().values()), left.is_there()
    assert column(table, "x") == [3 * i for i in range(8)]
    assert calls.count == 8
    assert local_db.get_job("dead").status == "FAILED"


@linux
@pytest.mark.parametrize("how", ["optimize", "cleanup_checkpoints"])
def test_cleaning_up_removes_it(local_db: Connection, table: Table, how: str) -> None:
    table.backfill("x")
    left = Left(local_db, table, gone_process())
    getattr(table, how)()
    assert not any(left.is_there().values()), left.is_there()
    assert column(table, "x") == [3 * i for i in range(8)]


@linux
@pytest.mark.parametrize("how", ["optimize", "cleanup_checkpoints"])
def test_a_job_that_died_before_its_first_heartbeat(
    local_db: Connection, table: Table, how: str
) -> None:
    """Its tag is all that tells of it, and whoever looks at the tags releases it."""
    table.backfill("x")
    left = Left(local_db, table, gone_process())
    local_db._signals.clear("dead")
    table.cleanup_old_versions()  # releases the tag
    assert not left.is_there()["tag"]
    getattr(table, how)()
    assert not any(left.is_there().values()), left.is_there()


def test_what_a_living_job_has_stays(local_db: Connection, table: Table) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        started = Path(f"/proc/{other.pid}/stat")
        identity = {**driver_identity(), "pid": other.pid}
        if started.exists():
            identity["started"] = started.read_text().rpartition(")")[2].split()[19]
        left = Left(local_db, table, identity, "living")
        dead = Left(local_db, table, gone_process(), "dead-too")
        table.backfill("x")
        table.optimize()
        table.cleanup_checkpoints()
        assert all(left.is_there().values()), left.is_there()
        assert dead.is_there()["staged"], "one of the two may be the living one's"
    finally:
        other.kill()
        other.wait()
    if sys.platform == "linux":
        table.backfill("x", where="id >= 0")
        assert not any({**left.is_there(), **dead.is_there()}.values())


def test_nobody_knows_of_a_job_on_another_machine(local_db: Connection, table: Table) -> None:
    elsewhere = {**gone_process(), "host": "another", "world": "another"}
    left = Left(local_db, table, elsewhere)
    table.backfill("x")
    assert all(left.is_there().values()), left.is_there()


@linux
def test_a_file_that_is_being_written_stays(local_db: Connection, table: Table) -> None:
    """Plain LanceDB writes to the table as well: its drafts look the same."""
    left = Left(local_db, table, gone_process())
    with left.draft.open("ab"):
        table.backfill("x")
        assert left.draft.exists()
        assert not left.staged.exists()


@linux
def test_drafts_of_unknown_origin_go_after_a_day(local_db: Connection, table: Table) -> None:
    left = Left(local_db, table, {**gone_process(), "host": "another", "world": "another"})
    local_db._history.append(
        [JobEvent("dead", "status", {"status": "FAILED", "error": "elsewhere"})]
    )
    young = left.draft.with_name(".tmpYoung")
    young.touch()
    os.utime(left.draft, (time.time() - 90_000,) * 2)
    table.backfill("x")
    assert not left.draft.exists()
    assert young.exists()


@linux
def test_a_draft_of_a_worker_that_died_is_removed(local_db: Connection, table: Table) -> None:
    """Its job went on with another worker, and ended well: no dead job tells of it."""
    table.backfill("x")
    draft = Path(table.ref.uri) / "data" / ".tmpA1b2C3"
    draft.write_bytes(b"half of a file")
    with draft.open("ab"):
        assert table.cleanup_checkpoints(timedelta(0)).staged_files == 0
    table.cleanup_checkpoints()
    assert draft.exists(), "it may be one of a writer on another machine"
    os.utime(draft, (time.time() - 4_000,) * 2)
    table.optimize()
    assert draft.exists()
    assert table.cleanup_checkpoints().staged_files == 1
    assert not draft.exists()
    draft.touch()
    os.utime(draft, (time.time() - 90_000,) * 2)
    table.optimize()
    assert not draft.exists()


@linux
@pytest.mark.slow
def test_processes_that_end_while_they_are_looked_at_tell_nothing(tmp_path: Path) -> None:
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            subprocess.run(["/bin/true"], check=True)

    draft = tmp_path / ".tmpA1b2C3"
    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        with draft.open("wb"):
            found = {_open_files([draft]) for _ in range(60)}
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert found == {frozenset({draft})}
