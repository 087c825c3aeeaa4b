"""The search for rows that kill their worker, without processes."""

from __future__ import annotations

import numpy as np
import pytest

from geneva.errors import UDFTimeoutError, WorkerDied
from geneva.execution.worker.poison_rows import (
    BatchGuard,
    PoisonSearch,
    Suspect,
    note_key,
    read_suspects,
)
from geneva.execution.worker.task import PartWork
from geneva.model.rows import Offsets, RowRange, RowSet
from geneva.storage.checkpoints.store import InMemoryCheckpointStore

KEY = "attempt-job-56a89d6c-3-0"


@pytest.fixture
def store() -> InMemoryCheckpointStore:
    return InMemoryCheckpointStore()


def offsets(*rows: int) -> Offsets:
    return np.array(rows, dtype=np.int64)


def retry(store: InMemoryCheckpointStore) -> PoisonSearch:
    return PoisonSearch(store, KEY, is_retry=True)


def _search(size: int, bad: set[int]) -> tuple[set[int], int]:
    """Play worker attempts until all rows are computed or condemned."""
    store = InMemoryCheckpointStore()
    done: set[int] = set()
    condemned: set[int] = set()
    for attempt in range(10_000):
        search = PoisonSearch(store, KEY, is_retry=attempt > 0)
        unsaved: set[int] = set()
        left = np.array([i for i in range(size) if i not in done], dtype=np.int64)
        died = False
        while len(left):
            chunk = left[: search.max_rows(left, 256)]
            left = left[len(chunk) :]
            if search.condemned(chunk) is not None:
                condemned |= set(chunk.tolist())
            else:
                search.starting(chunk)
                if bad & set(chunk.tolist()):
                    died = True
                    break
            unsaved |= set(chunk.tolist())
            if search.is_suspect(chunk):
                done |= unsaved
        if not died:
            return condemned, attempt
    raise AssertionError("never ends")


@pytest.mark.parametrize(
    ("size", "bad"),
    [(1, {0}), (256, {0}), (256, {255}), (1000, {137}), (1000, {10, 11, 900}), (300, set())],
)
def test_the_search_finds_exactly_the_rows_at_fault(size: int, bad: set[int]) -> None:
    condemned, deaths = _search(size, bad)
    assert condemned == bad
    assert deaths <= 6 * len(bad)


def test_one_death_is_no_proof() -> None:
    assert Suspect(5, 6, 1, tries=1).error() is None
    assert isinstance(Suspect(5, 6, 1, tries=2).error(), WorkerDied)
    assert Suspect(5, 9, 4, tries=9).error() is None
    assert isinstance(Suspect(5, 6, 1, tries=1, hung=True).error(), TimeoutError)


def test_a_first_attempt_leaves_no_note(store: InMemoryCheckpointStore) -> None:
    search = PoisonSearch(store, KEY, is_retry=False)
    search.starting(offsets(0, 1, 2))
    assert search.max_rows(offsets(0, 1, 2), 3) == 3
    assert not search.is_suspect(offsets(0))
    assert store.list_keys() == []


def test_rows_before_and_behind_the_suspects_run_as_usual(store: InMemoryCheckpointStore) -> None:
    retry(store).starting(np.arange(100, 164))
    search = retry(store)
    assert search.max_rows(np.arange(50, 200), 80) == 50, "up to the first suspect"
    assert search.max_rows(np.arange(50, 200), 10) == 10
    assert search.max_rows(np.arange(100, 200), 80) == 4, "a sixteenth of 64"
    assert search.max_rows(np.arange(164, 200), 30) == 30
    suspects = [search.is_suspect(offsets(row)) for row in (99, 100, 163, 164)]
    assert suspects == [False, True, True, False]


def test_a_row_is_condemned_by_its_second_death(store: InMemoryCheckpointStore) -> None:
    for tries in (1, 2):
        search = retry(store)
        assert search.condemned(offsets(7)) is None
        search.starting(offsets(7))
        assert read_suspects(store, "job", [part(3)]) == (Suspect(7, 8, 1, tries),)
    condemned = retry(store).condemned(offsets(7))
    assert condemned is not None
    assert condemned.tries == 2
    assert "died 2 times" in str(condemned.error)
    assert retry(store).condemned(offsets(8)) is None
    assert retry(store).condemned(offsets(7, 8)) is None


def test_a_hung_row_is_condemned_at_once(store: InMemoryCheckpointStore) -> None:
    # The watchdog's note is kept on a first attempt, too: the process ends with it.
    search = PoisonSearch(store, KEY, is_retry=False)
    BatchGuard(search, offsets(4, 7, 9)).hung(1)
    condemned = retry(store).condemned(offsets(7))
    assert condemned is not None
    assert isinstance(condemned.error, UDFTimeoutError)


def test_a_hung_batch_is_a_suspect(store: InMemoryCheckpointStore) -> None:
    BatchGuard(retry(store), offsets(4, 7, 9)).hung(None)
    assert read_suspects(store, "job", [part(3)]) == (Suspect(4, 10, 3, hung=False),)
    assert retry(store).condemned(offsets(4)) is None


def test_the_note_goes_when_the_part_is_done(store: InMemoryCheckpointStore) -> None:
    retry(store).starting(offsets(1, 2))
    search = retry(store)
    search.clear()
    assert store.list_keys() == []
    search.clear()  # another attempt may have done so, too


def test_a_damaged_note_is_no_note(store: InMemoryCheckpointStore) -> None:
    retry(store).starting(offsets(1))
    store[KEY] = store[KEY].rename_columns(["other", "end", "rows", "tries", "hung"])
    assert read_suspects(store, "job", [part(3), part(4)]) == (None, None)
    assert retry(store).max_rows(offsets(1, 2), 2) == 2


def part(fragment_id: int) -> PartWork:
    made = PartWork(
        fragment_id=fragment_id,
        physical_rows=10,
        rows=RowRange(0, 10),
        compute=RowSet.full(10),
        covered=(),
        prefix="udf",
        window=10,
    )
    assert (note_key("job", made) == KEY) == (fragment_id == 3)
    return made
