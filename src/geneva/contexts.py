"""Contexts: where the jobs of a connection run, and with which packages and variables."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Any

from geneva.cluster import ClusterType, GenevaCluster
from geneva.compatibility import warn_compatibility
from geneva.config import environment
from geneva.errors import JobTimeoutError, UserInputError
from geneva.jobs import JobFuture
from geneva.manifest import GenevaManifest
from geneva.options import read_wait
from geneva.render.plain import plain
from geneva.udf.declare import UDF
from geneva.udf.reading import returns_only_none

if TYPE_CHECKING:
    from geneva.connection import Connection

_LOG = logging.getLogger("geneva")
_ENTERING = threading.Lock()
_REQUIREMENT = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)")


class ExitMode(StrEnum):
    """What becomes of a context's Spark session when the context ends."""

    DELETE = "DELETE"
    """All jobs of the context are waited for, then the session is stopped."""
    RETAIN_ON_FAILURE = "RETAIN_ON_FAILURE"
    """The same, but the session stays after a failure."""
    RETAIN = "RETAIN"
    """It stays, and nothing is waited for."""


@dataclass(slots=True)
class Context:
    """Where jobs run, from `with` to its end; `Connection.context` makes it.

    The embedded Spark, and a session that was given to `connect`, are not stopped at the end: they
    are not the context's.
    """

    connection: Connection
    cluster: GenevaCluster | None = None
    manifest: GenevaManifest | None = None
    on_exit: ExitMode = ExitMode.DELETE
    wait_timeout: timedelta | float | None = None
    futures: list[JobFuture] = field(default_factory=list)
    """Jobs that were started in it and may still be running."""
    _thread: threading.Thread | None = None
    """Which one entered it."""
    _session: Any = None
    _starting: threading.Lock = field(default_factory=threading.Lock)
    _undo: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        """Refuse here what can't be waited for: at the end of the block, work is done."""
        read_wait("wait_timeout", self.wait_timeout)

    def __enter__(self) -> Context:
        """Let the connection's jobs run here from now on: those of all threads."""
        if self.cluster is not None:
            _say_where(self.cluster)
        if self.manifest is not None:
            check_packages(self.manifest)
        with _ENTERING:
            self._refuse_beside_others()
            if self.manifest is not None:
                self._undo.enter_context(environment(self.manifest.env_vars))
            self._thread = threading.current_thread()
            self.connection._contexts.append(self)
            self._undo.callback(self.connection._contexts.remove, self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for the context's jobs, and end what is its own."""
        failed = kind is not None
        try:
            if self.on_exit is not ExitMode.RETAIN:
                failed = not self._all_ended_well() or failed
        except BaseException:
            failed = True
            raise
        finally:
            keep = self.on_exit is ExitMode.RETAIN or (
                failed and self.on_exit is ExitMode.RETAIN_ON_FAILURE
            )
            if self._session is not None and not keep:
                self._session.stop()
            self._session = None
            self._undo.close()

    def session(self) -> Any:
        """The Spark session of the cluster, started at first need; None: the connection's own."""
        address = self.cluster.spark_address if self.cluster is not None else None
        if address is None or self.cluster is None:
            return None
        with self._starting:  # jobs in the background ask for it at the same time
            if self._session is None:
                from geneva.spark.sessions import cluster_session

                self._session = cluster_session(address, self.cluster.spark_conf)
            return self._session

    @property
    def facts(self) -> dict[str, Any]:
        """What a job's record says of it."""
        facts: dict[str, Any] = {}
        if self.cluster is not None:
            facts["cluster"] = self.cluster.name
        if self.manifest is not None:
            facts["manifest"] = self.manifest.name
            facts["manifest_checksum"] = self.manifest.checksum
        return facts

    def _refuse_beside_others(self) -> None:
        """Refuse what would change where jobs of another thread run, in the middle of its block.

        A thread that has ended starts no more jobs. Its context is around this one, like one of the
        main thread: somebody may end it yet.
        """
        may_be_inside = (threading.current_thread(), threading.main_thread())
        for other in self.connection._contexts:
            thread = other._thread
            if thread is None or thread in may_be_inside:
                continue
            name = plain(thread.name)
            if thread.is_alive():
                raise UserInputError(
                    f"Thread {name!r} is inside a context of this connection, and a context is of "
                    "the whole connection: its jobs would get this one's cluster, modules and "
                    "variables. Use a connection for each thread (geneva.connect in it), or enter "
                    "one context around all threads."
                )
            _LOG.warning(
                "Thread %r has ended inside a context of this connection, whose modules and "
                "variables stay until its __exit__ is called.",
                name,
            )

    def _all_ended_well(self) -> bool:
        seconds = read_wait("wait_timeout", self.wait_timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        for future in self.futures:
            rest = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not future.wait(rest):
                raise JobTimeoutError(
                    f"Job {future.job_id} is still running after wait_timeout={seconds} s. It goes "
                    "on in this process."
                )
        return all(future.ended_well() for future in self.futures)


def _say_where(cluster: GenevaCluster) -> None:
    """Say that a description of a Ray cluster means this machine."""
    if cluster.spark_address is None and cluster.cluster_type != ClusterType.LOCAL:
        warn_compatibility(
            f"context(cluster={cluster.name!r})",
            "it names no Spark master, so that jobs run where the connection's own session is; "
            "give one with GenevaCluster.create_spark(name).master('spark://...')",
        )


def check_functions(functions: Iterable[UDF]) -> None:
    """Say of functions that are declared what their manifests name and this Python lacks.

    And which of them can be seen to compute nothing.
    """
    given = tuple(functions)
    for udf in given:
        if returns_only_none(udf):
            _LOG.warning(
                "Function %r returns nothing but None, so that all of its values will be NULL. If "
                "that is not meant, look for a missing `return`.",
                plain(udf.name),
            )
    manifests = {id(udf.manifest): udf.manifest for udf in given}
    for manifest in manifests.values():
        if isinstance(manifest, GenevaManifest):
            check_packages(manifest)


def check_packages(manifest: GenevaManifest) -> None:
    """Say which packages of a manifest are not installed in this Python: nothing installs them."""
    missing = [package for package in manifest.pip if not _is_installed(package)]
    if missing:
        warn_compatibility(
            f"manifest {manifest.name!r}",
            f"{missing} are not installed in this Python, and Spark installs nothing: pip install "
            "them where functions run",
        )
    if manifest.conda or manifest.conda_environment_path:
        warn_compatibility(
            f"manifest {manifest.name!r}",
            "the conda environment is kept, and not made: start Spark in it",
        )


def _is_installed(requirement: str) -> bool:
    name = _REQUIREMENT.match(requirement)
    if name is None or ("://" in requirement and "@" not in requirement):  # a path, or a URL
        return True
    from importlib.metadata import PackageNotFoundError, version

    try:
        version(name[1])
    except PackageNotFoundError:
        return False
    return True


def modules_of(manifests: Sequence[GenevaManifest | None]) -> list[str]:
    """The folders and files of modules that manifests name."""
    return [
        module for manifest in manifests if manifest is not None for module in manifest.py_modules
    ]
