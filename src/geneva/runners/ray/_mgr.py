"""`ray_cluster`, which published programs use: here it is the environment of this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from geneva.compatibility import warn_compatibility
from geneva.config import environment

__all__ = ["ray_cluster"]


@contextmanager
def ray_cluster(
    name: str | None = None,
    *,
    local: bool = False,
    extra_env: Mapping[str, str] | None = None,
    **options: Any,
) -> Iterator[None]:
    """Run jobs on this machine from `with` to its end; `extra_env` is set meanwhile."""
    if not local:
        warn_compatibility(
            "ray_cluster(...)",
            "jobs run on the connection's Spark session; give one to geneva.connect(spark=...)",
        )
    with environment({str(k): str(v) for k, v in (extra_env or {}).items()}):
        yield
