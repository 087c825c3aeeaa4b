"""What functions need on the machines that run them: packages, modules, variables."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from geneva.config import time_of, user_name
from geneva.secret_values import Secrets

if TYPE_CHECKING:
    from geneva.manifest.builder import (
        CondaManifestBuilder,
        PipManifestBuilder,
        SiteManifestBuilder,
    )

__all__ = ["GenevaManifest"]


@dataclass(frozen=True, kw_only=True)
class GenevaManifest:
    """An environment by name. Made by a builder: `GenevaManifest.create_pip("m").pip([...])`.

    On Spark: `env_vars` are set where functions run, `py_modules` are sent to the executors for the
    jobs of its contexts, and packages (`pip`, `conda`) must be installed there: on the embedded
    Spark, in this Python.
    Images are of Kubernetes with Ray; they are kept, and mean nothing here.
    """

    name: str = field(kw_only=False)
    version: str | None = None
    pip: list[str] = field(default_factory=list)
    py_modules: list[str] = field(default_factory=list)
    head_image: str | None = None
    worker_image: str | None = None
    skip_site_packages: bool = True
    delete_local_zips: bool = False
    local_zip_output_dir: str | None = None
    zips: list[list[str]] = field(default_factory=list)
    checksum: str = ""
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    created_by: str = field(default_factory=user_name)
    requirements_path: str | None = None
    conda: dict[str, Any] = field(default_factory=dict)
    conda_environment_path: str | None = None
    env_vars: dict[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Know the checksum, and the time that plain values have as text."""
        object.__setattr__(self, "created_at", time_of(self.created_at))
        if not self.checksum:
            object.__setattr__(self, "checksum", self.compute_checksum())

    def compute_checksum(self) -> str:
        """Digest what the manifest asks for, not when and by whom it was made."""
        facts = self.as_dict()
        for name in ("checksum", "created_at", "created_by"):
            del facts[name]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with values of variables that nobody reads by the way: it goes with functions."""
        facts = self.as_dict()
        return _opened, (facts, Secrets(facts.pop("env_vars")))

    def as_dict(self) -> dict[str, Any]:
        """The manifest as plain values."""
        return {**asdict(self), "created_at": self.created_at.isoformat()}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> GenevaManifest:
        """A manifest from plain values; what a later release has added is left out."""
        known = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in facts.items() if name in known})

    @staticmethod
    def create_pip(name: str) -> PipManifestBuilder:
        """Begin a manifest of packages that pip installs."""
        from geneva.manifest.builder import PipManifestBuilder

        return PipManifestBuilder(name)

    @staticmethod
    def create_conda(name: str) -> CondaManifestBuilder:
        """Begin a manifest of packages that conda installs."""
        from geneva.manifest.builder import CondaManifestBuilder

        return CondaManifestBuilder(name)

    @staticmethod
    def create_site(name: str) -> SiteManifestBuilder:
        """Begin a manifest of what is installed in this Python."""
        from geneva.manifest.builder import SiteManifestBuilder

        return SiteManifestBuilder(name)


def _opened(facts: dict[str, Any], env_vars: Secrets) -> GenevaManifest:
    return GenevaManifest(**facts, env_vars=dict(env_vars))
