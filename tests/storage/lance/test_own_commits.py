"""What jobs of this process have committed is known as long as they run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from geneva.model.tables import TableRef
from geneva.storage.lance.own_commits import (
    are_own_commits,
    forget_own_commits,
    is_own_commit,
    note_own_commit,
)

TABLE, OTHER = TableRef("t", "/db/t.lance"), TableRef("u", "/db/u.lance")


def test_commits_are_those_of_a_job_and_a_table() -> None:
    note_own_commit(TABLE.uri, 3, "a")
    note_own_commit(TABLE.uri, 5, "a")
    assert are_own_commits(TABLE, (3, 5), "a")
    assert not are_own_commits(TABLE, (3, 4, 5), "a")
    assert not is_own_commit(TABLE, 3, "b")
    assert not is_own_commit(OTHER, 3, "a")
    forget_own_commits("a")
    assert not is_own_commit(TABLE, 3, "a")


def test_jobs_of_many_threads_commit_at_once() -> None:
    def commit(job: int) -> None:
        for version in range(2_000):
            note_own_commit(TABLE.uri, version, f"job {job}")
        assert are_own_commits(TABLE, range(2_000), f"job {job}")
        forget_own_commits(f"job {job}")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(commit, range(16)))
