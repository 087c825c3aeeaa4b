"""The retry loop of commits, against scripted conflicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lance
import pyarrow as pa
import pytest
from lance.commit import CommitConflictError

from geneva.errors import TableNotFoundError
from geneva.storage.lance import commit
from geneva.storage.lance.commit import is_conflict, pause_seconds, retry_conflicts

CONFLICT = CommitConflictError("preempted")


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waited: list[float] = []
    monkeypatch.setattr(commit.time, "sleep", waited.append)
    return waited


def scripted(*steps: Exception | str) -> Callable[[], str]:
    """An attempt that raises or returns the next step at each call."""
    left = iter(steps)

    def attempt() -> str:
        step = next(left)
        if isinstance(step, Exception):
            raise step
        return step

    return attempt


def test_no_conflict_no_pause(pauses: list[float]) -> None:
    assert retry_conflicts(scripted("landed"), 3) == "landed"
    assert pauses == []


def test_it_tries_again_after_each_conflict(pauses: list[float]) -> None:
    assert retry_conflicts(scripted(CONFLICT, CONFLICT, "landed"), 2) == "landed"
    assert len(pauses) == 2


def test_a_file_that_is_gone_is_a_conflict_once(pauses: list[float]) -> None:
    """Its version was cleaned up, unless it is still read in the next version."""
    gone = OSError("LanceError(IO): Generic N/A error: Not found: t.lance/_versions/5.manifest")
    another = pa.ArrowInvalid("External error: Not found: t.lance/_deletions/2-3-9.arrow")
    assert retry_conflicts(scripted(gone, another, CONFLICT, "landed"), 3) == "landed"
    assert len(pauses) == 3
    with pytest.raises(OSError, match=r"5\.manifest"):
        retry_conflicts(scripted(gone, gone, "landed"), 3)
    dropped = TableNotFoundError("There is no table 't'.")
    with pytest.raises(TableNotFoundError):
        retry_conflicts(scripted(dropped, "landed"), 3)


def test_conflicts_of_lancedb_are_runtime_errors(pauses: list[float]) -> None:
    conflict = RuntimeError("lance error: Retryable commit conflict for version 3: ...")
    assert retry_conflicts(scripted(conflict, "landed"), 1) == "landed"
    with pytest.raises(RuntimeError, match="another"):
        retry_conflicts(scripted(RuntimeError("another"), "never"), 5)
    assert len(pauses) == 1


def test_the_last_conflict_is_raised_when_the_retries_are_used_up(pauses: list[float]) -> None:
    last = CommitConflictError("the third")
    with pytest.raises(CommitConflictError) as caught:
        retry_conflicts(scripted(CONFLICT, CONFLICT, last, "never"), 2)
    assert caught.value is last
    assert len(pauses) == 2


def test_what_the_caller_says_is_raised_in_its_place() -> None:
    refusal = RuntimeError("others kept getting in between")
    with pytest.raises(RuntimeError, match="others kept") as caught:
        retry_conflicts(scripted(CONFLICT), 0, refusal)
    assert caught.value.__cause__ is CONFLICT


@pytest.mark.parametrize("error", [OSError("disk full"), ValueError("commit conflict")])
def test_other_errors_are_not_tried_again(error: Exception, pauses: list[float]) -> None:
    with pytest.raises(type(error)):
        retry_conflicts(scripted(error, "never"), 5)
    assert pauses == []


def test_pauses_grow_to_a_second_and_are_spread() -> None:
    for retries, longest in ((0, 0.05), (1, 0.1), (3, 0.4), (10, 1.0), (5_000, 1.0)):
        found = [pause_seconds(retries) for _ in range(200)]
        assert 0 <= min(found) < longest / 4
        assert longest * 3 / 4 < max(found) <= longest


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CONFLICT, True),
        (OSError("Commit conflict for version 7: ..."), True),
        (OSError("Incompatible transaction: ..."), True),
        (OSError("Invalid: fragment being replaced not found"), True),
        (OSError("LanceError(IO): no space left on device"), False),
        (FileNotFoundError("gone"), False),
    ],
)
def test_which_errors_are_conflicts(error: OSError, expected: bool) -> None:
    assert is_conflict(error) is expected


def test_a_commit_on_an_old_version_is_a_conflict_to_lance(tmp_path: Path) -> None:
    stale = lance.write_dataset(pa.table({"x": [1, 2, 3]}), tmp_path / "t.lance")
    lance.dataset(stale.uri).delete("x = 1")
    lance.dataset(stale.uri).optimize.compact_files()

    def attempt() -> int:
        fragment = stale.get_fragments()[0].delete("x = 2")
        operation = lance.LanceOperation.Delete([fragment], [], "x = 2")
        return int(lance.LanceDataset.commit(stale, operation, read_version=1).version)

    with pytest.raises(OSError, match=r"(?i)conflict|incompatible") as caught:
        retry_conflicts(attempt, 1)
    assert is_conflict(caught.value)
