"""Where a table is and what is asked of it, as texts: without a session."""

from __future__ import annotations

import pytest

from geneva.errors import UserInputError
from geneva.model.tables import Secrets
from geneva.spark.source.options import table_ref, write_options
from geneva.spark.source.source import TableSource


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("http://x/y.lance", "http://x/y.lance' can't be opened: .*scheme: 'http'"),
        ("s3://", "'s3://' names no table"),
        ("s3://KEY:hunter2@bucket/y.lance", "keys in the URI of 's3://bucket/y.lance'"),
    ],
)
def test_addresses_of_no_table(path: str, why: str) -> None:
    with pytest.raises(UserInputError, match=why) as error:
        TableSource({"path": path})
    assert "hunter2" not in str(error.value)


def test_a_container_is_no_key() -> None:
    uri = "abfss://container@account.dfs.core.windows.net/db/y.lance"
    assert table_ref({"path": uri}, Secrets(), "/").uri == uri


def test_views_of_spark_are_read_only() -> None:
    with pytest.raises(UserInputError, match=r"read-only.*save\(uri\)"):
        write_options({"columns": "a", "blobs": "bytes", "version": "3"})
