"""The words with which programs for Geneva on Ray describe a cluster on Kubernetes."""

from __future__ import annotations

from typing import Any

from geneva.cluster import K8sConfigMethod, WorkerGroup
from geneva.contexts import ExitMode

__all__ = ["ExitMode", "K8sConfigMethod", "WorkerGroup", "get_ray_image"]


class _GroupSpec:
    """What is asked of a group of nodes, kept as it was given; here it means nothing."""

    def __init__(self, **facts: Any) -> None:
        """Keep the facts."""
        self.__dict__.update(facts)

    def __repr__(self) -> str:
        """Show the facts."""
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"


class _HeadGroupSpec(_GroupSpec):
    """The head node of `ray_cluster(head_group=...)`."""


class _WorkerGroupSpec(_GroupSpec):
    """The workers of `ray_cluster(worker_groups=[...])`."""


def get_ray_image(ray_version: str, python_version: str, *, gpu: bool = False) -> str:
    """The name of Ray's own image for a version of Ray and of Python: nothing here pulls it."""
    python = "py" + "".join(python_version.split(".")[:2])
    return f"rayproject/ray:{ray_version}-{python}{'-gpu' if gpu else ''}"
