"""moto, started as `python s3_of_minio.py -H host -p port`; it tells times as MinIO does.

A listing has milliseconds, a HEAD request whole seconds. moto itself lists whole seconds.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from moto.core import serialize
from moto.s3 import models
from moto.server import main


def milliseconds(time: datetime) -> str:
    return f"{time:%Y-%m-%dT%H:%M:%S}.{time.microsecond // 1000:03d}Z"


def listed(key: Any) -> str:
    return milliseconds(key.last_modified)


def serialized(_: Any, time: datetime) -> str:
    return milliseconds(time)


if __name__ == "__main__":
    models.FakeKey.last_modified_ISO8601 = property(listed)  # type: ignore[assignment]
    # moto reads the text again, and writes it anew.
    serialize.TimestampSerializer._timestamp_iso8601_zeroed = serialized  # type: ignore[method-assign]
    main()
