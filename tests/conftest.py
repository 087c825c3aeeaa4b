"""Fixtures every test may use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from geneva.connection import Connection

# Both: no deadline, because a first call may import Lance or start a session.
settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "long",
    max_examples=1_000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("GENEVA_HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture
def db(tmp_path: Path) -> Connection:
    """An empty database of this test's own."""
    import geneva

    return geneva.connect(tmp_path / "db")


@pytest.fixture(scope="session")
def slow_rounds() -> int:
    """How often a slow test repeats itself (GENEVA_SLOW_ROUNDS; .ci/run asks for 1)."""
    return int(os.environ.get("GENEVA_SLOW_ROUNDS", "5"))
