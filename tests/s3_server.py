"""A real S3 server on this machine: moto, in a process of its own, on a free port of loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cluster import wait_for

ACCESS_KEY = "AKIAGENEVATESTONLY00"
SECRET_KEY = "s3cr3t/Zq8+NeverInTheClear+40characters00"
_SERVER = Path(__file__).with_name("s3_of_minio.py")


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket of one test's own."""

    endpoint: str
    name: str
    client: Any = field(repr=False)

    @property
    def uri(self) -> str:
        """Return the bucket as a database."""
        return f"s3://{self.name}/db"

    @property
    def storage_options(self) -> dict[str, str]:
        """Return what it takes to open it."""
        return {
            "aws_access_key_id": ACCESS_KEY,
            "aws_secret_access_key": SECRET_KEY,
            "aws_region": "us-east-1",
            "aws_endpoint": self.endpoint,
            "allow_http": "true",
        }

    def keys(self, under: str = "") -> list[str]:
        """Return the names of the objects below a folder of the database."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.name, Prefix=f"db/{under}"
        )
        return [item["Key"] for page in pages for item in page.get("Contents", ())]

    def objects(self) -> Iterator[tuple[str, bytes]]:
        """Yield every object with its content."""
        for key in self.keys():
            yield key, self.client.get_object(Bucket=self.name, Key=key)["Body"].read()


@contextmanager
def running_server() -> Iterator[str]:
    """Start the server; yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            [sys.executable, str(_SERVER), "-H", "127.0.0.1", "-p", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # moto keeps objects above this size in files; ours are small, and stay in memory.
            env={**os.environ, "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(64 * 1024 * 1024)},
        )

        def answers() -> bool:
            if server.poll() is not None:
                log.seek(0)
                pytest.fail(f"moto ended: {log.read().decode()}")
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        try:
            wait_for(answers, "the S3 server")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()
            server.wait()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """Return the address of this session's S3 server."""
    with running_server() as endpoint:
        yield endpoint


@pytest.fixture
def bucket(s3_endpoint: str) -> Iterator[Bucket]:
    """Return an empty bucket."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=s3_endpoint,
        region_name="us-east-1",
        aws_access_key_id="admin",
        aws_secret_access_key="admin",
    )
    name = f"test-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=name)
    yield Bucket(s3_endpoint, name, client)
    client.close()
