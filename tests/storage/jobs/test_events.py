"""Job history: an append-only list of events, and the records they fold into."""

from __future__ import annotations

import itertools
import shutil
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import lance
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geneva.errors import JobNotFoundError
from geneva.model.jobs import JobStatus
from geneva.model.tables import Secrets
from geneva.storage.jobs import append_only
from geneva.storage.jobs.events import JobEvent, read_events
from geneva.storage.jobs.history import JobHistory
from geneva.storage.jobs.records import fold_events

START = datetime(2026, 1, 1, tzinfo=UTC)


def created(job_id: str, at: datetime = START, table: str = "t", column: str = "c") -> JobEvent:
    payload = {"table": table, "column": column, "type": "BACKFILL", "config": {"where": None}}
    return JobEvent(job_id, "created", payload, at)


def changed(job_id: str, status: JobStatus, at: datetime, **more: object) -> JobEvent:
    return JobEvent(job_id, "status", {"status": status.value, **more}, at)


@pytest.fixture
def history(tmp_path: Path) -> JobHistory:
    return JobHistory(str(tmp_path / "db"), Secrets())


def test_a_database_without_jobs(history: JobHistory, tmp_path: Path) -> None:
    assert history.list() == []
    with pytest.raises(JobNotFoundError, match="no job 'nope'"):
        history.job("nope")
    assert not (tmp_path / "db").exists(), "reading writes nothing"


def test_a_job_from_pending_to_done(history: JobHistory) -> None:
    history.append([created("j")])
    assert history.job("j").status is JobStatus.PENDING
    history.append([changed("j", JobStatus.RUNNING, START + timedelta(seconds=1))])
    assert history.job("j").status is JobStatus.RUNNING
    progress = {"metrics": {"committed": 3}}
    history.append([JobEvent("j", "committed", progress, START + timedelta(seconds=2))])
    end = changed("j", JobStatus.DONE, START + timedelta(seconds=3), metrics={"tasks": 4})
    history.append([end])
    record = history.job("j")
    assert record.status is JobStatus.DONE
    assert record.metrics == {"committed": 3, "tasks": 4}
    assert (record.table_name, record.column_name, record.job_type) == ("t", "c", "BACKFILL")
    assert record.updated_at - record.created_at == timedelta(seconds=3)
    assert [e.kind for e in record.events] == ["created", "status", "committed", "status"]


def test_a_failure_keeps_its_error(history: JobHistory) -> None:
    later = START + timedelta(seconds=1)
    history.append([created("j"), changed("j", JobStatus.FAILED, later, error="ValueError: no")])
    assert history.job("j").error == "ValueError: no"


def test_newest_first_and_filters(history: JobHistory) -> None:
    for i, (table, status) in enumerate(
        [("a", JobStatus.DONE), ("b", JobStatus.FAILED), ("a", JobStatus.FAILED)]
    ):
        at = START + timedelta(seconds=i)
        history.append([created(f"j{i}", at, table), changed(f"j{i}", status, at)])
    assert [r.job_id for r in history.list()] == ["j2", "j1", "j0"]
    assert [r.job_id for r in history.list("a")] == ["j2", "j0"]
    assert [r.job_id for r in history.list(status="failed")] == ["j2", "j1"]
    assert [r.job_id for r in history.list("a", JobStatus.DONE)] == ["j0"]
    with pytest.raises(ValueError, match="'nonsense' is no status"):
        history.list(status="nonsense")


@pytest.mark.parametrize("job_id", ["it's", 'say "x"', "a b/c", "😀", "%_", "' OR 1=1 --", ""])
def test_any_id(history: JobHistory, job_id: str) -> None:
    history.append([created("other"), created(job_id)])
    assert history.job(job_id).job_id == job_id
    assert len(history.job(job_id).events) == 1


def test_a_record_goes_by_the_order_of_writing_not_by_clocks() -> None:
    late, early = START + timedelta(hours=1), START
    events = [
        created("j"),
        changed("j", JobStatus.RUNNING, late),
        changed("j", JobStatus.DONE, early),
    ]
    (record,) = fold_events(events)
    assert record.status is JobStatus.DONE
    assert record.events == tuple(events)


@given(st.randoms(use_true_random=False), st.booleans())
def test_a_record_does_not_depend_on_the_order_of_rows(random: Random, numbered: bool) -> None:
    """Compaction moves rows about, and clocks go back."""
    count = random.randrange(6)
    ends = random.choice([JobStatus.DONE, JobStatus.FAILED, JobStatus.CANCELLED, None])
    events = [created("j"), changed("j", JobStatus.RUNNING, START)]
    for i in range(count):
        progress = {"metrics": {"committed": i}}
        events.append(JobEvent("j", "committed", progress, START + timedelta(seconds=i)))
    if ends is not None:
        events.append(changed("j", ends, START + timedelta(seconds=count)))
    if numbered:
        events = [
            replace(e, seq=i, at=START + timedelta(seconds=random.randrange(-9, 9)))
            for i, e in enumerate(events)
        ]
    shuffled = random.sample(events, len(events))
    (record,) = fold_events(shuffled)
    assert record.events == tuple(events)
    assert record.status is (ends or JobStatus.RUNNING)
    assert record.metrics == ({"committed": count - 1} if count else {})


@given(st.permutations(range(5)))
def test_the_word_of_a_job_counts_for_more_than_that_of_an_observer(order: list[int]) -> None:
    own = [
        created("j"),
        changed("j", JobStatus.RUNNING, START),
        JobEvent("j", "committed", {}, START),
        changed("j", JobStatus.DONE, START),
    ]
    own = [replace(e, seq=i) for i, e in enumerate(own)]
    lost = replace(changed("j", JobStatus.FAILED, START, error="lost: x"), seq=1, by_observer=True)
    every = [*own, lost]
    (record,) = fold_events([every[i] for i in order])
    assert (record.status, record.error) == (JobStatus.DONE, None)
    assert [e.by_observer for e in record.events] == [False, False, True, False, False]
    (record,) = fold_events([e for e in (every[i] for i in order) if e not in own[2:]])
    assert (record.status, record.error) == (JobStatus.FAILED, "lost: x")
    (record,) = fold_events([e for e in (every[i] for i in order) if e is not own[3]])
    assert record.status is JobStatus.RUNNING, "a sign of life takes it back"


def test_verdicts_of_older_releases() -> None:
    later = START + timedelta(seconds=9)
    lost = read_events(
        pa.table(
            {
                "job_id": ["j"],
                "at": [later],
                "kind": ["status"],
                "payload": ['{"status": "FAILED", "error": "lost: the process ..."}'],
            }
        )
    )
    own = [created("j"), changed("j", JobStatus.RUNNING, START)]
    assert fold_events([*lost, *own])[0].status is JobStatus.FAILED
    assert fold_events([*lost, changed("j", JobStatus.DONE, START), *own])[0].status == "DONE"


def test_a_job_that_ended_just_before_its_process_did(tmp_path: Path) -> None:
    """Who has read its events, and then sees that the process is gone, reads them again."""
    plain = JobHistory(str(tmp_path), Secrets())
    plain.append([created("j"), changed("j", JobStatus.RUNNING, START)])

    def ends(job: object) -> bool:
        plain.append([changed("j", JobStatus.DONE, START)])
        return True

    watching = JobHistory(str(tmp_path), Secrets(), ends)
    assert watching.get("j").status is JobStatus.DONE
    plain.append([created("k"), changed("k", JobStatus.RUNNING, START)])
    assert watching.close_lost("j") is False
    assert plain.get("j").error is None


def test_a_long_history_of_many_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compactions in between, and every job says what it said last, in its order."""
    monkeypatch.setattr(append_only, "_COMPACT_AT_FRAGMENTS", 6)

    def write(writer: int) -> None:
        history = JobHistory(str(tmp_path), Secrets())
        for job in range(4):
            name, number = f"{writer}-{job}", itertools.count()
            for events in (
                [created(name), changed(name, JobStatus.RUNNING, START)],
                [JobEvent(name, "committed", {"metrics": {"committed": 1}}, START)],
                [JobEvent(name, "committed", {"metrics": {"committed": 2}}, START)],
                [changed(name, JobStatus.DONE, START)],
            ):
                history.append([replace(e, seq=next(number)) for e in events])

    writers = [threading.Thread(target=write, args=(n,)) for n in range(5)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    records = JobHistory(str(tmp_path), Secrets(), lambda job: True).list()
    assert {(r.status, r.metrics["committed"]) for r in records} == {(JobStatus.DONE, 2)}
    kinds = ("created", "status", "committed", "committed", "status")
    assert [tuple(e.kind for e in r.events) for r in records] == [kinds] * 20


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("created", "{"),
        ("created", "null"),
        ("created", '{"table": null, "config": 3, "driver": []}'),
        ("created", None),
        ("status", '{"status": "UPSIDE_DOWN"}'),
        ("status", '{"status": []}'),
        ("status", '{"status": "RUNNING", "metrics": {"committed": "many", "total": NaN}}'),
        ("status", '{"status": "FAILED", "error": {"a": 1}}'),
        ("committed", '{"metrics": 7}'),
        ("what", "{}"),
        (None, "{}"),
    ],
)
def test_a_bad_record_hides_no_other(
    history: JobHistory, tmp_path: Path, kind: str | None, payload: str | None
) -> None:
    history.append([created("good"), changed("good", JobStatus.DONE, START)])
    row = {"job_id": "bad", "at": None, "kind": kind, "payload": payload}
    uri = str(tmp_path / "db" / "_geneva" / "jobs.lance")
    schema = lance.dataset(uri).schema
    lance.write_dataset(pa.Table.from_pylist([row], schema=schema), uri, mode="append")
    records = {record.job_id: record for record in history.list()}
    assert records["good"].status is JobStatus.DONE
    bad = records["bad"]
    assert all(isinstance(v, str) for v in (bad.table_name, bad.column_name, bad.job_type))
    assert bad.metrics == {}
    assert history.job("bad") == bad


def test_events_of_one_instant_keep_the_order_they_were_written_in(history: JobHistory) -> None:
    history.append([created("j"), changed("j", JobStatus.RUNNING, START)])
    history.append([changed("j", JobStatus.DONE, START)])
    assert history.job("j").status is JobStatus.DONE


def test_writers_at_the_same_moment_lose_nothing(history: JobHistory) -> None:
    writers = [
        threading.Thread(
            target=lambda n=n: [history.append([created(f"{n}-{i}")]) for i in range(5)]
        )
        for n in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(history.list()) == 20


def test_it_stays_small(
    history: JobHistory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(append_only, "_COMPACT_AT_FRAGMENTS", 5)
    for i in range(17):
        history.append([created(f"j{i}", START + timedelta(seconds=i))])
    assert [r.job_id for r in history.list()] == [f"j{i}" for i in reversed(range(17))]
    assert len(lance.dataset(str(tmp_path / "db" / "_geneva" / "jobs.lance")).get_fragments()) < 6


def test_storage_options_do_not_show() -> None:
    history = JobHistory("s3://bucket/db", Secrets({"aws_secret_access_key": "hush"}))
    assert "hush" not in repr(vars(history))


class TestLostJobs:
    """A job whose driver died is read as FAILED; only a writer puts that on record."""

    @pytest.fixture
    def lost(self, tmp_path: Path) -> JobHistory:
        history = JobHistory(str(tmp_path / "db"), Secrets(), lambda job: True)
        later = START + timedelta(seconds=1)
        history.append([created("j"), changed("j", JobStatus.RUNNING, later)])
        return history

    @staticmethod
    def written(tmp_path: Path) -> int:
        return lance.dataset(str(tmp_path / "db" / "_geneva" / "jobs.lance")).version

    def test_reading_writes_nothing(self, lost: JobHistory, tmp_path: Path) -> None:
        before = self.written(tmp_path)
        for record in (lost.get("j"), *lost.list(), *lost.list(status="failed")):
            assert record.status is JobStatus.FAILED
            assert "lost" in (record.error or "")
            assert record.updated_at == START + timedelta(seconds=1)
        assert lost.list(status="running") == []
        assert self.written(tmp_path) == before

    def test_it_waits_for_no_other_one(self, lost: JobHistory) -> None:
        later = START + timedelta(seconds=2)
        lost.append([JobEvent("j", "waiting", {"for": "d71537d7-1"}, at=later)])
        for record in (lost.job("j"), *lost.list()):
            assert (record.state, record.waiting_for) == ("FAILED", None)

    def test_a_writer_puts_it_on_record_once(self, lost: JobHistory, tmp_path: Path) -> None:
        assert not lost.close_lost("j")
        after = self.written(tmp_path)
        record = JobHistory(str(tmp_path / "db"), Secrets()).get("j")
        assert record.status is JobStatus.FAILED
        assert "lost" in (record.error or "")
        assert not lost.close_lost("j")
        assert self.written(tmp_path) == after

    def test_jobs_that_live_or_are_unknown(self, history: JobHistory, tmp_path: Path) -> None:
        history.append([created("j")])
        before = self.written(tmp_path)
        assert history.close_lost("j")
        assert not history.close_lost("nope")
        assert self.written(tmp_path) == before


@pytest.mark.parametrize("seed", range(4))
def test_a_job_sees_those_of_its_work_that_were_announced_before_it(
    tmp_path: Path, seed: int
) -> None:
    """Whoever wrote them, and whatever became of the files since; an oracle keeps the order."""
    rng, numbers = Random(seed), itertools.count()
    uri = str(tmp_path / "db")
    here = [JobHistory(uri, Secrets()) for _ in range(3)]
    begun: list[tuple[str, str]] = []
    ended: set[str] = set()
    for _ in range(40):
        history = rng.choice(here)
        step = rng.choice(["announce", "announce", "end", "compact", "note", "drop"])
        running = [job_id for job_id, _ in begun if job_id not in ended]
        if step == "announce":
            job_id, work = f"job-{next(numbers)}", rng.choice(["a", "b", 'with "quotes" and %'])
            event = created(job_id)
            found = history.announce(
                [replace(event, payload={**event.payload, "work": work})], work
            )
            same = [other for other, theirs in begun if theirs == work]
            assert found.unfinished == tuple(other for other in same if other not in ended)
            assert found.finished == ended.intersection(same)
            begun.append((job_id, work))
        elif step == "end" and running:
            job_id = rng.choice(running)
            final = rng.choice([status for status in JobStatus if status.is_final])
            history.append([changed(job_id, final, START)])
            ended.add(job_id)
        elif step == "note" and running:
            history.append([JobEvent(rng.choice(running), "committed", {"metrics": {"n": 1}})])
        elif step == "compact" and begun:
            lance.dataset(f"{uri}/_geneva/jobs.lance").optimize.compact_files()
        elif step == "drop" and begun and rng.random() < 0.3:
            shutil.rmtree(f"{uri}/_geneva/jobs.lance")
            begun.clear()
            ended.clear()
            here = [JobHistory(uri, Secrets()), *rng.sample(here, 2)]
            # The first one is new; others remember files of a history that is gone.
            here[1:] = [replace_last(one) for one in here[1:]]


def replace_last(history: JobHistory) -> JobHistory:
    """The history as another job of the same connection sees it: no handle is kept for that."""
    history._last = "", None
    return history


def test_of_the_history_only_what_is_new_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    scanner = lance.LanceDataset.scanner

    def counting(self: lance.LanceDataset, *args: Any, **options: Any) -> Any:
        reads.append(len(options["fragments"]))
        return scanner(self, *args, **options)

    ours, theirs = (JobHistory(str(tmp_path / "db"), Secrets()) for _ in range(2))
    monkeypatch.setattr(lance.LanceDataset, "scanner", counting)
    for number in range(3):
        ours.announce([created(f"ours-{number}")], "work")
        ours.append([changed(f"ours-{number}", JobStatus.DONE, START)])
    assert reads == [], "what was written here is known"
    theirs.announce([created("theirs")], "work")
    assert reads == [6]
    ours.announce([created("ours-3")], "work")
    assert reads == [6, 1]
