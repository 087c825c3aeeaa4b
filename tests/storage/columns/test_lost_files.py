"""How files are looked for in a store: what it costs is bounded by how many they are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import lance
import pyarrow as pa
import pytest
from benchmarks.slow_store import SlowStore, slow_store

import geneva
from geneva import udf
from geneva.config import Settings
from geneva.execution.runner import InProcessRunner
from geneva.storage.columns.lost_files import is_worth_listing, missing_files


@pytest.mark.parametrize(
    ("wanted", "present", "listed", "expected"),
    [
        (1, 10, None, False),
        (16, 10, 10, False),
        (17, 100, None, True),
        (17, 100, 100, True),
        (17, 100, 1_000, False),
        (10_000, 20_000, None, True),
        (300, 1_000, None, True),
        (300, 20_000, None, False),
        (300, 1_000, 20_000, False),
        (10_000, 20_000, 600_000, True),
        (10_000, 20_000, 1_000_000, False),
    ],
)
def test_a_folder_is_listed_where_that_takes_fewer_requests_in_turn(
    wanted: int, present: int, listed: int | None, *, expected: bool
) -> None:
    assert is_worth_listing(wanted, present, listed) is expected


def fill(store: SlowStore, table: str, files: int) -> list[str]:
    """Put files into a table's data folder that no version has."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=store.endpoint,
        region_name="us-east-1",
        aws_access_key_id="bench",
        aws_secret_access_key="bench-secret",
    )
    names = [f"old{i:06}.lance" for i in range(files)]
    with ThreadPoolExecutor(16) as threads:
        keys = [f"db/{table}.lance/data/{name}" for name in names]
        list(threads.map(lambda key: client.put_object(Bucket="bench", Key=key, Body=b"x"), keys))
    client.close()
    return names


@udf(data_type=pa.int64(), version="1")
def same(id: pa.Array) -> pa.Array:
    return id


@pytest.mark.s3
@pytest.mark.slow
def test_looking_for_files_costs_as_much_as_there_are_files_to_look_for() -> None:
    with slow_store(0.0) as store:
        db = geneva.connect(
            store.uri,
            storage_options=store.options,
            runner=InProcessRunner,
            settings=Settings(local_slots=1, progress=False),
        )
        lance.write_dataset(
            pa.table({"id": range(20)}), f"{store.uri}/t.lance", storage_options=store.options
        )
        table = db.open_table("t")
        counts = []
        for name, stale in (("warm", 0), ("a", 0), ("b", 1_100)):
            names = fill(store, "t", stale)
            table.add_columns({name: same})
            store.requests()
            table.backfill(name)
            counts.append(store.requests())
        # Once before the commit, and once when the job ends; however many files there are.
        assert counts[1]["HEAD data"] == counts[2]["HEAD data"] == 2
        assert counts[2]["GET list"] <= counts[1]["GET list"]

        dataset = lance.dataset(table.ref.uri, storage_options=store.options)
        for wanted, heads, lists in ((15, 16, 0), (40, 1, 2), (600, 1, 2), (25, 26, 0)):
            store.requests()
            paths = [*names[:wanted], "gone.lance"]
            assert missing_files(table.ref, paths, dataset) == {"gone.lance"}
            found = store.requests()
            assert (found["HEAD data"], found["GET list"]) == (heads, lists)
