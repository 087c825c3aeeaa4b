"""Building manifests, word by word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from geneva.errors import UserInputError
from geneva.manifest import GenevaManifest

_LINES_LEFT_OUT = ("#", "-")


class ManifestBuilder:
    """What all kinds of manifests can be given. Each method returns the builder."""

    def __init__(self, name: str) -> None:
        """Begin a manifest."""
        if not str(name or "").strip():
            raise UserInputError(f"A manifest needs a name, not {name!r}.")
        self._facts: dict[str, Any] = {"name": name}

    @classmethod
    def create(cls, name: str) -> Self:
        """Begin a manifest."""
        return cls(name)

    def _with(self, **facts: Any) -> Self:
        self._facts.update(facts)
        return self

    def _instead_of(self, other: str, **facts: Any) -> Self:
        """Take a fact that excludes another one."""
        if self._facts.get(other):
            (given,) = facts
            raise UserInputError(
                f"Manifest {self._facts['name']!r}: give {given} or {other}, not both."
            )
        return self._with(**facts)

    def version(self, version: str) -> Self:
        """Name the version."""
        return self._with(version=version)

    def py_modules(self, modules: Sequence[str]) -> Self:
        """Folders and files of Python modules that functions import."""
        return self._with(py_modules=[str(module) for module in modules])

    def add_py_module(self, module: str) -> Self:
        """One more of them."""
        return self._with(py_modules=[*self._facts.get("py_modules", []), str(module)])

    def env_vars(self, variables: Mapping[str, str]) -> Self:
        """Environment variables to set where functions run."""
        return self._with(env_vars={str(k): str(v) for k, v in variables.items()})

    def head_image(self, image: str) -> Self:
        """Keep an image's name: it is of Ray on Kubernetes."""
        return self._with(head_image=image)

    def default_head_image(self) -> Self:
        """No image in particular."""
        return self._with(head_image=None)

    def worker_image(self, image: str) -> Self:
        """Keep an image's name: it is of Ray on Kubernetes."""
        return self._with(worker_image=image)

    def default_worker_image(self) -> Self:
        """No image in particular."""
        return self._with(worker_image=None)

    def skip_site_packages(self, skip: bool) -> Self:  # noqa: FBT001
        """Whether installed packages are not uploaded; none are, on Spark."""
        return self._with(skip_site_packages=bool(skip))

    def delete_local_zips(self, delete: bool) -> Self:  # noqa: FBT001
        """Whether archives of modules are removed after they were sent."""
        return self._with(delete_local_zips=bool(delete))

    def local_zip_output_dir(self, folder: str | Path) -> Self:
        """Where archives of modules are made."""
        return self._with(local_zip_output_dir=str(folder))

    def build(self) -> GenevaManifest:
        """Make the manifest."""
        return GenevaManifest(**self._facts)


class PipManifestBuilder(ManifestBuilder):
    """A manifest of packages that pip installs."""

    def pip(self, packages: Sequence[str]) -> Self:
        """The packages, as pip takes them."""
        return self._instead_of("requirements_path", pip=[str(package) for package in packages])

    def requirements_path(self, path: str | Path) -> Self:
        """A file that lists them."""
        return self._instead_of("pip", requirements_path=str(path))

    def build(self) -> GenevaManifest:
        """Make the manifest; a file of requirements is read now."""
        path = self._facts.get("requirements_path")
        if path is not None:
            lines = (line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines())
            packages = [line for line in lines if line and not line.startswith(_LINES_LEFT_OUT)]
            return GenevaManifest(**{**self._facts, "pip": packages})
        return super().build()


class CondaManifestBuilder(ManifestBuilder):
    """A manifest of packages that conda installs."""

    def conda(self, environment: Mapping[str, Any]) -> Self:
        """The environment, as in a conda file."""
        return self._instead_of("conda_environment_path", conda=dict(environment))

    def conda_environment_path(self, path: str | Path) -> Self:
        """A file that has it."""
        return self._instead_of("conda", conda_environment_path=str(path))


class SiteManifestBuilder(ManifestBuilder):
    """A manifest of what is installed in this Python."""
